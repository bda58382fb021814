"""Train, save, kill ranks at random, resume: the end must equal an undisturbed run, bit by bit.

`python tests/soak.py --minutes 3` prints what happens and exits with 1 if the runs differ. A run is
two rank processes that train a compiled model with AdamW, checkpoint with
`torch.distributed.checkpoint`, and start from the newest complete checkpoint. Kills are SIGKILL, at
any moment, also while a checkpoint is written; after one, the run is started again.

`python tests/soak.py --minutes 20 --steady compiled` kills nobody: two ranks train for so long,
save and collect garbage every few steps, and print how much they did. `--steady uncompiled` leaves
the compiler out. Either way a rank that ends by itself with anything but 0 is a failure.
"""

import argparse
import gc
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Stack, seeded, tokens

RANKS = 2
SAVE_EVERY = 5


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; one is complete once it was renamed."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != ".part")


def train(folder: Path, steps: int, pause: float) -> None:
    """One rank: resume, train to `steps`, save."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = _build()
    call = torch.compile(model, backend="shardc", options={"executor": "eager"})
    start, found = 0, checkpoints(folder)
    if found:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=found[-1])
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        start = int(found[-1].name.removeprefix("step-"))
    for number in range(start, steps):
        _step(call, model, optimizer, number)
        time.sleep(pause)
        if (number + 1) % SAVE_EVERY == 0:
            _save(folder, number + 1, model, optimizer)
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, folder / "end.part")
        (folder / "end.part").rename(folder / "end")
    dist.destroy_process_group()


def endure(folder: Path, minutes: float, how: str) -> None:
    """One rank: train for so long, save and collect garbage, print how much was done."""
    from shardc.runtime.watch.progress import progress

    model, optimizer = _build()
    options = {"executor": "eager"}
    call = torch.compile(model, backend="shardc", options=options) if how == "compiled" else model
    number, end, over = 0, time.monotonic() + 60 * minutes, torch.zeros(1)
    while not over.item():
        _step(call, model, optimizer, number)
        number += 1
        if number % SAVE_EVERY == 0:
            _save(folder, number, model, optimizer)
            if dist.get_rank() == 0:
                for old in checkpoints(folder)[:-2]:
                    shutil.rmtree(old)
            gc.collect()
            over.fill_(time.monotonic() > end)
            dist.all_reduce(over, dist.ReduceOp.MAX)
    print(
        f"rank {dist.get_rank()}, {how}: {number} steps, {number // SAVE_EVERY} saves, "
        f"{progress.started} collectives",
        flush=True,
    )
    dist.destroy_process_group()


def _build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from shardc import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = fully_shard(seeded(Stack, 0), units="auto")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(
    call: Callable[..., torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    number: int,
) -> None:
    seed = RANKS * number + dist.get_rank()
    call(tokens(seed), tokens(seed + 10_000)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _save(
    folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    part = folder / f"step-{step:06}.part"
    dcp.save(state, checkpoint_id=part)
    if dist.get_rank() == 0:
        part.rename(folder / f"step-{step:06}")


def start(folder: Path, *arguments: object) -> list[subprocess.Popen]:
    """Start the rank processes of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--folder", str(folder), *map(str, arguments)]
    return [
        subprocess.Popen(
            command,
            env=os.environ
            | {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "RANK": str(rank), "WORLD_SIZE": str(RANKS),
            },
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip


def finish(ranks: list[subprocess.Popen]) -> None:
    """Wait for the rank processes. Raises if one did not end well."""
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.01)
    codes = [rank.poll() for rank in ranks]
    if any(codes):
        stop([rank for rank in ranks if rank.poll() is None])
        errors = [rank.communicate()[1] for rank in ranks]
        raise SystemExit(f"ranks that nobody killed exited with {codes}:\n{errors}")


def stop(ranks: list[subprocess.Popen]) -> None:
    """End what is left of a run."""
    for rank in ranks:
        rank.kill()
        rank.communicate()


def soak(minutes: float, steps: int, seed: int) -> int:
    """Run undisturbed and disturbed; how often ranks were killed. Raises if the ends differ."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        calm, rough = Path(root, "calm"), Path(root, "rough")
        calm.mkdir()
        finish(start(calm, "--steps", steps))
        print(f"undisturbed: {steps} steps")
        rough.mkdir()
        kills, end = 0, time.monotonic() + minutes * 60
        while not (rough / "end").exists():
            if time.monotonic() > end:
                finish(start(rough, "--steps", steps))
                continue
            ranks = start(rough, "--steps", steps, "--pause", 0.05)
            kills += _disturb(ranks, rough, chance)
        want, got = (torch.load(folder / "end") for folder in (calm, rough))
    different = [name for name in want if not torch.equal(want[name], got[name])]
    if different or not kills:
        raise SystemExit(f"after {kills} kills these differ: {different}")
    return kills


def _disturb(ranks: list[subprocess.Popen], folder: Path, chance: random.Random) -> int:
    """Kill one rank at a random moment, if the run does not end before; how many were killed."""
    begun, deadline = len(checkpoints(folder)), time.monotonic() + chance.uniform(4, 20)
    while time.monotonic() < deadline and all(rank.poll() is None for rank in ranks):
        time.sleep(0.01)
        if len(checkpoints(folder)) > begun + 1 and chance.random() < 0.05:
            break
    if any(rank.poll() is not None for rank in ranks):
        finish(ranks)
        return 0
    chance.choice(ranks).send_signal(signal.SIGKILL)
    time.sleep(chance.uniform(0, 0.5))
    stop(ranks)
    done = checkpoints(folder)
    print(f"killed a rank; {done[-1].name if done else 'no checkpoint yet'}")
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="for how long it runs")
    parser.add_argument("--steps", type=int, default=2500, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument(
        "--steady", choices=("compiled", "uncompiled"), help="kill nobody, train for the minutes"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None and given.steady:
        endure(given.folder, given.minutes, given.steady)
        return
    if given.folder is not None:
        train(given.folder, given.steps, given.pause)
        return
    if given.steady:
        with tempfile.TemporaryDirectory() as root:
            finish(start(Path(root), "--minutes", given.minutes, "--steady", given.steady))
        return
    kills = soak(given.minutes, given.steps, given.seed)
    print(f"equal bits after {kills} kills")


if __name__ == "__main__":
    main()
