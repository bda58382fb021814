"""The graph of a step, captured as one CUDA graph with its collectives.

A replay reads and writes the memory of the capture: arguments are copied there, and results are
copied from there. Numbers of updates and addresses of parameters and state are constants of a
capture; the step is captured again where one has changed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardc.runtime import compat
from shardc.runtime.checks.words import plural
from shardc.runtime.watch.entering import BoxedGraph, naming_failures
from shardc.step.refusals import NotRecorded
from shardc.step.updates import UpdateCall

Compute = Callable[[list[Tensor], list[Tensor], list[object]], Iterable[Any]]
"""Runs the graph of a step on its arguments, the tensors that somebody holds, and its numbers."""

MOST_CAPTURES = 8
"""The most times that one graph is captured."""


class Replayed:
    """A graph of a step as a CUDA graph.

    Attributes:
        captures: the number of captures so far.
    """

    def __init__(self, compute: Compute, groups: Sequence[str]) -> None:
        self._compute = compute
        self._key: object = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: list[Tensor] = []
        self._results: list[Any] = []
        self._replay: BoxedGraph = naming_failures(self._replay_graph, groups, groups)
        self.captures = 0

    def __call__(self, given: list[Tensor], held: list[Tensor], numbers: list[object]) -> list[Any]:
        """The results of the step.

        Raises:
            NotRecorded: the step was captured too often, or the capture failed; nothing was
                computed.
        """
        key = [value.data_ptr() for value in held], numbers
        if key != self._key:
            if self.captures == MOST_CAPTURES:
                times = plural(MOST_CAPTURES, "time")
                raise NotRecorded(
                    f"it was captured {times}. Give learning rates that change as tensors on "
                    "the GPU"
                )
            self._capture(given, held, numbers)
            self._key = key
        for static, value in zip(self._given, given, strict=True):
            static.copy_(value)
        self._replay([])
        return [each.clone() if isinstance(each, Tensor) else each for each in self._results]

    def _capture(self, given: list[Tensor], held: list[Tensor], numbers: list[object]) -> None:
        """Capture the step; nothing is computed."""
        self.free()
        self.captures += 1
        self._given = [_like(value) for value in given]
        self._graph = torch.cuda.CUDAGraph()
        compat.free_before_shutdowns(self)
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._results = list(self._compute(self._given, held, numbers))
        except RuntimeError as error:
            self._graph = None  # it has nothing to reset
            self.free()
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NotRecorded(f"the capture failed: {first}") from error

    def free(self) -> None:
        """Free the CUDA graph; the next call captures the step again."""
        if self._graph is not None:
            self._graph.reset()
        self._key, self._graph, self._given, self._results = None, None, [], []

    def _replay_graph(self, _: list[object]) -> None:
        assert self._graph is not None
        self._graph.replay()


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def check_capturable(module: GraphModule, tensors: Sequence[Tensor]) -> None:
    """Refuse a graph that no CUDA graph can have.

    Raises:
        NotRecorded: an update is a call, or the graph reads a tensor on the host.
    """
    for node in module.graph.nodes:
        if isinstance(node.target, UpdateCall):
            name = type(node.target.update.optimizer).__name__
            raise NotRecorded(f"{name} runs on the host in each step: no CUDA graph has its update")
    for value in tensors:
        if value.device.type != "cuda":
            raise NotRecorded(
                f"it reads a tensor of shape {tuple(value.shape)} on {value.device}: a CUDA graph "
                "reads tensors on the GPU. Give arguments on the GPU, and optimizers fused=True or "
                "capturable=True"
            )
