"""Compile time, cold and warm: CPU time of shardc and FSDP2 against plain torch.compile.

    python benchmarks/compile_time.py --blocks 4 8 --pairs 5
    python benchmarks/compile_time.py --blocks 8 --ranks 4 --sides fsdp2-blocks shardc-blocks

Each run is a fresh process with one compile thread; it counts user and system time, compiler
processes included, from the first call to the end of the first backward. A cold run starts with an
empty Inductor cache; a warm one is a second process with the cache that the cold one left. Sides
are interleaved, and ratios are between runs of the same pair. The sharded sides compile for 2 ranks
over torch's fake process group, so nothing waits for a wire; with `--ranks` they are so many
processes over gloo, and the seconds those of all. FSDP2 compiles each block, as its authors advise,
and runs what is between them eagerly. `shardc-gpu-layout` has the buckets of a GPU: the vectors of
large blocks (`--dim 256` and up) lie in the model's.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from kept import add_keep_option, show
from processes import median_ratio
from tqdm import tqdm

SIDES = ("plain", "fsdp2-blocks", "shardc", "shardc-gpu-layout", "shardc-blocks")


def main() -> None:
    """Run the pairs and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[4],
                        help="blocks of the model, one size or several (default 4)")  # fmt: skip
    parser.add_argument("--dim", type=int, default=128, help="model width (default 128)")
    parser.add_argument("--pairs", type=int, default=2, help="interleaved pairs (default 2)")
    parser.add_argument("--ranks", type=int, default=1,
                        help="processes that compile at the same time (default 1)")  # fmt: skip
    parser.add_argument("--folders", choices=("one", "each"), default="one",
                        help="whether ranks share a cache folder (default one)")  # fmt: skip
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=SIDES,
                        help="what is compared with the first of them (default: all)")  # fmt: skip
    add_keep_option(parser)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args.blocks[0], args.dim, args.ranks)))
        return
    rows = []
    total = len(args.blocks) * args.pairs * len(args.sides)
    with tqdm(total=total, unit="run", leave=False) as bar:
        for blocks in args.blocks:
            rows += _rows(blocks, run_pairs(blocks, args, bar))
    first = args.sides[0]
    headers = ["side", "blocks", "cold CPU s", f"cold / {first}", "warm CPU s", f"warm / {first}"]
    show(headers, rows, args.keep)


def run_pairs(
    blocks: int, args: argparse.Namespace, progress: Any
) -> dict[str, list[tuple[float, float]]]:
    """The (cold, warm) CPU seconds of every side and pair; odd pairs go in reverse order."""
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in args.sides}
    for number in range(args.pairs):
        for side in args.sides[:: -1 if number % 2 else 1]:
            progress.set_description(f"{blocks} blocks, {side}")
            with tempfile.TemporaryDirectory() as cache:
                cold, warm = (run(side, blocks, args, cache) for _ in range(2))
            seconds[side].append((cold, warm))
            progress.update()
    return seconds


def _rows(blocks: int, seconds: dict[str, list[tuple[float, float]]]) -> list[list[str | int]]:
    rows: list[list[str | int]] = []
    first = next(iter(seconds.values()))
    for side, pairs in seconds.items():
        row: list[str | int] = [side, blocks]
        for cache in (0, 1):  # cold, warm
            times, others = ([pair[cache] for pair in each] for each in (pairs, first))
            row += [f"{statistics.median(times):.2f}", median_ratio(times, others)]
        rows.append(row)
    return rows


def run(side: str, blocks: int, args: argparse.Namespace, cache: str) -> float:
    """Fresh processes with that Inductor cache, a rank each; the CPU seconds of all."""
    command = [sys.executable, __file__, f"--blocks={blocks}", f"--dim={args.dim}",
               f"--side={side}", f"--ranks={args.ranks}"]  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(args.ranks):
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/{rank if args.folders == 'each' else 0}",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(args.ranks),
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=env, **pipes))
    seconds = 0.0
    for process in ranks:
        out, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"{side} failed:\n{errors}")
        seconds += float(json.loads(out.strip().split("\n")[-1]))
    return seconds


def measure(side: str, blocks: int, dim: int, ranks: int) -> float:
    """CPU seconds from the first call to the end of the first backward, in this process."""
    import peers
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg
    from torch.distributed.device_mesh import init_device_mesh

    model = llama(blocks, dim)
    if ranks == 1:
        dist.init_process_group("fake", rank=0, world_size=2)
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    step = peers.ALL[side](model, mesh, calibrated=False)  # a fake wire has no speed to measure
    tokens = torch.randint(512, (2, 16))
    before = cpu_seconds()
    step(tokens, labels=tokens).loss.backward()
    used = cpu_seconds() - before
    if ranks > 1:
        dist.barrier()
    return used


def llama(blocks: int, dim: int) -> Any:
    """A Llama of transformers, with 512 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=blocks,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def cpu_seconds() -> float:
    """User and system time of this process and the children it waited for."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    main()
