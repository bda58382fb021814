"""Compiled graphs tell the recorder of a training step their nodes (`step/recorder.py`)."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch.fx import GraphModule

from shardc.runtime.watch.entering import BoxedGraph


class RunsGraphs(Protocol):
    """The recorder of a step, as compiled graphs know it."""

    def call(
        self, gm: GraphModule | None, run: BoxedGraph, groups: Sequence[str], inputs: list[Any]
    ) -> Any:
        """Run a compiled graph, and write its nodes; for None, write one call of `run`."""


recorders: list[RunsGraphs] = []
"""The recorder of the step that is recorded now; none at other times."""


def recorded(gm: GraphModule | None, run: BoxedGraph, groups: Sequence[str] = ()) -> BoxedGraph:
    """Wrap a compiled graph: a recorded step has its nodes, or for None one call of it, with
    collectives over `groups`."""

    def call(inputs: list[object]) -> object:
        return recorders[-1].call(gm, run, groups, inputs) if recorders else run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
