"""Assemble the report of a step from the compiled graphs of a model."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import nn

from shardc.passes.estimate.cost import gather_seconds
from shardc.passes.estimate.hardware import PROFILES, Profile, workspace_bytes
from shardc.reports.graph import GraphRows
from shardc.reports.record import BucketRow, MemoryPoint, Op
from shardc.reports.report import Report
from shardc.runtime.checks.words import dtype_name
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.bucket_spec import can_stay_gathered, is_elsewhere
from shardc.sharding.units import units_of


def assemble(
    model: nn.Module,
    graphs: Sequence[GraphRows],
    profile: Profile,
    optimizer_states: float,
    settings: dict[str, str],
    tokens: int,
) -> Report:
    """The report of a step of `model`: forward graphs in order, backward graphs, the optimizer.

    Args:
        graphs: the graphs compiled for one step, forward graphs in the order in which they run.
        optimizer_states: copies of the parameters that the optimizer keeps.
        settings, tokens: see `Record`.
    """
    buckets = [b for module in units_of(model).values() for b in module._shardc_unit.buckets]
    here = [bucket for bucket in buckets if not is_elsewhere(bucket)]
    trained = _trained(here)
    kept = (sum(b.segment.nbytes for b in here), int(optimizer_states * trained))
    workspaces = workspace_bytes(profile)
    clock, rows = 0.0, []
    forward = [graph for graph in graphs if graph.phase == "forward"]
    backward = [graph for graph in reversed(graphs) if graph.phase == "backward"]
    for graph in forward + backward:
        rows.append(graph.after(clock))
        clock += graph.seconds
    memory = [
        replace(point, held=(kept[0], kept[1] + point.held[1], *point.held[2:-1], workspaces))
        for graph in rows
        for point in graph.memory
    ]
    ops = [op for graph in rows for op in graph.ops]
    if any(graph.phase == "backward" for graph in rows):
        on_host = _trained(buckets) - trained
        ops.append(_optimizer(trained, on_host, optimizer_states, profile, clock))
        memory.append(MemoryPoint(clock, (*kept, trained, 0, 0, workspaces), "optimizer"))
    flops: dict[str, float] = {}
    for graph in rows:
        for dtype, count in graph.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
    used = {name for graph in rows for row in graph.collectives for name in row.buckets}
    within_budget = {name for graph in rows for name in graph.kept}
    gathered: dict[str, list[tuple[float, float]]] = {}
    for name, start, end in (each for graph in rows for each in graph.gathered):
        gathered.setdefault(name or "(root)", []).append((start, end))
    rows_of_buckets = [
        replace(
            bucket_row(bucket, within_budget),
            used=bucket.label in used,
            gathered=tuple(gathered.get(bucket.label or "(root)", ())),
            seconds=gather_seconds(bucket.key.code, profile),
        )
        for bucket in buckets
    ]
    first = buckets[0]
    return Report(
        model=type(model).__name__,
        world_size=first.layout.world_size,
        copies=first.ranks.copies,
        profile=profile.name,
        settings=settings,
        tokens=tokens,
        flops=sum(flops.values()),
        peak_flops=profile.rate(max(flops, key=flops.__getitem__)) if flops else 0.0,
        buckets=tuple(rows_of_buckets),
        collectives=tuple(row for graph in rows for row in graph.collectives),
        ops=tuple(ops),
        memory=tuple(memory),
    )


def bucket_row(bucket: Bucket, kept: Collection[str] = ()) -> BucketRow:
    """The row of a bucket; `kept` are the labels of buckets that the plan keeps gathered."""
    layout, code = bucket.layout, bucket.key.code
    return BucketRow(
        name=bucket.label or "(root)",
        unit=bucket.owner.name or "(root)",
        tensors=len(layout.slots),
        parameters=layout.used,
        dtype=dtype_name(bucket.segment.dtype),
        gathered_dtype=dtype_name(code.compute_dtype),
        nbytes=layout.numel * code.compute_dtype.itemsize,
        padding=layout.padding_fraction,
        segment=bucket.segment.nbytes,
        trained=any(bucket.trainable),
        reshard=code.reshard_after_forward and bucket.label not in kept,
        extended=bucket.extension is not None,
        may_stay=can_stay_gathered(bucket),
    )


def _trained(buckets: Iterable[Bucket]) -> int:
    return sum(bucket.segment.nbytes for bucket in buckets if any(bucket.trainable))


def _optimizer(trained: int, on_host: int, states: float, profile: Profile, clock: float) -> Op:
    """A fused step, which reads parameter, gradient and states, and writes parameter and states."""
    seconds = (3 + 2 * states) * sum(
        nbytes / (where.memory_bandwidth * where.memory_efficiency)
        for nbytes, where in ((trained, profile), (on_host, PROFILES["cpu"]))
    )
    return Op("optimizer", "step", "", clock, seconds)
