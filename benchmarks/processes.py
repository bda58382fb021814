"""Competitors in processes of their own, measured in turn: only one works at a time.

They keep freed memory, as a GPU's caching allocator does: glibc would give large blocks back to the
system and take a page fault for every 4 KiB of the next gathered bucket (25 ms of a 600 ms step).
"""

import argparse
import multiprocessing as mp
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from kept import add_keep_option
from tqdm import tqdm

Prepare = Callable[[], Callable[[], Any]]

LIMIT_SECONDS = 600.0
"""How long a process may take to prepare itself or to run one round."""


def add_round_options(parser: argparse.ArgumentParser) -> None:
    """`--rounds`, `--steps` and `--keep`."""
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default 7)")
    parser.add_argument("--steps", type=int, default=3, help="steps a round (default 3)")
    add_keep_option(parser)


def interleave(sides: Mapping[str, Sequence[Prepare]], rounds: int) -> dict[str, list[list[Any]]]:
    """Prepare every side in processes of its own, then run the sides in turn, `rounds` times.

    A side is one picklable function a process, which builds and warms one competitor, or one rank
    of it, and returns what runs one round. A side's processes are started and told to run
    together. Odd rounds go in reverse order.

    Returns:
        For every side and round, what each of its processes returned.
    """
    os.environ |= {
        name: str(2**32 - 1) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    }
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no idle compiler processes beside each
    pipes: dict[str, list[Any]] = {}
    results: dict[str, list[list[Any]]] = {name: [] for name in sides}
    with tqdm(total=len(sides) * (rounds + 1), unit="run", leave=False) as progress:
        for name, processes in sides.items():
            progress.set_description(f"prepare {name}")
            pipes[name] = [_start(prepare) for prepare in processes]
            _answers(name, pipes[name])
            progress.update()
        for number in range(rounds):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                progress.set_description(f"measure {name}")
                for pipe in pipes[name]:
                    pipe.send("run")
                results[name].append(_answers(name, pipes[name]))
                progress.update()
    return results


def median_ratio(values: Sequence[float], floor: Sequence[float]) -> str:
    """The median (min to max) of the ratios of two sides, round by round."""
    ratios = [value / other for value, other in zip(values, floor, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _start(prepare: Prepare) -> Any:
    """Start a process; our end of its pipe."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(prepare, theirs), daemon=True).start()
    theirs.close()  # so that we read an end of file if the process dies
    return ours


def _answers(name: str, pipes: Sequence[Any]) -> list[Any]:
    """What every process of a side answers; whichever fails first ends the benchmark."""
    values: dict[Any, Any] = {}
    while len(values) < len(pipes):
        ready: list[Any] = wait([pipe for pipe in pipes if pipe not in values], LIMIT_SECONDS)
        if not ready:
            raise SystemExit(f"{name} did not answer within {LIMIT_SECONDS:.0f} s")
        for pipe in ready:
            try:
                good, values[pipe] = pipe.recv()
            except EOFError:
                raise SystemExit(f"{name}: a process of it died") from None
            if not good:
                raise SystemExit(f"{name} failed:\n{values[pipe]}")
    return [values[pipe] for pipe in pipes]


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
