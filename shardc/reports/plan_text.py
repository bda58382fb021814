"""The plan of a graph as text: a line for the log, tables for the dump."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch.fx import GraphModule

from shardc.backend.graph_plan import CompilePlan, GraphPlan, listeners
from shardc.passes.context import PassContext
from shardc.passes.dump import is_wanted, write_text
from shardc.reports.assemble import bucket_row
from shardc.reports.graph import GraphRows
from shardc.reports.live import rows_of
from shardc.reports.record import CollectiveRow
from shardc.reports.terminal import UNLIMITED, pairs
from shardc.reports.text import bucket_table, collective_table
from shardc.runtime.checks.words import format_bytes, format_seconds, plural
from shardc.runtime.watch.progress import in_short

log = logging.getLogger("shardc")


def _say_plan(
    gm: GraphModule | None, ctx: PassContext, plan: CompilePlan, graph_plan: GraphPlan
) -> None:
    """Log the plan of a finished graph, and dump the plan if dumps are wanted."""
    if not (log.isEnabledFor(logging.INFO) or is_wanted()):
        return
    rows = rows_of(graph_plan)
    line = summary(ctx, rows, graph_plan.peak)
    log.info("%s%s", line, " (compiled before)" if gm is None else "")
    for decision in decisions(ctx, rows.collectives, plan.labels):
        log.debug("graph %d: %s", ctx.number, decision)
    if is_wanted():
        text = plan_text(ctx, plan, graph_plan)
        write_text(f"{ctx.stem}_plan.txt", "buckets, schedule, memory", f"{line}\n\n{text}")


listeners.append(_say_plan)


def summary(ctx: PassContext, rows: GraphRows, peak: int) -> str:
    """A graph in a line: its messages, its planned seconds, its peak of memory."""
    sent = rows.collectives
    kinds = Counter(row.kind for row in sent)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    nbytes = format_bytes(sum(row.nbytes for row in sent))
    compute, wire = sum(op.seconds for op in rows.ops), sum(row.seconds for row in sent)
    return (
        f"{ctx.phase} graph {ctx.number}: {f'{counts}, {nbytes}' if sent else 'no collectives'}; "
        f"planned {format_seconds(rows.seconds)}: compute {format_seconds(compute)}, exposed "
        f"{format_seconds(max(0.0, rows.seconds - compute))} of {format_seconds(wire)} on the "
        f"wire; peak {format_bytes(peak)}"
    )


def decisions(
    ctx: PassContext, sent: Sequence[CollectiveRow], labels: Mapping[int, str]
) -> Iterator[str]:
    """The decisions, one a line: buckets kept gathered, and the start and wait of each message."""
    if ctx.budget is not None:
        yield (
            f"within {format_bytes(ctx.budget.nbytes)}: {'; '.join(_kept(ctx, labels))}; up to "
            f"{plural(ctx.kept.ahead, 'unit')} are gathered ahead"
        )
    for row in sent:
        merged = ", one message" if len(row.buckets) > 1 else ""
        yield (
            f"{row.kind} of {in_short(row.buckets)} ({format_bytes(row.nbytes)}{merged}) starts "
            f"before {row.before}, and is waited for before {row.needed_by}"
        )


def plan_text(ctx: PassContext, plan: CompilePlan, graph_plan: GraphPlan) -> str:
    """The tables of a graph: its buckets, its schedule, its memory."""
    rows = rows_of(graph_plan)
    own = [bucket_row(bucket, rows.kept) for bucket in plan.buckets.values()]
    buckets = bucket_table(own, True, UNLIMITED)
    schedule = collective_table(rows.collectives, True, UNLIMITED) or "no collectives"
    liveness = graph_plan.liveness
    held = [
        ("segments, optimizer state, workspaces", format_bytes(graph_plan.static)),
        ("inputs that the graph frees", format_bytes(liveness.inputs)),
        (f"peak of the graph, at {liveness.peak_node}", format_bytes(liveness.peak)),
        ("what it returns", format_bytes(liveness.outputs)),
        ("peak with all of these", format_bytes(graph_plan.peak)),
    ]
    memory = pairs(held, UNLIMITED)
    if ctx.budget is not None:
        buckets += "\n\nwithin the budget, " + "\n".join(_kept(ctx, plan.labels))
    return f"buckets\n\n{buckets}\n\nschedule\n\n{schedule}\n\nmemory\n\n{memory}\n"


def _kept(ctx: PassContext, labels: Mapping[int, str]) -> Iterator[str]:
    """The buckets that a budget keeps or moves, in words."""
    yield f"kept gathered: {_names(ctx.kept.positions, labels)}"
    if ctx.kept.states:
        yield f"optimizer state on the host: {_names(ctx.kept.states, labels)}"


def _names(positions: Iterable[int], labels: Mapping[int, str]) -> str:
    """The labels of buckets, given by the positions of their inputs."""
    return ", ".join(labels[position] for position in sorted(positions)) or "none"
