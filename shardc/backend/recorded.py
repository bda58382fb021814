"""Compiled graphs tell the recorder of a training step their nodes (`step/recorder.py`)."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from shardc.runtime.watch.entering import BoxedGraph

Call = Callable[[GraphModule | None, BoxedGraph, Sequence[str], list[Any]], Any]
"""Runs a compiled graph, and writes its nodes; for None, writes one call of it."""

recorders: list[Call] = []
"""The recorder's `call` for the step that is recorded now; none at other times."""


def recorded(gm: GraphModule | None, run: BoxedGraph, groups: Sequence[str] = ()) -> BoxedGraph:
    """Wrap a compiled graph: a recorded step has its nodes, or for None one call of it, with
    collectives over `groups`."""

    def call(inputs: list[object]) -> object:
        return recorders[-1](gm, run, groups, inputs) if recorders else run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
