"""Plan the graphs of a step of a sharded model: compile them, and compute no values.

Dynamo traces repeated units once, where it can (`_trace_once`). A real run traces each unit: inside
a region of Dynamo, code that cannot be traced is an error, not a graph break.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from shardc.backend.compile import compile_graph
from shardc.backend.executor import shapes_only
from shardc.backend.frames import with_room_for_frames
from shardc.backend.graph_plan import GraphPlan, buckets_by_input, graph_plans
from shardc.backend.options import Options
from shardc.passes.repeat.repeated_calls import FEWEST_CALLS
from shardc.planning.vectors_apart import reading_apart
from shardc.runtime import compat
from shardc.runtime.modules.modules import ShardedModule
from shardc.sharding.units import units_of

log = logging.getLogger("shardc")


@with_room_for_frames
def plan_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    train: bool,
    progress: Callable[[str], object],
) -> tuple[list[GraphPlan], list[str]]:
    """Compile a step under fake tensors: its graphs' plans, and the reasons of its graph breaks.

    Raises:
        RuntimeError: nothing was compiled.
        Exception: an error of the passes, such as BudgetTooSmall, or of Dynamo in the model.
    """
    before = graph_plans[-1] if graph_plans else None
    breaks: list[str] = []

    def plan(gm: GraphModule, inputs: Sequence[Any], **ignored: Any) -> Callable[..., Any]:
        progress("planning")
        return compile_graph(gm, inputs, options, run=shapes_only)

    progress("tracing")
    with (
        compat.compiling_backward_at_once(),
        compat.compiling_when_called(),
        torch.set_grad_enabled(train),
    ):
        model.train(train)
        if not (options.fold and _trace_once(model, args, kwargs, plan)):
            breaks = _trace(model, args, kwargs, plan)
    plans = list(graph_plans)
    start = next((i + 1 for i in reversed(range(len(plans))) if plans[i] is before), 0)
    if not plans[start:]:
        raise RuntimeError(
            "nothing of the model was compiled: its forward cannot be traced at all, see "
            "TORCH_LOGS=graph_breaks"
        )
    return plans[start:], breaks


_Planner = Callable[..., Callable[..., Any]]
"""Plans a Dynamo graph, and returns a stand-in for its compiled code."""


def _trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    plan: _Planner,
    fullgraph: bool = False,
) -> list[str]:
    """Trace a step by Dynamo; returns the reasons of its graph breaks."""
    compat.forget_compiled()
    try:
        torch.compile(model, backend=plan, fullgraph=fullgraph)(*args, **kwargs)
        return compat.graph_break_reasons()
    except Exception as error:
        own = compat.raised_by_backend(error)
        if own is error:
            raise
        raise own from None
    finally:
        compat.forget_compiled()


def _trace_once(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], plan: _Planner
) -> bool:
    """Trace a step with one trace for the repeated units of a class; False where Dynamo cannot.

    Dynamo cannot where the graph breaks, or where a body lies in a body. Dynamo reuses the graph of
    a unit only where all values that the trace read are equal. So the graph is the same as with a
    trace of each unit.
    """
    repeated = _repeated(model) if compat.traces_regions_once() else {}
    traced = False

    def plan_inlined(gm: GraphModule, inputs: Sequence[Any], **ignored: Any) -> Callable[..., Any]:
        nonlocal traced
        compat.inline_regions(gm)
        left = read_slots(gm)
        _check_read(gm, repeated)
        traced = True
        return plan(gm, [inputs[position] for position in left], **ignored)

    if repeated:
        units = itertools.chain.from_iterable(repeated.values())
        try:
            with compat.as_regions(repeated), reading_apart(units) as read_slots:
                _trace(model, args, kwargs, plan_inlined, fullgraph=True)
        except Exception as error:
            if traced:
                raise
            log.debug("units are traced each: %s", error)
    return traced


def _repeated(model: nn.Module) -> dict[type[nn.Module], list[ShardedModule]]:
    """The outermost units of each class that repeats."""
    units = units_of(model)
    counts = Counter(type(unit) for unit in units.values())
    found: list[str] = []
    for name in units:  # outermost first
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if counts[type(units[name])] >= FEWEST_CALLS and not inside:
            found.append(name)
    repeated: dict[type[nn.Module], list[ShardedModule]] = {}
    for name in found:
        repeated.setdefault(type(units[name]), []).append(units[name])
    return repeated


def _check_read(gm: GraphModule, repeated: Mapping[type, Sequence[ShardedModule]]) -> None:
    """Raise ValueError where some units of a class, not all, read their own buckets."""
    read = set(buckets_by_input(gm).values())
    for cls, units in repeated.items():
        if len({read.isdisjoint(unit._shardc_unit.buckets) for unit in units}) > 1:
            raise ValueError(f"some units of {cls.__name__} do not read their own parameters")
