"""A crash of torch's gloo groups, with torch alone: two threads write one string.

`ProcessGroupGloo::runLoop` notes the name of each work that it has finished in a string of the
group (`lastCompletedWorkName`) and holds no lock for it. A name of more than 15 characters is on
the heap: two threads that finish at once free the same memory. "ALLGATHER_COALESCED" is such a
name, and that of the functional all-gather; "ALLGATHER" is none, and sends the same. One rank is
enough.

    python benchmarks/gloo_race.py

runs each kind in processes of its own and prints how they ended. Expected: only long names, on two
threads or more, end by a signal, SIGSEGV or SIGABRT ("malloc(): unaligned tcache chunk detected").
"""

import argparse
import subprocess
import sys
import time

import torch
import torch.distributed as dist

WORKS = 64


def gather(name: str, threads: int, seconds: float, at_once: int) -> int:
    """Gather over one rank for so long, so many `at_once`; how often."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]  # type: ignore[attr-defined]
    options._threads = threads
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)  # type: ignore[call-overload]
    part, end, done = torch.ones(8), time.monotonic() + seconds, 0
    start = {"ALLGATHER_COALESCED": group.allgather_coalesced, "ALLGATHER": group.allgather}[name]
    while time.monotonic() < end:
        works = [start([[torch.empty(8)]], [part]) for _ in range(at_once)]
        for work in works:
            work.wait()
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
        print(gather(name, int(threads), given.seconds, int(at_once)))
        return
    print(f"{'name of the works':21} threads  at once  exit codes of {given.runs} runs")
    for name, threads, at_once in (
        ("ALLGATHER_COALESCED", 8, WORKS),
        ("ALLGATHER_COALESCED", 2, WORKS),
        ("ALLGATHER_COALESCED", 2, 1),
        ("ALLGATHER_COALESCED", 1, WORKS),
        ("ALLGATHER", 8, WORKS),
    ):
        command = [sys.executable, __file__, "--seconds", str(given.seconds)]
        command += ["--only", name, str(threads), str(at_once)]
        codes = [subprocess.run(command, capture_output=True).returncode for _ in range(given.runs)]
        print(f"{name:21} {threads:7}  {at_once:7}  {codes}", flush=True)


if __name__ == "__main__":
    main()
