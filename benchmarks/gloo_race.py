"""A crash of torch's gloo groups, with torch alone: two threads write one string.

`ProcessGroupGloo::runLoop` notes the name of each work that it has finished in a string of the
group (`lastCompletedWorkName`) and holds no lock for it. A name of more than 15 characters is on
the heap: two threads that finish at once free the same memory. "ALLGATHER_COALESCED" is such a
name, and that of the functional all-gather; "ALLGATHER" is none, and sends the same. One rank is
enough. shardc has the functional all-gather run as the latter.

    python benchmarks/gloo_race.py

runs each kind in processes of its own and prints how they ended. Expected: only long names, on two
threads or more, end by a signal, SIGSEGV or SIGABRT ("malloc(): unaligned tcache chunk detected").
"functional" is the functional all-gather on the default group, as torch has it and with shardc.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

WORKS = 64


def gather(name: str, threads: int, seconds: float, at_once: int) -> int:
    """Gather over one rank for so long, so many `at_once`; how often."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]  # type: ignore[attr-defined]
    options._threads = threads
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)  # type: ignore[call-overload]
    part = torch.ones(8)
    start = {"ALLGATHER_COALESCED": group.allgather_coalesced, "ALLGATHER": group.allgather}[name]
    return _repeat(
        lambda: start([[torch.empty(8)]], [part]), lambda work: work.wait(), seconds, at_once
    )


def gather_functional(with_shardc: bool, seconds: float, at_once: int) -> int:
    """The same by the functional all-gather over the default group."""
    import torch.distributed._functional_collectives  # registers the ops

    if with_shardc:
        import shardc  # noqa: F401 (has it run as another)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    part = torch.ones(8)
    return _repeat(
        lambda: ops.all_gather_into_tensor(part, 1, name), ops.wait_tensor, seconds, at_once
    )


def _repeat(
    start: Callable[[], Any], wait: Callable[[Any], Any], seconds: float, at_once: int
) -> int:
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for started in [start() for _ in range(at_once)]:
            wait(started)
        done += at_once
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long each gathers")
    parser.add_argument("--runs", type=int, default=3, help="of each")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only:
        name, threads, at_once = given.only
        if name.startswith("functional"):
            print(gather_functional("shardc" in name, given.seconds, int(at_once)), flush=True)
        else:
            print(gather(name, int(threads), given.seconds, int(at_once)), flush=True)
        os._exit(0)
    print(f"{'name of the works':21} threads  at once  exit codes of {given.runs} runs")
    for name, threads, at_once in (
        ("ALLGATHER_COALESCED", 8, WORKS),
        ("ALLGATHER_COALESCED", 2, WORKS),
        ("ALLGATHER_COALESCED", 2, 1),
        ("ALLGATHER_COALESCED", 1, WORKS),
        ("ALLGATHER", 8, WORKS),
        ("functional", 2, WORKS),
        ("functional, shardc", 2, WORKS),
    ):
        command = [sys.executable, __file__, "--seconds", str(given.seconds)]
        command += ["--only", name, str(threads), str(at_once)]
        codes = [subprocess.run(command, capture_output=True).returncode for _ in range(given.runs)]
        print(f"{name:21} {threads:7}  {at_once:7}  {codes}", flush=True)


if __name__ == "__main__":
    main()
