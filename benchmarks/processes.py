"""Competitors in processes of their own, measured in turn: only one works at a time.

They keep freed memory, as a GPU's caching allocator does: glibc would give large blocks back to the
system and take a page fault for every 4 KiB of the next gathered bucket (25 ms of a 600 ms step).
"""

import multiprocessing as mp
import os
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

Prepare = Callable[[], Callable[[], Any]]


def interleave(sides: Mapping[str, Prepare], rounds: int) -> dict[str, list[Any]]:
    """Prepare every side in its own process, then run them in turn, `rounds` times.

    A side is a picklable function that builds and warms one competitor and returns what runs one
    round of it. Odd rounds go in reverse order.
    """
    os.environ |= {
        name: str(2**32 - 1) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    }
    context = mp.get_context("spawn")
    pipes = {}
    progress = tqdm(total=len(sides) * (rounds + 1), unit="run", leave=False)
    for name, prepare in sides.items():
        ours, theirs = context.Pipe()
        context.Process(target=_serve, args=(prepare, theirs), daemon=True).start()
        progress.set_description(f"prepare {name}")
        pipes[name] = ours
        _answer(name, ours)
        progress.update()
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            progress.set_description(f"measure {name}")
            pipes[name].send("run")
            results[name].append(_answer(name, pipes[name]))
            progress.update()
    progress.close()
    return results


def _answer(name: str, pipe: Any) -> Any:
    try:
        good, value = pipe.recv()
    except EOFError:
        raise SystemExit(f"{name}: its process died") from None
    if not good:
        raise SystemExit(f"{name} failed:\n{value}")
    return value


def _serve(prepare: Prepare, pipe: Any) -> None:
    import traceback

    try:
        run = prepare()
        pipe.send((True, None))
        while pipe.recv():
            pipe.send((True, run()))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
