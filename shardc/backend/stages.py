"""Stages of a compile, with their seconds: shown while it lasts, summed up at its end."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

from tqdm import tqdm

from shardc.runtime import compat

log = logging.getLogger("shardc")

DYNAMO, JOINT, PASSES, INDUCTOR, LOADING, RANKS = (
    "Dynamo", "AOT autograd", "passes", "Inductor", "loading", "other ranks",
)  # fmt: skip
_LONG, _AGAIN = 5.0, 30.0
"""Seconds until a compile is shown, and between its lines where there is no terminal."""


class Stages:
    """The stages of one compile, as a context around it.

    Outside of stages, AOT autograd traces the joint graph. `SHARDC_PROGRESS=0` shows nothing.

    Args:
        shown: whether this rank shows the compile on stderr, once it takes long.
        again: the reason of a recompile, in words; empty for a first compile.

    Attributes:
        seconds: the seconds of each stage, without the stages inside it.
    """

    def __init__(self, shown: bool, again: str = "") -> None:
        # The graph that is compiled, in words.
        self.what = f"{_what()} (again: {again})" if again else _what()
        self.seconds = {DYNAMO: compat.seconds_of_dynamo()}
        self._shown = shown and os.environ.get("SHARDC_PROGRESS", "1") != "0"
        self._open = [JOINT]
        self._done = threading.Event()
        self._since = self._began = time.monotonic()

    def __enter__(self) -> "Stages":
        log.debug("compiling %s", self.what)
        if self._shown:
            threading.Thread(target=self._show, name="shardc compiles", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._count()
        self._done.set()
        if kind is None:
            log.info("%s", self)
            is_long = time.monotonic() - self._began > _LONG
            if self._shown and is_long and not log.isEnabledFor(logging.INFO):
                print(f"shardc: {self}", file=sys.stderr)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context whose seconds count for the stage `name`."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def load(self) -> None:
        """Count the rest as loading: the graph was found compiled."""
        self._count()
        self._open[0] = LOADING

    def _count(self) -> None:
        now, name = time.monotonic(), self._open[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        verb = "loaded" if self._open[0] == LOADING else "compiled"
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{verb} {self.what} in {sum(self.seconds.values()):.1f} s: {parts}"

    def _show(self) -> None:
        """Show the stage that runs: one line that counts seconds; without a terminal, several."""
        if self._done.wait(_LONG):
            return
        with tqdm(bar_format="{desc}", leave=False, disable=None) as line:
            while True:
                seconds = time.monotonic() - self._began
                text = f"shardc: compiling {self.what}, {seconds:.0f} s: {self._open[-1]}"
                if line.disable:
                    print(text, file=sys.stderr)
                line.set_description_str(text)
                if self._done.wait(_AGAIN if line.disable else 0.5):
                    return


def _what() -> str:
    """The graph that Dynamo compiles now: the code's number, and the count of earlier compiles."""
    known = compat.compile_id()
    return "a graph" if known is None else f"graph {known[0]}/{known[1]}"
