"""`explain`: the plan and cost of a sharded step on any number of ranks, without running the step.

The model is copied to fake tensors (shapes only), sharded over torch's fake process group, and
compiled like any other model. The compile stops before the lowering: the passes have planned every
gather and reduction by then. So `explain` needs no GPU, no peers, and memory for graphs only. The
plan is the plan of a real run, because the same code decides.

Left out: time that kernels lose to their neighbours, the optimizer's own choices (a fused step is
assumed), and fragmentation by allocators.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from shardc.backend.fake_ranks import fake_ranks, give_fakes, sharded_copy, sizes_of
from shardc.backend.graph_plan import CompilePlan, joint_listeners
from shardc.backend.options import Options
from shardc.passes.context import PassContext
from shardc.passes.estimate.hardware import Amount, Profile, as_profile, planning_for
from shardc.planning.plan_step import plan_step
from shardc.reports import plan_text  # noqa: F401 (it listens for finished plans)
from shardc.reports.formulas import token_formulas
from shardc.reports.live import report_of
from shardc.reports.memory_curve import memory_curve
from shardc.reports.record import CurveRow
from shardc.reports.report import Report
from shardc.runtime import compat
from shardc.runtime.checks.arguments import Count, checked
from shardc.runtime.unit.precision import map_tensors


@checked
def explain(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    world_size: Count | None = None,
    mesh: DeviceMesh | Sequence[int] | None = None,
    devices_per_node: Count | None = None,
    profile: Profile | str = "h100-nvlink",
    options: dict[str, Any] | None = None,
    memory_budget: Literal["curve"] | Amount | None = None,
    train: bool = True,
    symbolic: bool = False,
    progress: Callable[[str], object] = str,
    **sharding: Any,
) -> Report:
    """Plan and estimate a step of `model` on one of many ranks.

    The model and its inputs are not changed, and need no values: build them under
    `torch.device("meta")`. A model that is sharded already (over a fake process group) is taken as
    it is. All code that `torch.compile` compiled in this process is forgotten.

    Args:
        model: the model that a run gives to `fully_shard` and `torch.compile`.
        args, kwargs: example inputs of one rank's step; tensors may be on meta.
        world_size: ranks to shard over (default 8), up to 16,384.
        mesh: instead of `world_size`: sizes (replicate, shard) for HSDP, or a mesh over a fake
            process group.
        devices_per_node: gather across nodes of so many ranks first, then inside nodes, as with
            `hierarchical_mesh`; default: on one level.
        profile: the hardware to plan for: a name (see `get_profile`) or a `Profile`.
        options: as for `torch.compile(..., options=)`.
        memory_budget: the option of that name; "curve" plans the step without a budget, and the
            report shows step time against memory (`report.curve`).
        train: whether a backward follows; else only the forward is planned, under `no_grad`.
        symbolic: compile a second time, with twice the batch (the first dim of every input), so
            that `report.formulas` has the figures that depend on the number of tokens.
        progress: called with the name of each stage that begins.
        sharding: other arguments of `fully_shard`: `units` (default "auto"), `mp_policy`, ...

    Returns:
        The report: print it, `to_dict()`, `compare(other)`, `save(path)`.

    Raises:
        ValueError: bad arguments, a model that `fully_shard` refuses, or a real process group.
        RuntimeError: the model cannot be compiled; the error says why.
    """
    hardware = as_profile(profile)
    given_options: dict[str, Any] = {**(options or {}), "profile": hardware}
    wants_curve = memory_budget == "curve"
    if wants_curve:
        given_options.pop("memory_budget", None)
    elif memory_budget is not None:
        given_options["memory_budget"] = memory_budget
    parsed = Options.parse(given_options)
    sizes = sizes_of("explain", model, world_size, mesh, sharding)
    named = dict(kwargs or {})
    with (
        fake_ranks(sizes, devices_per_node) as made,
        planning_for(hardware),
        compat.collecting_nothing(),  # graphs are large, and all stay until the end
    ):
        progress("sharding")
        sharded = sharded_copy(model, mesh if made is None else made, sharding)

        def report_on(make: Callable[[Tensor], Tensor]) -> Report:
            given, by_name = map_tensors(make, (args, named))
            with _drawing_curves(wants_curve, progress) as curves:
                graphs, breaks = plan_step(sharded, given, by_name, parsed, train, progress)
            report = report_of(sharded, graphs, hardware, parsed, _tokens([given, by_name]), breaks)
            return _with_curve(report, curves) if wants_curve else report

        with compat.fake_tensors() as fake:
            give_fakes(sharded, fake, host_is_apart=True)
            report = report_on(fake)
            if not symbolic:
                return report
            doubled = report_on(lambda tensor: torch.cat([fake(tensor)] * 2))
        return replace(report, formulas={**report.formulas, **token_formulas(report, doubled)})


# -- the curve -----------------------------------------------------------------------------------


_Curve = tuple[tuple[CurveRow, ...], tuple[str, ...]]
"""The rows of a joint graph, and the kinds of values that may be computed again."""


@contextmanager
def _drawing_curves(wanted: bool, progress: Callable[[str], object]) -> Iterator[list[_Curve]]:
    """A context in which each joint graph, if `wanted`, adds its curve."""
    curves: list[_Curve] = []

    def draw(gm: GraphModule, ctx: PassContext, plan: CompilePlan) -> None:
        progress("weighing memory against time")
        if ctx.options is not None and ctx.results is not None:
            curves.append(memory_curve(gm, ctx, plan.static_bytes))

    if wanted:
        joint_listeners.append(draw)
    try:
        yield curves
    finally:
        if wanted:
            joint_listeners.remove(draw)


def _with_curve(report: Report, curves: list[_Curve]) -> Report:
    """The report with its curve.

    Raises:
        ValueError: the step has no graph, several graphs, or no backward.
    """
    if len(curves) != 1:
        raise ValueError(
            f"memory_budget='curve' needs a step of one graph with a backward, got {len(curves)}: "
            "see report.findings of explain() without it for why the graph breaks"
        )
    ((rows, kinds),) = curves
    optimizer = sum(op.seconds for op in report.ops if op.phase == "optimizer")
    curve = tuple(replace(row, seconds=row.seconds + optimizer) for row in rows)
    return replace(report, curve=curve, kinds=kinds)


def _tokens(inputs: Any) -> int:
    """Tokens of a step: elements of the first integer tensor, else rows of the first tensor."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
    for tensor in tensors:
        if not tensor.is_floating_point():
            return tensor.numel()
    first = next(iter(tensors), None)
    if first is None:
        return 0
    return first.numel() // first.shape[-1] if first.ndim > 1 else first.shape[0]
