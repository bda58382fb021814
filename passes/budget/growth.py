"""Joint graph: a graph with dynamic sizes serves those with which it fits into its budget.

For larger ones, guards let Dynamo compile it anew (`bound_sizes`).
"""

import bisect
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule

from shardc.passes.budget.trial import Trial
from shardc.passes.estimate.cost import symbol_hints
from shardc.runtime import compat

_STEPS, _FURTHEST = 16, 64
"""Sizes grow in steps of a sixteenth, up to so many times as large."""


def bound_sizes(trial: Trial, room: int) -> None:
    """Add guards to a graph: Dynamo compiles it anew for sizes with which it would hold more than
    `room` bytes."""
    sizes = dynamic_sizes(trial.forward.gm)
    hints = symbol_hints(trial.forward.gm)

    def scaled(steps: int) -> dict[Any, int]:
        return {s: h * steps // _STEPS if s in sizes else h for s, h in hints.items()}

    def fits(steps: int) -> bool:
        phases = (trial.forward, trial.backward)
        return all(phase.liveness_for(scaled(steps)).peak <= room for phase in phases)

    steps = range(_STEPS + 1, _STEPS * _FURTHEST)
    fitting = steps[0] - 1 + bisect.bisect_left(steps, True, key=lambda s: not fits(s))
    bounds = scaled(fitting)
    for symbol, size in sizes.items():
        bool(size <= bounds[symbol])  # a guard


def dynamic_sizes(gm: GraphModule) -> Mapping[Any, torch.SymInt]:
    """The sizes of the inputs that are dynamic, by symbol."""
    found: dict[Any, torch.SymInt] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                symbol = compat.size_expr(size)
                if isinstance(symbol, sympy.Symbol) and symbol in compat.symbol_values(size):
                    found.setdefault(symbol, size)
    return found
