"""What this process does with collectives right now: a name in the profiler, and for a hang.

    with Label("all_gather", ("layers.3",), "forward"): ...               # start it
    with Label("all_gather", ("layers.3",), "forward", waits=True): ...   # wait for it

A label costs less than a microsecond where no profiler runs, so every collective of a graph has its
own. Where one fails it is not taken back: `progress` then says what this rank was waiting for.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from shardc.runtime import compat

OFFLOAD = "to_host"
"""The kind of a copy of a gradient to the host."""

VERBS = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "all_reduce": "all-reduce",
    OFFLOAD: "offload",
}
"""What collectives and copies are called in the profiler, by kind."""

_PREFIX = "shardc: "


class Progress:
    """Of this process.

    Attributes:
        started: how many collectives it has started.
        last: the label of the last of them.
        inside: the label of what it starts or waits for now, or of what failed.
        since: when it began to, on the monotonic clock.
        names: in a graph that was compiled for other buckets, the names of these by those.
        next_names: the same of the graph that runs next.
        shown: what the profiler was told about `inside`.
    """

    def __init__(self) -> None:
        self.started = 0
        self.last: Label | None = None
        self.inside: Label | None = None
        self.since = 0.0
        self.names: dict[str, str] = {}
        self.next_names: dict[str, str] = {}
        self.shown: list[Any] = []

    def begin_graph(self) -> None:
        """A compiled graph begins to run."""
        self.names, self.next_names = self.next_names, {}

    def end_graph(self) -> None:
        """It returned or raised. What failed in it has no more labels to leave."""
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
        kind: "all_gather", "reduce_scatter", "all_reduce", or `OFFLOAD`, which is no collective.
        buckets: the names of the buckets it moves.
        phase: "forward" or "backward".
        waits: whether it is the wait.
        name: what the profiler shows: "shardc: wait gather layers.3".
    """

    __slots__ = ("buckets", "kind", "name", "phase", "waits")

    def __init__(self, kind: str, buckets: Sequence[str], phase: str, waits: bool = False) -> None:
        self.kind, self.buckets, self.phase, self.waits = kind, tuple(buckets), phase, waits
        verb = f"wait {VERBS.get(kind, kind)}" if waits else VERBS.get(kind, kind)
        self.name = f"{_PREFIX}{verb} {in_short(self.buckets)}"

    def renamed(self) -> "Label":
        """The label with the names of the buckets that the graph which runs is given."""
        if not progress.names:
            return self
        names = [progress.names.get(name, name) for name in self.buckets]
        return Label(self.kind, names, self.phase, self.waits)

    def __str__(self) -> str:
        kind = self.kind.replace("_", "-")
        return f"the {kind} of {in_short(self.buckets)} in the {self.phase}"

    def __repr__(self) -> str:
        return f"Label({self.kind!r}, {self.buckets!r}, {self.phase!r}, {self.waits!r})"

    def __enter__(self) -> None:
        if self.kind != OFFLOAD:
            self._note()
        if compat.is_profiled():
            shown = torch.profiler.record_function(self.renamed().name)
            shown.__enter__()
            progress.shown.append(shown)

    def _note(self) -> None:
        progress.inside = self
        if self.waits:
            progress.since = time.monotonic()
        else:
            progress.started += 1
            progress.last = self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if progress.shown:
            progress.shown.pop().__exit__(None, None, None)
        if kind is None:
            progress.inside = None


def in_short(buckets: Sequence[str]) -> str:
    """Names of buckets in one word: those of one unit by their numbers, "layers.3[0,1]+head"."""
    numbers: dict[str, list[str]] = {}
    for name in buckets:
        unit, _, number = name.removesuffix("]").partition("[")
        numbers.setdefault(unit, []).extend([number] if number else [])
    return "+".join(f"{u}[{','.join(n)}]" if n else u for u, n in numbers.items())


def read_name(name: str) -> tuple[str, tuple[str, ...], bool] | None:
    """Kind, buckets and `waits` of the label that has this name; None for other names."""
    text = name.removeprefix(_PREFIX)
    waits = text.startswith("wait ")
    verb, _, units = text.removeprefix("wait ").partition(" ")
    kind = next((kind for kind in VERBS if VERBS[kind] == verb), None)
    if kind is None or text == name:
        return None
    buckets: list[str] = []
    for part in units.split("+"):
        unit, _, numbers = part.removesuffix("]").partition("[")
        buckets += [f"{unit}[{n}]" for n in numbers.split(",")] if numbers else [unit]
    return kind, tuple(buckets), waits


# -- on nodes --------------------------------------------------------------------------------------


def set_label(node: Node, label: Label) -> None:
    """Have what runs the graph of `node` show it as `label`."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _FACT: label}


def label_of(node: Node) -> Label | None:
    """What `set_label` gave a node."""
    return (node.meta.get("custom") or {}).get(_FACT)


_FACT = "shardc_label"
