"""A forward or backward graph as a line of events: what the schedule is planned on.

Compute steps keep the order in which they were traced. Collectives may move between them, together
with what only prepares their input and with the views of their result; an event is a place where
one of them is needed or ready. Ranks agree on the compute times between events the first time a
sequence of collectives is compiled (the slowest rank's count), and keep them when a rank recompiles
for its own shapes: what is planned never depends on anything that differs between ranks.
"""

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from shardc.passes.context import PassContext
from shardc.passes.estimate.cost import (
    Registers,
    copy_bytes,
    evaluate,
    fixed_seconds,
    following_seconds,
    host_seconds,
    node_seconds,
    symbol_hints,
    tensor_bytes,
    transfer_seconds,
)
from shardc.passes.nodes import (
    brings_parameters,
    comes_from_host,
    describe,
    goes_inside,
    is_all_gather,
    is_collective,
    is_host_copy,
    is_view,
    is_wait,
    moved_by,
    moves_state,
    our_collectives,
    prepares,
    ranks_in,
    reach,
    unit_of_copy,
    waits_for,
)
from shardc.passes.schedule.timeline import Gather, Limits, Problem, Reduce


@dataclass(frozen=True)
class Transfer:
    """A collective in the graph with all that moves along.

    Attributes:
        start: the node that starts it: a collective, or a copy to or from the host.
        before: what only prepares its input (casts, `pack`; what `prepares` it).
        after: its wait, then views of its result; for a reduction all that follows.
        step: the first step that reads what it brings; of what is sent, the first that may follow.
        unit: the number of the unit whose bucket it moves; None for a copy.
        inside: of a reduction across nodes, those inside of them that it waits for.
    """

    start: Node
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    step: int
    unit: int | None
    inside: tuple[Node, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether it copies a value to the host or from there."""
        return self.unit is None and not self.is_state

    @property
    def is_state(self) -> bool:
        """Whether it copies an optimizer's state to the host or from there."""
        return moves_state(self.start)

    @property
    def is_gather(self) -> bool:
        """Whether it brings parameters, or a value; else it reduces, or saves one."""
        return _brings(self.start)


@dataclass(frozen=True)
class Events:
    """A graph as `plan_timeline` sees it: event e lies before step `positions[e]`."""

    steps: tuple[Node, ...]
    transfers: tuple[Transfer, ...]
    positions: tuple[int, ...]

    def of(self, transfer: Transfer) -> int:
        """The event at which a transfer is needed or ready."""
        return self.positions.index(transfer.step)

    @property
    def gathers(self) -> list[Transfer]:
        """The gathers, in the order in which they are needed."""
        return [each for each in self._collectives if each.is_gather]

    @property
    def reduces(self) -> list[Transfer]:
        """The reductions, in the order in which they are ready."""
        return [each for each in self._collectives if not each.is_gather]

    @property
    def loads(self) -> list[Transfer]:
        """The copies from the host, in the order in which they are needed."""
        return [each for each in self.transfers if each.is_gather and each.is_copy]

    @property
    def saves(self) -> list[Transfer]:
        """The copies to the host, in the order in which they are ready."""
        return [each for each in self.transfers if each.is_copy and not each.is_gather]

    @property
    def states(self) -> list[Transfer]:
        """The copies of optimizers' states: of a forward to the host, of a backward from there."""
        return [each for each in self.transfers if each.is_state]

    @property
    def _collectives(self) -> list[Transfer]:
        return [each for each in self.transfers if not (each.is_copy or each.is_state)]


def read_events(gm: GraphModule) -> Events:
    """Find what is sent and brought, and the compute steps between which that may move."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    attached: dict[Node, tuple[list[Node], list[Node]]] = {}
    ours = our_collectives(gm)
    inside = {node for start in filter(is_all_gather, ours) for node in prepares(start)}
    for start in (node for node in ours if node not in inside):
        before = _preparation(start)
        after = _result(start) if brings_parameters(start) else _tail(start)
        attached[start] = (before, after)
    fed_by = _fed_by(attached)
    _give_to_following(attached, fed_by)
    for copy in filter(is_host_copy, nodes):
        attached[copy] = ([], _result(copy) if _brings(copy) else waits_for(copy))
    moving = {node for start, (b, a) in attached.items() for node in (start, *b, *a)}
    steps = [node for node in nodes if node not in moving]
    index = {step: number for number, step in enumerate(steps)}
    transfers = []
    for start, (before, after) in attached.items():
        if _brings(start):
            readers = [index[u] for node in after for u in node.users if u in index]
            step = min(readers, default=len(steps))
            while step and not _computes(steps[step - 1]):
                step -= 1
        else:
            made = [
                index[i] for node in (start, *before) for i in node.all_input_nodes if i in index
            ]
            step = max(made, default=-1) + 1
        unit = None if is_host_copy(start) else moved_by(start)[0].unit
        transfers.append(Transfer(start, tuple(before), tuple(after), step, unit))
    transfers.sort(key=lambda t: t.step)
    transfers = _follow(transfers, fed_by, len(steps))
    positions = sorted({0, *(t.step for t in transfers)})
    if any(goes_inside(start) for start in fed_by):
        positions = _with_places_between(positions, len(steps))
    return Events(tuple(steps), tuple(transfers), tuple(positions))


def _brings(start: Node) -> bool:
    return brings_parameters(start) or comes_from_host(start)


def _computes(step: Node) -> bool:
    """Whether it fills a tensor. Views and sizes there may be more of where sizes are dynamic, and
    some ranks may have them so: where a gather is needed must not depend on these steps."""
    given = (step, *step.all_input_nodes) if step.meta.get("val") is None else (step,)
    values = tree_leaves([node.meta.get("val") for node in given])
    return any(isinstance(value, Tensor) for value in values) and not is_view(step)


def _preparation(start: Node) -> list[Node]:
    """The nodes computed only to be sent by `start`, in graph order."""
    own = prepares(start) if is_all_gather(start) else set()
    if own:
        return sorted(own)
    found: list[Node] = []
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        movable = brings_parameters(start) or _is_pack(node) or is_view(node)
        movable = movable and node.op == "call_function" and not is_wait(node)
        if movable and all(user is start or user in found for user in node.users):
            found.insert(0, node)
            todo += node.all_input_nodes
    return sorted(set(found))


_Attached = dict[Node, tuple[list[Node], list[Node]]]


def _fed_by(attached: _Attached) -> dict[Node, set[Node]]:
    """The reductions that each waits for; among copies of the model it waits for one or two."""
    fed_by: dict[Node, set[Node]] = {
        start: set() for start in attached if not brings_parameters(start)
    }
    for start in fed_by:
        for node in attached[start][1]:
            if node in fed_by:
                fed_by[node].add(start)
    return fed_by


def _give_to_following(attached: _Attached, fed_by: dict[Node, set[Node]]) -> None:
    """Count the nodes between a reduction and the one over copies that follows as preparation of
    the latter."""
    for start, earlier in fed_by.items():
        if not earlier:
            continue
        before, after = attached[start]
        feeding = reach(lambda n: n.all_input_nodes, start) - {start}
        for tail in (attached[other][1] for other in fed_by if other in earlier):
            before[:] = sorted({*before, *(node for node in tail if node in feeding)})
            tail[:] = [node for node in tail if node not in (*before, start, *after)]


def _follow(transfers: list[Transfer], fed_by: dict[Node, set[Node]], end: int) -> list[Transfer]:
    """A reduction that waits for another starts when the next of those has started; the one that
    waits for it in turn, with the one after. Of one in two steps the second starts before the next
    does, or earlier (`read_problem`)."""
    depths = {start: _depth(start, fed_by) for start in fed_by}
    first = [t for t in transfers if t.start in fed_by and not depths[t.start]]
    place = {t.start: index for index, t in enumerate(first)}
    result = []
    for transfer in transfers:
        depth = depths.get(transfer.start, 0)
        if depth:
            own = max(place[start] for start in fed_by[transfer.start] if start in place)
            later = first[own + depth :]
            step = later[0].step if later else end
            inside = tuple(filter(goes_inside, fed_by[transfer.start]))
            transfer = replace(transfer, step=step, inside=inside)
        result.append(transfer)
    return sorted(result, key=lambda t: (t.step, -1 if t.inside else depths.get(t.start, 0)))


_PARTS = 4


def _with_places_between(positions: list[int], end: int) -> list[int]:
    """`positions`, and places between them that split their steps into equal parts."""
    intervals = itertools.pairwise([*positions, end])
    return sorted({a + (b - a) * part // _PARTS for a, b in intervals for part in range(_PARTS)})


def _depth(start: Node, fed_by: dict[Node, set[Node]]) -> int:
    """How many reductions it waits for, one after the other."""
    return max((1 + _depth(earlier, fed_by) for earlier in fed_by[start]), default=0)


def _tail(start: Node) -> list[Node]:
    """All that depends on a reduction: its wait, casts, divisions; it leads to outputs only."""
    return sorted(reach(lambda n: n.users, start) - {start, start.graph.output_node()})


def _is_pack(node: Node) -> bool:
    return node.target is torch.ops.shardc.pack.default


def _result(start: Node) -> list[Node]:
    """The wait for `start` and the views of its result, in graph order."""
    found: list[Node] = []
    todo = list(start.users)
    while todo:
        node = todo.pop(0)
        movable = node not in found and (is_wait(node) or is_view(node))
        if movable and all(i is start or i in found for i in node.all_input_nodes):
            found.append(node)
            todo += node.users
    return found


def read_problem(gm: GraphModule, ctx: PassContext, events: Events) -> Problem:
    """The same in numbers, with the limits and hints of `ctx.options`."""
    hints, options = symbol_hints(gm), ctx.options
    assert options is not None
    known: Registers = {}
    costs = [
        evaluate(node_seconds(step, options.profile, options.fused, known), hints)
        for step in events.steps
    ]
    bounds = [*events.positions, len(events.steps)]
    seconds = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    if ctx.agree_on_seconds is not None:

        def facts(by_number: bool) -> list[str]:
            starts = [(_described(t, by_number), events.of(t)) for t in events.transfers]
            return [str(options), *(f"{start} at event {event}" for start, event in starts)]

        seconds = ctx.agree_on_seconds(facts, seconds)

    def wire(transfer: Transfer) -> float:
        sent = [*filter(is_collective, transfer.before), transfer.start]
        each = [transfer_seconds(node, ranks_in(node), options.profile) for node in sent]
        return sum(evaluate(seconds, hints) for seconds in each)

    def then(transfer: Transfer) -> float:
        return evaluate(following_seconds(transfer.start, options.profile), hints)

    def fixed(transfer: Transfer) -> float:
        return fixed_seconds(transfer.start, ranks_in(transfer.start), options.profile)

    def nbytes(*nodes: Node) -> int:
        return int(sum(evaluate(tensor_bytes(node.meta.get("val")), hints) for node in nodes))

    gathers, reduces = events.gathers, events.reduces
    needed = [(g.unit, events.of(g)) for g in gathers if g.unit is not None]
    wanted = options.wanted(ctx.phase, needed)
    gathered = [
        Gather(events.of(g), nbytes(g.start), wire(g), w, then(g), fixed(g))
        for g, w in zip(gathers, wanted, strict=True)
    ]
    inside = {r.start: r for r in reduces if goes_inside(r.start)}

    def ready(reduce: Transfer) -> int:
        earlier = [inside[start] for start in reduce.inside]
        event = max(map(events.of, earlier), default=events.of(reduce))
        left = sum(map(wire, earlier))
        while event < events.of(reduce) and left > 0:
            left -= seconds[event]
            event += 1
        return event

    made = [
        Reduce(ready(r), nbytes(*operands), wire(r), goes_inside(r.start), fixed(r))
        for r, operands in ((r, r.start.all_input_nodes) for r in reduces)
    ]

    def copied(transfer: Transfer) -> float:
        return float(host_seconds(evaluate(copy_bytes(transfer.start), hints), options.profile))

    copies = [*events.loads, *events.saves]  # a graph has either
    loads = tuple(Gather(events.of(t), nbytes(t.start), copied(t)) for t in events.loads)
    saves = tuple(Reduce(events.of(t), nbytes(t.start), copied(t)) for t in events.saves)
    ahead = ctx.kept.ahead
    limits = Limits(
        ahead * _largest_unit((t.unit, g.nbytes) for t, g in zip(gathers, gathered, strict=True)),
        ahead * _largest_unit((t.unit, r.nbytes) for t, r in zip(reduces, made, strict=True)),
        options.reduce_buffers,
        ahead * _largest_unit((unit_of_copy(t.start), nbytes(t.start)) for t in copies),
    )
    states = tuple(map(copied, events.states))
    sent, fetched = (states, ()) if ctx.phase == "forward" else ((), states)
    return Problem(
        tuple(seconds), tuple(gathered), tuple(made), limits, loads, saves, sent, fetched
    )


def _described(transfer: Transfer, by_number: bool) -> str:
    """A transfer in one line, equal on all ranks."""
    if transfer.is_copy or transfer.is_state:
        what = "state" if transfer.is_state else "copy"
        return f"a {what} from the host" if transfer.is_gather else f"a {what} to the host"
    return describe(transfer.start, by_number)


def _largest_unit(sizes: Iterable[tuple[Hashable, int]]) -> int:
    """The most bytes of any unit, given (unit, bytes)."""
    units: dict[Hashable, int] = {}
    for unit, size in sizes:
        units[unit] = units.get(unit, 0) + size
    return max(units.values(), default=0)
