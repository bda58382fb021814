"""The times at which the ops and collectives of one compiled graph run, by the cost model.

The graph is in the order in which it runs. The clock and the transfers are those of its timeline;
here they go through it op by op. A collective is exposed for as long as compute stands still at its
wait.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from shardc.passes.estimate.cost import (
    Registers,
    evaluate,
    first_made,
    node_flops,
    node_seconds,
    symbol_hints,
    transfer_bytes,
)
from shardc.passes.estimate.hardware import Profile
from shardc.passes.estimate.memory import Liveness
from shardc.passes.nodes import (
    awaited_by,
    in_steps,
    is_collective,
    is_host_copy,
    is_wait,
    kind_of,
    labels_of,
    module_of,
    moved_by,
    ranks_in,
)
from shardc.passes.schedule.events import in_numbers
from shardc.passes.schedule.timeline import Clock
from shardc.reports.record import CollectiveRow, MemoryPoint, Op
from shardc.runtime.checks.words import dtype_name


@dataclass(frozen=True)
class GraphRows:
    """The rows that a graph adds to a record; times count from the start of the graph.

    Attributes:
        phase: "forward" or "backward".
        seconds: until all compute and all transfers are done.
        collectives, ops: see `Record`.
        memory: bytes that the graph itself holds; segments and optimizer state are left out.
        flops: operations of matmuls and of ops like them, by dtype.
        kept: names of the buckets that stay gathered by the plan's choice (`Kept`).
        gathered: the name of each gathered bucket, and when it is held: from the first of `memory`
            that counts it to the next one that does not.
    """

    phase: str
    seconds: float
    collectives: tuple[CollectiveRow, ...]
    ops: tuple[Op, ...]
    memory: tuple[MemoryPoint, ...]
    flops: dict[str, float]
    kept: frozenset[str] = frozenset()
    gathered: tuple[tuple[str, float, float], ...] = ()

    def after(self, seconds: float) -> "GraphRows":
        """The rows of the graph if it starts `seconds` later."""

        def later(row: Any, *times: str) -> Any:
            return replace(row, **{name: getattr(row, name) + seconds for name in times})

        return replace(
            self,
            collectives=tuple(
                later(row, "issued", "start", "end", "waited") for row in self.collectives
            ),
            ops=tuple(later(row, "start") for row in self.ops),
            memory=tuple(later(row, "seconds") for row in self.memory),
            gathered=tuple((n, start + seconds, end + seconds) for n, start, end in self.gathered),
        )


def read_graph(
    gm: GraphModule, phase: str, profile: Profile, liveness: Liveness, fused: bool
) -> GraphRows:
    """Play a scheduled graph, in the form that is lowered, and note its rows.

    `liveness` is that of `gm`, in its order. With `fused`, kernels fuse elementwise ops.
    """
    hints, known = symbol_hints(gm), Registers()
    clock = Clock()
    sent: dict[Node, tuple[int, float, float]] = {}  # its place, the times of its start
    waits: dict[Node, tuple[float, float, float]] = {}  # its place, the time, the stall
    ops: list[Op] = []
    places: list[int] = []
    memory: list[MemoryPoint] = []
    flops: defaultdict[str, float] = defaultdict(float)
    nodes = {node.name: node for node in gm.graph.nodes}
    for place, node in enumerate(nodes[name] for name in liveness.nodes):
        before = clock.now
        if is_host_copy(node) or (is_collective(node) and moved_by(node)):
            transfer = in_numbers(node, place, profile, hints)
            start = clock.start(node, transfer.seconds, transfer.wire, transfer.then)
            if not is_host_copy(node):
                sent[node] = place, before, start
        elif is_wait(node) and (source := awaited_by(node)) in clock.arrived:
            clock.wait(source)
            waits.setdefault(source, (place, before, clock.now - before))
        else:
            seconds = evaluate(node_seconds(node, profile, fused, known), hints)
            if seconds > 0:
                places.append(place)
                ops.append(Op(phase, _name(node), module_of(node), before, seconds))
                flops[dtype_of(node)] += evaluate(node_flops(node), hints)
            clock.now += seconds
        memory.append(_memory(liveness, place, clock.now, f"{phase}, {_in_words(node)}"))
    rows = []
    for node, (place, issued, start) in sent.items():
        wait_place, waited, exposed = waits.get(node, (math.inf, clock.now, 0.0))
        around = _op_after(place, ops, places), _op_after(wait_place, ops, places)
        times = {"issued": issued, "start": start, "end": clock.arrived[node]}
        rows.append(_row(node, phase, hints, around, **times, waited=waited, exposed=exposed))
    steps = _steps_of(memory)
    return GraphRows(
        phase,
        clock.end,
        tuple(rows),
        tuple(ops),
        tuple(memory[place] for place in steps),
        flops,
        gathered=tuple(_gathered(liveness, memory, steps, clock.end)),
    )


def _gathered(
    liveness: Liveness, memory: Sequence[MemoryPoint], steps: Sequence[int], end: float
) -> Iterator[tuple[str, float, float]]:
    """`GraphRows.gathered`, where `steps` are the places of the points that are kept."""
    for each in liveness.gatherings:
        first = bisect.bisect_left(steps, each.first)
        after = bisect.bisect_right(steps, each.last)
        if first < after:
            until = memory[steps[after]].seconds if after < len(steps) else end
            yield each.label, memory[steps[first]].seconds, until


def _row(
    node: Node, phase: str, hints: dict[Any, int], around: tuple[str, str], **times: float
) -> CollectiveRow:
    """The row of a collective, with the ops behind its start and its wait, and with its times."""
    return CollectiveRow(
        phase=phase,
        kind=kind_of(node),
        buckets=labels_of(node),
        ranks=ranks_in(node),
        nbytes=int(evaluate(transfer_bytes(node), hints)),
        before=around[0],
        needed_by=around[1],
        dtype=dtype_of(node),
        in_steps=in_steps(node),
        **times,
    )


def _op_after(place: float, ops: list[Op], places: list[int]) -> str:
    """The first op of a module after a place of the graph, in words.

    An op of no module (a cast of a segment, an op of the loss) counts if no op of a module follows.
    """
    if not places or place >= places[-1]:
        return "(end)"
    later = ops[bisect.bisect_right(places, place) :]
    found = next((op for op in later if op.module), later[0])
    return f"{found.module}: {found.name}" if found.module else found.name


def _memory(liveness: Liveness, place: int, clock: float, where: str) -> MemoryPoint:
    gathered, gradients = liveness.gathered[place], liveness.gradients[place]
    away = liveness.away[place]
    values = liveness.live[place] + away - gathered - gradients
    return MemoryPoint(clock, (0, -away, gradients, values, gathered, 0), where)


def _steps_of(points: list[MemoryPoint]) -> list[int]:
    """The points at which held bytes change, by index; of several at one time, the fullest."""
    kept: list[int] = []
    for place, point in enumerate(points):
        before = points[kept[-1]] if kept else None
        if before is not None and before.seconds == point.seconds:
            if point.total > before.total:
                kept[-1] = place
        elif before is None or before.held != point.held:
            kept.append(place)
    return kept


def dtype_of(node: Node) -> str:
    """The dtype of a node's first result."""
    value = first_made(node)
    return "" if value is None else dtype_name(value.dtype)


def _in_words(node: Node) -> str:
    module = module_of(node)
    return f"{module}: {_name(node)}" if module else _name(node)


def _name(node: Node) -> str:
    return str(getattr(node.target, "_opname", node.name))
