"""The progress of this process with collectives: their names in the profiler and in errors.

A label costs less than a microsecond where no profiler runs, so every collective of a graph has its
own. The label of a failed collective is not taken back: `progress` then names the wait of this
rank. A started collective enters the history of its group, which raises where ranks part.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache

import torch
from torch.fx import Node

from shardc.runtime import compat
from shardc.runtime.checks.call_sites import call_of_user
from shardc.runtime.watch.history import History, digest_of

OFFLOAD = "to_host"
"""The kind of a copy of a gradient to the host."""

COPIES = (OFFLOAD, "save_on_host", "load_from_host", "send_state", "fetch_state")
"""The kinds of labels that are no collectives."""

VERBS = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "all-reduce",
    "all_to_all": "reduce",
    "fetch_rows": "fetch rows",
    "return_rows": "return rows",
    OFFLOAD: "offload",
    "save_on_host": "save on host",
    "load_from_host": "load from host",
    "send_state": "send optimizer state",
    "fetch_state": "fetch optimizer state",
}
"""The words for collectives and copies in the profiler, by kind."""

_PREFIX = "shardc: "


class Progress:
    """The progress of this process.

    Attributes:
        started: the number of collectives that the process has started.
        last: the label of the last started collective.
        inside: the label of the collective that it starts or waits for now, or that failed.
        since: the time when its last wait began, on the monotonic clock.
        thread: the thread of its last wait.
        history: the history of the group whose collectives run now.
        heard: the labels of started collectives, while somebody listens; else None.
        names: for a graph that was compiled for other buckets, the name to display by the name
            that was compiled in.
        next_names: the `names` of the graph that runs next.
        shown: the records of the profiler for the labels that are entered now.
    """

    def __init__(self) -> None:
        self.started = 0
        self.last: Label | None = None
        self.inside: Label | None = None
        self.since = 0.0
        self.thread = 0
        self.history: History | None = None
        self.heard: list[Label] | None = None
        self.names: dict[str, str] = {}
        self.next_names: dict[str, str] = {}
        self.shown: list[AbstractContextManager[object]] = []

    @property
    def main_thread(self) -> int:
        """The thread that runs this process's collectives: the thread of the last wait."""
        return self.thread or threading.main_thread().ident or 0

    def begin_graph(self) -> None:
        """Note that a compiled graph begins to run."""
        self.names, self.next_names = self.next_names, {}

    def enter_graph(self) -> None:
        """Enter a graph as a whole into the history of its group."""
        if self.history is not None:
            self.history.enter(digest_of("graph"), "a compiled graph")

    def end_graph(self) -> None:
        """Note that the graph returned or raised; end the profiler's records left by a failure."""
        self._close()
        if self.names:
            self.inside = self.inside and self.inside.renamed()
            self.last = self.last and self.last.renamed()
            self.names = {}

    def _close(self) -> None:
        while self.shown:
            self.shown.pop().__exit__(None, None, None)


progress = Progress()


