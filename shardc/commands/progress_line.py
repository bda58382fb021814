"""A line on the terminal with the stage of a command, the time passed, and the estimated time left.

The line appears if a command takes long. Where stderr is not a terminal, a log say, the command
writes the line every half minute. The time left is estimated when a stage begins, from the time of
the stages before it and their share of the whole.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tqdm import tqdm

DELAY = 2.0
"""Seconds before the line appears."""
LOG_INTERVAL = 30.0
"""Seconds between lines where stderr is not a terminal."""
_LEAST_DONE = 0.1
"""The time left is not estimated before this share of the whole is done."""


class ProgressLine:
    """The stages that have begun, and the time left.

    Args:
        parts: how many times the stages of `before` run; without `before`, about how many stages
            there are.
        before: the share of a part's time that lies before each stage. A stage with a smaller
            share than the stage before it begins the next part.
    """

    def __init__(
        self,
        title: str,
        parts: int = 1,
        before: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._parts, self._before, self._clock = title, parts, before, clock
        self._part, self._share = 0, 0.0
        self._first: float | None = None
        self._whole: float | None = None
        self._stage = ""

    def __call__(self, stage: str) -> None:
        """Begin a stage."""
        self._stage = stage
        share = 0.0 if self._before is None else self._before.get(stage)
        if share is None:
            return
        now = self._clock()
        if self._first is None:
            self._first = now
        elif self._before is None or share < self._share:
            self._part += 1
        self._share = share
        done = (self._part + share) / self._parts
        known = _LEAST_DONE <= done < 1
        self._whole = (now - self._first) / done if known else None

    def line(self) -> str:
        """The text of the line at this moment."""
        about = "about " if self._before is None else ""
        several = f" ({self._part + 1} of {about}{self._parts})" if self._parts > 1 else ""
        return f"{self._title}{several}: {self._stage}{self._left()}"

    def _left(self) -> str:
        if self._whole is None or self._first is None:
            return ""
        left = self._first + self._whole - self._clock()
        if left <= 0:
            return ", longer than was expected"
        return (
            f", about {5 * (1 + int(left / 5))} s left"
            if left < 60
            else (f", about {1 + int(left / 60)} min left")
        )


@contextmanager
def showing_progress(progress: ProgressLine) -> Iterator[ProgressLine]:
    """Show the line inside, with the time that has passed."""
    done = threading.Event()
    bar = tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None, delay=DELAY)
    began = time.monotonic()

    def tick() -> None:
        wait = LOG_INTERVAL if bar.disable else DELAY
        while not done.wait(wait):
            if bar.disable:
                passed = tqdm.format_interval(time.monotonic() - began)
                print(f"{progress.line()} [{passed}]", file=sys.stderr, flush=True)
            else:
                bar.set_description_str(progress.line())
                wait = 0.5

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield progress
    finally:
        done.set()
        ticker.join()
        bar.close()
