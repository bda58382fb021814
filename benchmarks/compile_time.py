"""Cold compile: CPU time of shardc against plain torch.compile, in interleaved pairs.

    python benchmarks/compile_time.py --blocks 8 --pairs 5

Each run is a fresh process with an empty Inductor cache and one compile thread; it counts user and
system time, compiler processes included, from the first call to the end of the first backward. The
shardc side compiles for 2 ranks over torch's fake process group, so nothing waits for a wire.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

from tabulate import tabulate


def main() -> None:
    """Run the pairs and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the model (default 8)")
    parser.add_argument("--dim", type=int, default=128, help="model width (default 128)")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs (default 5)")
    parser.add_argument("--side", choices=["plain", "shardc"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args.blocks, args.dim)))
        return
    seconds: dict[str, list[float]] = {"plain": [], "shardc": []}
    for number in range(args.pairs):
        for side in seconds if number % 2 == 0 else reversed(seconds):
            seconds[side].append(run(side, args.blocks, args.dim))
        print(f"pair {number + 1}: " + ", ".join(f"{s} {v[-1]:.1f} s" for s, v in seconds.items()))
    ratios = [s / p for s, p in zip(seconds["shardc"], seconds["plain"], strict=True)]
    rows = [
        [name, f"{min(v):.2f}", f"{statistics.median(v):.2f}", f"{max(v):.2f}"]
        for name, v in [*seconds.items(), ("shardc / plain, pair by pair", ratios)]
    ]
    print(tabulate(rows, headers=["cold compile, CPU seconds", "min", "median", "max"]))


def run(side: str, blocks: int, dim: int) -> float:
    """One fresh process; its CPU seconds."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, f"--blocks={blocks}", f"--dim={dim}", f"--side={side}"]
        out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return float(json.loads(out.strip().split("\n")[-1]))


def measure(side: str, blocks: int, dim: int) -> float:
    """CPU seconds from the first call to the end of the first backward, in this process."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=blocks,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if side == "plain":
        step = torch.compile(model)
    else:
        import torch.testing._internal.distributed.fake_pg

        from shardc import fully_shard

        dist.init_process_group("fake", rank=0, world_size=2)
        fully_shard(model, units="auto")
        step = torch.compile(model, backend="shardc")
    tokens = torch.randint(512, (2, 16))
    before = cpu_seconds()
    step(tokens, labels=tokens).loss.backward()
    return cpu_seconds() - before


def cpu_seconds() -> float:
    """User and system time of this process and the children it waited for."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    main()