class Label:
    """The start of a collective, or the wait for it, around the call that does it.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "fetch_rows",
            "return_rows"; or a copy: `OFFLOAD`, "save_on_host", "load_from_host",
            "send_state", "fetch_state".
        buckets: the names of the buckets it moves.
        phase: "forward" or "backward".
        waits: whether the label is for the wait.
        dtype: the dtype of the message, where no compiled graph has made sure that ranks agree on
            it.
        name: the name in the profiler: "shardc: wait gather layers.3".
    """

    __slots__ = ("buckets", "dtype", "kind", "name", "phase", "waits")

    def __init__(
        self,
        kind: str,
        buckets: Sequence[str],
        phase: str,
        waits: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.kind, self.buckets, self.phase, self.waits = kind, tuple(buckets), phase, waits
        self.dtype = dtype
        verb = f"wait {VERBS.get(kind, kind)}" if waits else VERBS.get(kind, kind)
        self.name = f"{_PREFIX}{verb} {in_short(self.buckets)}"

    def renamed(self, names: Mapping[str, str] | None = None) -> "Label":
        """The label with the names of the buckets that a graph is given: the running graph."""
        names = progress.names if names is None else names
        if not names:
            return self
        buckets = tuple(names.get(name, name) for name in self.buckets)
        return _made(self.kind, buckets, self.phase, self.waits)

    def __str__(self) -> str:
        kind = self.kind.replace("_", "-")
        return f"the {kind} of {in_short(self.buckets)} in the {self.phase}"

    def __repr__(self) -> str:
        return f"Label({self.kind!r}, {self.buckets!r}, {self.phase!r}, {self.waits!r})"

    def __enter__(self) -> None:
        if self.kind not in COPIES:
            self._note()
        if compat.is_profiled():
            shown = torch.profiler.record_function(self.renamed().name)
            shown.__enter__()
            progress.shown.append(shown)

    def _note(self) -> None:
        progress.inside = self
        if self.waits:
            progress.since = time.monotonic()
            progress.thread = threading.get_ident()
        else:
            progress.started += 1
            progress.last = self
            if progress.heard is not None:
                progress.heard.append(self.renamed())
            if progress.history is not None:
                label = self.renamed()
                progress.history.enter(*_fact(label.kind, label.buckets, label.phase, self.dtype))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if progress.shown:
            progress.shown.pop().__exit__(None, None, None)
        if kind is None:
            progress.inside = None


@lru_cache(4096)
def _made(kind: str, buckets: tuple[str, ...], phase: str, waits: bool) -> Label:
    return Label(kind, buckets, phase, waits)


@lru_cache(4096)
def _fact(
    kind: str, buckets: tuple[str, ...], phase: str, dtype: torch.dtype | None
) -> tuple[int, str]:
    """The digest of a label, the same on all ranks, and the text of the label."""
    of = "" if dtype is None else f" ({str(dtype).removeprefix('torch.')})"
    return digest_of(kind, buckets, phase, dtype), str(Label(kind, buckets, phase)) + of


class AwaitedCall(Label):
    """A collective that is waited for at once, for a call of the user; not shown in the profiler.

    The first argument names the collective, in the same words on all ranks.

    Attributes:
        text: the call, with its place in the user's program.
    """

    __slots__ = ("text", "what")

    def __init__(self, what: str, text: str = "") -> None:
        super().__init__("call", (), "", waits=True)
        self.what = what
        self.text = text or f"{what} for {call_of_user()}"

    def renamed(self, names: Mapping[str, str] | None = None) -> Label:
        return self

    def __str__(self) -> str:
        return self.text

    def __enter__(self) -> "AwaitedCall":  # type: ignore[override]
        self._note()  # as a wait
        progress.started += 1
        progress.last = self
        if progress.history is not None:
            progress.history.enter(digest_of(self.what), self.text)
        return self

    def waiting(self) -> "CallWait":
        """The wait for the collective, where it was only started inside."""
        return CallWait(self.what, self.text)


class CallWait(AwaitedCall):
    """The wait for the collective of an `AwaitedCall`; others may have been entered since."""

    __slots__ = ()

    def __enter__(self) -> "CallWait":  # type: ignore[override]
        self._note()
        return self


def in_short(buckets: Sequence[str]) -> str:
    """Names of buckets in one word; buckets of one unit by number: "layers.3[0,1]+head"."""
    numbers: dict[str, list[str]] = {}
    for name in buckets:
        unit, _, number = name.removesuffix("]").partition("[")
        numbers.setdefault(unit, []).extend([number] if number else [])
    return "+".join(f"{u}[{','.join(n)}]" if n else u for u, n in numbers.items())


def read_name(name: str) -> tuple[str, tuple[str, ...], bool] | None:
    """Kind, buckets and `waits` of the label that has this name; None for other names."""
    text = name.removeprefix(_PREFIX)
    waits = text.startswith("wait ")
    text = text.removeprefix("wait ")
    kind = next((kind for kind, verb in VERBS.items() if text.startswith(f"{verb} ")), None)
    if kind is None or not name.startswith(_PREFIX):
        return None
    units = text.removeprefix(f"{VERBS[kind]} ")
    buckets: list[str] = []
    for part in units.split("+"):
        unit, _, numbers = part.removesuffix("]").partition("[")
        buckets += [f"{unit}[{n}]" for n in numbers.split(",")] if numbers else [unit]
    return kind, tuple(buckets), waits


# -- on nodes --------------------------------------------------------------------------------------


def set_label(node: Node, label: Label) -> None:
    """Set the label under which the graph of `node` runs it."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _FACT: label}


def label_of(node: Node) -> Label | None:
    """The label that `set_label` gave a node."""
    return (node.meta.get("custom") or {}).get(_FACT)


_FACT = "shardc_label"
