"""What was decided for a graph, for people: a line for the log, tables for the dump.

Everything is read off the finished graph, so it is what runs. An op is a node that computes;
places are given as the number of ops before.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tabulate import tabulate
from torch.fx import GraphModule, Node

from shardc.passes.context import (
    PassContext,
    is_collective,
    is_view,
    is_wait,
    kind_of,
    ranks_in,
    results_of,
    specs_of,
)
from shardc.passes.cost import evaluate, symbol_hints, tensor_bytes
from shardc.passes.dump import is_wanted, write_text
from shardc.plan import GraphPlan, Plan
from shardc.runtime import compat
from shardc.table import bucket_table, format_bytes

log = logging.getLogger("shardc")


@dataclass(frozen=True)
class Sent:
    """A collective in a finished graph.

    Attributes:
        kind: in a word.
        buckets: the names of what it moves, in its order; empty where it is none of ours.
        nbytes: the gathered whole, or what goes into a reduction.
        ranks: among how many ranks it goes.
        start: how many ops come before it.
        waits: how many ops come before each wait for it.
    """

    kind: str
    buckets: tuple[str, ...]
    nbytes: int
    ranks: int
    start: int
    waits: tuple[int, ...]

    @property
    def what(self) -> str:
        """It in a few words."""
        return f"{self.kind} of {' + '.join(self.buckets) or 'no bucket'}"


def say_plan(gm: GraphModule, ctx: PassContext, plan: Plan, graph_plan: GraphPlan) -> None:
    """Log what was decided for a finished graph, and dump it where that is asked for."""
    if not (log.isEnabledFor(logging.INFO) or is_wanted()):
        return
    sent = read_collectives(gm, ctx)
    line = summary(ctx, sent, graph_plan)
    log.info("%s", line)
    for decision in decisions(ctx, sent):
        log.debug("graph %d: %s", ctx.number, decision)
    if is_wanted():
        text = plan_text(gm, ctx, sent, plan, graph_plan)
        write_text(f"{ctx.stem}_plan.txt", "buckets, schedule, memory", f"{line}\n\n{text}")


def read_collectives(gm: GraphModule, ctx: PassContext) -> list[Sent]:
    """The collectives of a graph, in order."""
    hints, place = symbol_hints(gm), _places(gm)
    found = []
    for node in filter(is_collective, gm.graph.nodes):
        given = sum(tensor_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)
        nbytes = max(evaluate(size, hints) for size in (given, tensor_bytes(node.meta.get("val"))))
        waits = [user for result in results_of(node) for user in result.users if is_wait(user)]
        found.append(
            Sent(
                kind_of(node),
                ctx.labels_of(node) if specs_of(node) else (),
                int(nbytes),
                ranks_in(node),
                place[node],
                tuple(place[wait] for wait in waits),
            )
        )
    return found


def summary(ctx: PassContext, sent: list[Sent], graph_plan: GraphPlan) -> str:
    """A graph in a line: what it sends, how long it is planned to take, its peak of memory."""
    kinds = Counter(collective.kind for collective in sent)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    nbytes = format_bytes(sum(collective.nbytes for collective in sent))
    planned = ctx.forecast
    times = "not scheduled" if sent else "nothing to schedule"
    if planned is not None:
        times = (
            f"planned {_ms(planned.seconds)}: compute {_ms(planned.compute)}, exposed "
            f"{_ms(planned.exposed)} of {_ms(planned.wire)} on the wire"
        )
    return (
        f"{ctx.phase} graph {ctx.number}: {f'{counts}, {nbytes}' if sent else 'no collectives'}; "
        f"{times}; peak {format_bytes(graph_plan.peak)}"
    )


def decisions(ctx: PassContext, sent: list[Sent]) -> Iterator[str]:
    """What was decided, one thing a line: what stays gathered, what travels together and when."""
    if ctx.budget is not None:
        yield (
            f"within {format_bytes(ctx.budget.nbytes)}: kept gathered: {_kept(ctx)}; up to "
            f"{ctx.units_in_flight} units are gathered ahead"
        )
    for one in sent:
        ahead = min(one.waits, default=one.start) - one.start
        merged = ", one message" if len(one.buckets) > 1 else ""
        yield (
            f"{one.what} ({format_bytes(one.nbytes)}{merged}) starts at op {one.start}, "
            f"{ahead} ops before its wait"
        )


def plan_text(
    gm: GraphModule, ctx: PassContext, sent: list[Sent], plan: Plan, graph_plan: GraphPlan
) -> str:
    """The tables of a graph: its buckets, its schedule, its memory."""
    buckets = bucket_table((bucket.label, bucket) for bucket in plan.buckets.values())
    schedule = tabulate(schedule_rows(gm, sent), headers=_HEADERS, disable_numparse=True)
    liveness = graph_plan.liveness
    rows = [
        ["segments and optimizer state", format_bytes(graph_plan.static)],
        ["inputs that the graph frees", format_bytes(liveness.inputs)],
        [f"peak of the graph, at {liveness.peak_node}", format_bytes(liveness.peak)],
        ["what it returns", format_bytes(liveness.outputs)],
        ["peak with segments and optimizer state", format_bytes(graph_plan.peak)],
    ]
    memory = tabulate(rows, tablefmt="plain", disable_numparse=True)
    if ctx.budget is not None:
        buckets += f"\n\nkept gathered within the budget: {_kept(ctx)}"
    return f"buckets\n\n{buckets}\n\nschedule\n\n{schedule}\n\nmemory\n\n{memory}\n"


def _kept(ctx: PassContext) -> str:
    """The buckets that stay gathered until the backward because the budget has room."""
    return ", ".join(ctx.labels[position] for position in sorted(ctx.kept)) or "none"


_HEADERS = ["op", "", "collective", "bytes", "ranks", "next op", "other end"]


def schedule_rows(gm: GraphModule, sent: list[Sent]) -> Iterator[list[str]]:
    """One row for every start and every wait, in the order of the graph."""
    names = [node.name for node in gm.graph.nodes if _computes(node)]
    names.append("(end)")
    numbers = {node: n for n, node in enumerate(filter(is_collective, gm.graph.nodes))}
    waits = {
        user: (numbers[node], index)
        for node in numbers
        for index, result in enumerate(results_of(node))
        for user in result.users
        if is_wait(user)
    }
    place = _places(gm)
    for node in gm.graph.nodes:
        at = place[node]
        if node in numbers:
            one = sent[numbers[node]]
            ends = ", ".join(str(wait) for wait in dict.fromkeys(one.waits))
            nbytes, ranks = format_bytes(one.nbytes), str(one.ranks)
            yield [str(at), "start", one.what, nbytes, ranks, names[at], f"waited for at {ends}"]
        elif node in waits:
            number, index = waits[node]
            one = sent[number]
            what = one.what
            if len(one.buckets) == len(one.waits):
                what = f"{one.kind} of {one.buckets[index]}"
            yield [str(at), "wait", what, "", "", names[at], f"started at {one.start}"]


def _places(gm: GraphModule) -> dict[Node, int]:
    """How many ops come before each node."""
    places, count = {}, 0
    for node in gm.graph.nodes:
        places[node] = count
        count += _computes(node)
    return places


def _computes(node: Node) -> bool:
    moves = is_collective(node) or is_wait(node) or is_view(node)
    return node.op == "call_function" and not moves


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def say_compile() -> None:
    """Log that Dynamo hands over a graph, and whether it did before."""
    known = compat.compile_id()
    if known is not None:
        frame, before = known
        again = f"compiled {before} times before; TORCH_LOGS=recompiles says why"
        log.debug("compiling frame %d (%s)", frame, again if before else "its first graph")
