"""What it costs to agree: all ranks of a large job compare their facts through one store.

The ranks are real clients of a real store, threads in a few processes of this machine. The floor is
what any comparison needs: every client adds to a counter once, and waits once for the last of them.
"""

import argparse
import multiprocessing as mp
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait

import tabulate
import torch.distributed as dist
from tqdm import tqdm

from shardc.runtime.watch import agreement

_TIMEOUT = timedelta(minutes=5)


def main() -> None:
    """Measure, and print a table."""
    args = _parse()
    ends: list[Connection] = []
    context = mp.get_context("fork")  # before there are threads: torch is imported once
    shares = [range(first, args.clients, args.processes) for first in range(args.processes)]
    for share in shares:
        ours, theirs = context.Pipe()
        place = (share, args.clients, "x" * args.bytes, theirs)
        context.Process(target=_serve, args=place, daemon=True).start()
        ends.append(ours)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=_TIMEOUT, wait_for_workers=False)
    for end in ends:
        end.send(store.port)
    for end in tqdm(ends, desc="connecting", leave=False):
        end.recv()
    seconds: dict[str, list[float]] = {name: [] for name in _ROUNDS}
    for number in tqdm(range(args.rounds + 1), desc="rounds", leave=False):
        for name, times in seconds.items():
            before = store.num_keys() if number == 0 else 0
            times.append(_run(ends, name, number))
            if number == 0:
                times.clear()  # the first one warms up
                tqdm.write(f"{name}: {store.num_keys() - before} keys a round")
    for end in ends:
        end.send(None)
    rows = [(name, statistics.median(times), min(times)) for name, times in seconds.items()]
    headers = [f"{args.clients} clients", "median s", "least s"]
    print(tabulate.tabulate(rows, headers, floatfmt=".3f"))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=1024, help="ranks (default 1024)")
    parser.add_argument("--processes", type=int, default=64, help="that they run in (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default 5)")
    parser.add_argument("--bytes", type=int, default=22_000, help="of facts (default 22000)")
    return parser.parse_args()


def _run(ends: list[Connection], name: str, number: int) -> float:
    """The seconds from the first client's start of a round to the last one's end."""
    for end in ends:
        end.send((name, number))
    times = [end.recv() for end in wait_for_all(ends)]
    return max(last for _, last in times) - min(first for first, _ in times)


def wait_for_all(ends: list[Connection]) -> list[Connection]:
    """`ends`, once all have something to say."""
    left = list(ends)
    while left:
        left = [end for end in left if end not in wait(left)]
    return ends


def _serve(share: range, world: int, text: str, end: Connection) -> None:
    """Be these ranks: run each round that is asked for, and answer when it began and ended."""
    port = end.recv()
    stores = [dist.TCPStore("127.0.0.1", port, timeout=_TIMEOUT) for _ in share]
    end.send(None)
    while (asked := end.recv()) is not None:
        name, number = asked
        places = [dist.PrefixStore(f"{name}{number}", store) for store in stores]
        calls = [
            partial(_ROUNDS[name], place, rank, world, text)
            for place, rank in zip(places, share, strict=True)
        ]
        end.send(_times(calls))


def _times(calls: list[Callable[[], None]]) -> tuple[float, float]:
    """When the calls began and when they ended, each in a thread of its own."""
    barrier = threading.Barrier(len(calls) + 1)
    ends: list[float] = []

    def work(call: Callable[[], None]) -> None:
        barrier.wait()
        call()
        ends.append(time.monotonic())

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    return began, max(ends)


def _floor(store: dist.Store, rank: int, world: int, text: str) -> None:
    if store.add("count", 1) == world:
        store.set("done", "")
    store.wait(["done"])


def _agree(store: dist.Store, rank: int, world: int, text: str) -> None:
    agreement._exchange(store, rank, world, "a benchmark", text, _TIMEOUT, "")


def _agree_with_note(store: dist.Store, rank: int, world: int, text: str) -> None:
    agreement._exchange(store, rank, world, "a benchmark", text, _TIMEOUT, "a note")


_ROUNDS: dict[str, Callable[[dist.Store, int, int, str], None]] = {
    "floor: one addition and one wait": _floor,
    "agree": _agree,
    "agree, with a note": _agree_with_note,
}


if __name__ == "__main__":
    main()
