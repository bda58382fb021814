"""`report`: the plan of a compiled model, read off its latest compiles."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from shardc.backend.graph_plan import CompilePlan, GraphPlan, graph_plans, listeners
from shardc.backend.options import Options
from shardc.passes.context import PassContext
from shardc.passes.estimate.hardware import Profile
from shardc.reports.assemble import assemble
from shardc.reports.findings import find, find_breaks, find_gathered, find_recompiles, find_unused
from shardc.reports.formulas import rank_formulas
from shardc.reports.graph import GraphRows, read_graph
from shardc.reports.report import Report
from shardc.runtime.checks.words import dtype_name
from shardc.runtime.tensor.shard_gathers import gather_counts
from shardc.runtime.unit.bucket import Bucket
from shardc.sharding.units import check_sharded, units_of


def report(compiled: Any) -> Report:
    """The plan of a model that has run compiled in this process.

    Args:
        compiled: the result of `torch.compile(model, backend="shardc")`, or the model on which
            `compile(backend="shardc")` was called. A step must have run: the first step compiles
            the backward.

    Raises:
        ValueError: the model is not sharded, or no graph of the model was compiled yet.
    """
    model = getattr(compiled, "_orig_mod", compiled)
    check_sharded("report", model)
    own = {bucket for unit in units_of(model).values() for bucket in unit._shardc_unit.buckets}
    graphs = [plan for plan in graph_plans if own & set(_alive(plan))]
    if not graphs:
        raise ValueError(
            "nothing of the model was compiled by shardc yet: call model.compile(backend='shardc') "
            "and run a step first; the plans of the last graphs only are kept"
        )
    latest, compiles = _latest(graphs)
    first = latest[-1]
    return report_of(model, latest, first.profile, first.options, 0, (), compiles)


def report_of(
    model: nn.Module,
    graphs: Sequence[GraphPlan],
    profile: Profile,
    options: Options,
    tokens: int,
    breaks: Iterable[str],
    compiles: int = 1,
) -> Report:
    """The report of one step of `model`, made from its `graphs`, with findings."""
    planned = assemble(
        model,
        [rows_of(graph) for graph in graphs],
        profile,
        options.optimizer_states,
        _settings(model, options),
        tokens,
    )
    findings = (
        *find_breaks(breaks),
        *find_recompiles(compiles),
        *find(planned, profile),
        *find_unused(_unused(model, graphs)),
        *find_gathered(gather_counts.counts),
    )
    return replace(planned, findings=findings, formulas=rank_formulas(planned, profile))


def rows_of(plan: GraphPlan) -> GraphRows:
    """The rows of a finished graph, which `_play` noted."""
    rows: GraphRows = plan.notes["rows"]
    return rows


def _play(gm: GraphModule | None, ctx: PassContext, plan: CompilePlan, finished: GraphPlan) -> None:
    if gm is not None:
        fused = finished.options.executor == "inductor"
        rows = read_graph(gm, ctx.phase, finished.profile, finished.liveness, fused)
        kept = frozenset(plan.labels[position] for position in ctx.kept.positions)
        finished.notes["rows"] = replace(rows, kept=kept)


listeners.append(_play)


def _alive(plan: GraphPlan) -> list[Bucket]:
    return [bucket for reference in plan.buckets if (bucket := reference()) is not None]


def _latest(graphs: Sequence[GraphPlan]) -> tuple[list[GraphPlan], int]:
    """The graphs compiled last for each set of buckets, and the most compiles that a set had."""
    compiles: dict[frozenset[Bucket], list[int]] = {}
    for plan in graphs:
        numbers = compiles.setdefault(frozenset(_alive(plan)), [])
        if plan.number not in numbers:
            numbers.append(plan.number)
    last = {numbers[-1] for numbers in compiles.values()}
    return [g for g in graphs if g.number in last], max(map(len, compiles.values()))


def _unused(model: nn.Module, graphs: Sequence[GraphPlan]) -> list[str]:
    """Names of the parameters that no graph of `graphs` reads, with the name of their unit."""
    read: dict[Bucket, set[int]] = {}
    for plan in graphs:
        for reference, slots in zip(plan.buckets, plan.slots, strict=True):
            bucket = reference()
            if bucket is not None:
                read.setdefault(bucket, set()).update(slots)
    return [
        f"{module._shardc_unit.name}.{slot.name}"
        for module in units_of(model).values()
        for bucket in module._shardc_unit.buckets
        for index, slot in enumerate(bucket.layout.slots)
        if index not in read.get(bucket, ())
    ]


def _settings(model: nn.Module, options: Options) -> dict[str, str]:
    """The settings that differ from the defaults, in words."""
    unit = next(iter(units_of(model).values()))._shardc_unit
    settings = {}
    if any(bucket.ranks.hierarchy is not None for bucket in unit.buckets):
        settings["mesh"] = "hierarchical"
    precision = unit.settings.precision
    dtypes = {
        "mp": precision.param_dtype,
        "gather_wire": precision.gather_wire_dtype,
        "reduce_wire": precision.reduce_wire_dtype,
    }
    settings |= {name: dtype_name(dtype) for name, dtype in dtypes.items() if dtype is not None}
    if unit.settings.offloaded:
        settings["offload"] = "cpu"
    if unit.asked_reshard is not None:
        settings["reshard_after_forward"] = str(unit.asked_reshard)
    defaults = Options()
    for name in (field.name for field in fields(Options)):
        value = getattr(options, name)
        if name not in _NO_PLAN and value != getattr(defaults, name):
            settings[name] = str(value)
    return settings


_NO_PLAN = {"executor", "fallback", "fold", "inductor", "profile", "agreement_timeout"}
"""Options that shape no plan, and the profile: a report has a field for it."""
