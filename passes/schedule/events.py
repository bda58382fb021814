"""A forward or backward graph as a line of events, for the timeline.

Compute steps keep their order. Transfers may move between them, together with the nodes that only
prepare their input and with the views of their result. An event is a place where one of them is
needed or ready. Ranks agree on the compute times between events the first time a sequence of
collectives is compiled (the slowest rank's count), and keep them when a rank recompiles for its own
shapes: a plan never depends on anything that differs between ranks.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    node_seconds,
    seconds_on_wire,
    symbol_hints,
    tensor_bytes,
)
from shardc.passes.estimate.hardware import Profile
from shardc.passes.nodes import (
    brings_parameters,
    comes_from_host,
    describe_collective,
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
    reach,
    unit_of_copy,
    waits_for,
)
from shardc.passes.schedule.timeline import BRINGS, KINDS, STATES, Kind, Problem, Transfer


@dataclass(frozen=True)
class Moving:
    """The nodes of a transfer, which move together.

    Attributes:
        kind: of the transfer.
        start: the node that starts it: a collective, or a copy to or from the host.
        before: the nodes that only prepare its input (casts, `pack`, those that `prepares` finds).
        after: its wait, then views of its result; for a reduction all that follows.
        step: if it brings, the first step that reads the result; else the first step after its
            input is made.
        unit: the unit whose bucket, value or state it moves: its number, or for a copy its name.
        inside: of a reduction across nodes, those inside of them that it waits for.
    """

    kind: Kind
    start: Node
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    step: int
    unit: int | str
    inside: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Events:
    """A graph as a line of events: event e lies before step `positions[e]`.

    Attributes:
        steps: the nodes that compute, in graph order.
        transfers: kind by kind, as those of `Problem`.
        positions: of the events.
    """

    steps: tuple[Node, ...]
    transfers: tuple[Moving, ...]
    positions: tuple[int, ...]

    def event_of(self, transfer: Moving) -> int:
        """The event at which a transfer is needed or ready."""
        return self.positions.index(transfer.step)

    def of(self, kind: Kind) -> list[Moving]:
        """The transfers of a kind, in the order in which they are needed or ready."""
        return [transfer for transfer in self.transfers if transfer.kind == kind]


_Attached = dict[Node, tuple[list[Node], list[Node]]]
"""For the node that starts a transfer, those before and after it that move along."""


def read_events(gm: GraphModule) -> Events:
    """The transfers of a graph, and the compute steps between which they may move."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    attached: _Attached = {}
    ours = our_collectives(gm)
    inside = {node for start in filter(is_all_gather, ours) for node in prepares(start)}
    for start in (node for node in ours if node not in inside):
        after = _result(start) if brings_parameters(start) else _tail(start)
        attached[start] = (_preparation(start), after)
    fed_by = _fed_by(attached)
    _give_to_following(attached, fed_by)
    for copy in filter(is_host_copy, nodes):
        attached[copy] = ([], _result(copy) if comes_from_host(copy) else waits_for(copy))
    moving = {node for start, (b, a) in attached.items() for node in (start, *b, *a)}
    steps = [node for node in nodes if node not in moving]
    index = {step: number for number, step in enumerate(steps)}
    transfers = []
    for start, (before, after) in attached.items():
        kind = kind_of_transfer(start)
        if kind in BRINGS:
            step = _first_reader(after, steps, index)
        else:
            read = {operand for node in (start, *before) for operand in node.all_input_nodes}
            step = max((index[node] for node in read if node in index), default=-1) + 1
        unit = unit_of_copy(start) if is_host_copy(start) else moved_by(start)[0].unit
        transfers.append(Moving(kind, start, tuple(before), tuple(after), step, unit))
    transfers.sort(key=lambda t: t.step)
    transfers = _follow(transfers, fed_by, len(steps))
    transfers.sort(key=lambda t: KINDS.index(t.kind))
    positions = sorted({0, *(t.step for t in transfers)})
    if any(goes_inside(start) for start in fed_by):
        positions = _with_places_between(positions, len(steps))
    return Events(tuple(steps), tuple(transfers), tuple(positions))


def _first_reader(results: Iterable[Node], steps: Sequence[Node], index: Mapping[Node, int]) -> int:
    """The first step that reads one of `results`, or the first of the views right before it."""
    readers = [index[user] for node in results for user in node.users if user in index]
    step = min(readers, default=len(steps))
    while step and not _computes(steps[step - 1]):
        step -= 1
    return step


def kind_of_transfer(start: Node) -> Kind:
    """The kind of the transfer that a node starts."""
    if not is_host_copy(start):
        return "gather" if brings_parameters(start) else "reduce"
    if moves_state(start):
        return "return" if comes_from_host(start) else "leave"
    return "load" if comes_from_host(start) else "save"


def _computes(step: Node) -> bool:
    """Whether a step fills a tensor.

    Where sizes are dynamic there may be more views and sizes, and on some ranks only: the event at
    which a gather is needed must not depend on such steps.
    """
    given = (step, *step.all_input_nodes) if step.meta.get("val") is None else (step,)
    values = tree_leaves([node.meta.get("val") for node in given])
    return any(isinstance(value, Tensor) for value in values) and not is_view(step)


def _preparation(start: Node) -> list[Node]:
    """The nodes that only `start` needs, in graph order."""
    own = prepares(start) if is_all_gather(start) else set()
    if own:
        return sorted(own)
    found: list[Node] = []
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        is_pack = node.target is torch.ops.shardc.pack.default
        movable = brings_parameters(start) or is_pack or is_view(node)
        movable = movable and node.op == "call_function" and not is_wait(node)
        if movable and all(user is start or user in found for user in node.users):
            found.insert(0, node)
            todo += node.all_input_nodes
    return sorted(set(found))


def _fed_by(attached: _Attached) -> dict[Node, set[Node]]:
    """The reductions that each reduction waits for: among copies of the model one or two."""
    fed_by: dict[Node, set[Node]] = {
        start: set() for start in attached if not brings_parameters(start)
    }
    for start in fed_by:
        for node in attached[start][1]:
            if node in fed_by:
                fed_by[node].add(start)
    return fed_by


def _give_to_following(attached: _Attached, fed_by: dict[Node, set[Node]]) -> None:
    """Give the nodes between a reduction and the one over copies that follows to the latter, as
    its preparation."""
    for start, earlier in fed_by.items():
        if not earlier:
            continue
        before, after = attached[start]
        feeding = reach(lambda n: n.all_input_nodes, start) - {start}
        for tail in (attached[other][1] for other in fed_by if other in earlier):
            before[:] = sorted({*before, *(node for node in tail if node in feeding)})
            tail[:] = [node for node in tail if node not in (*before, start, *after)]


def _follow(transfers: list[Moving], fed_by: dict[Node, set[Node]], end: int) -> list[Moving]:
    """Move reductions that wait for others behind the start of a later reduction.

    A reduction that waits for another starts when the next of those has started; one that waits for
    it in turn, with the one after. The second step of one in two steps starts before the next
    reduction does, or earlier (`_after`).
    """
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
    """The number of reductions that a reduction waits for, one after the other."""
    return max((1 + _depth(earlier, fed_by) for earlier in fed_by[start]), default=0)


def _tail(start: Node) -> list[Node]:
    """The nodes that depend on a reduction (its wait, casts, divisions): they lead to outputs."""
    return sorted(reach(lambda n: n.users, start) - {start, start.graph.output_node()})


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
    """A line of events in numbers, with the limits and hints of `ctx.options`."""
    hints, options = symbol_hints(gm), ctx.planned
    known: Registers = {}
    costs = [
        evaluate(node_seconds(step, options.profile, options.fused, known), hints)
        for step in events.steps
    ]
    bounds = [*events.positions, len(events.steps)]
    seconds = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    if ctx.agree_on_seconds is not None:

        def facts(by_number: bool) -> list[str]:
            by_step = sorted(events.transfers, key=lambda t: t.step)
            described = ((_described(t, by_number), events.event_of(t)) for t in by_step)
            return [str(options), *(f"{start} at event {event}" for start, event in described)]

        seconds = ctx.agree_on_seconds(facts, seconds)

    gathers = [(moved_by(t.start)[0].unit, events.event_of(t)) for t in events.of("gather")]
    wanted = options.wanted(ctx.phase, gathers)
    transfers = [
        in_numbers(
            moving.start, events.event_of(moving), options.profile, hints, moving.before, asked
        )
        for moving, asked in itertools.zip_longest(events.transfers, wanted)  # gathers come first
    ]
    by_start = dict(zip((moving.start for moving in events.transfers), transfers, strict=True))
    for place, moving in enumerate(events.transfers):
        if moving.inside:
            event = _after([by_start[start] for start in moving.inside], transfers[place], seconds)
            transfers[place] = replace(transfers[place], event=event)
    units: dict[Kind, Counter[int | str]] = defaultdict(Counter)
    for moving, transfer in zip(events.transfers, transfers, strict=True):
        units[moving.kind][moving.unit] += transfer.nbytes
    largest = {kind: max(sizes.values()) for kind, sizes in units.items() if kind not in STATES}
    in_flight = {kind: ctx.kept.ahead * nbytes for kind, nbytes in largest.items()}
    return Problem(tuple(seconds), tuple(transfers), in_flight, options.reduce_buffers)


def in_numbers(
    start: Node,
    event: int,
    profile: Profile,
    hints: Mapping[Any, float],
    before: Iterable[Node] = (),
    wanted: int | None = None,
) -> Transfer:
    """A transfer in numbers, by the node that starts it and the nodes that prepare its input."""
    sent = [*filter(is_collective, before), start]
    return Transfer(
        kind_of_transfer(start),
        event,
        int(evaluate(_bytes_held(start), hints)),
        sum(seconds_on_wire(node, profile, hints) for node in sent),
        wanted,
        then=evaluate(following_seconds(start, profile), hints),
        fixed=fixed_seconds(start, profile),
        inside=goes_inside(start),
    )


def _bytes_held(start: Node) -> Any:
    """Bytes of the result of a gather or copy, or of the input of a reduction."""
    if is_host_copy(start):
        return copy_bytes(start)
    held = [start] if brings_parameters(start) else start.all_input_nodes
    return tensor_bytes([node.meta.get("val") for node in held])


def _after(inside: Sequence[Transfer], transfer: Transfer, seconds: Sequence[float]) -> int:
    """The event at which a reduction across nodes is ready: those `inside` of nodes, for which it
    waits, have arrived by the model."""
    event, left = max(each.event for each in inside), sum(each.seconds for each in inside)
    while event < transfer.event and left > 0:
        left -= seconds[event]
        event += 1
    return event


def _described(moving: Moving, by_number: bool) -> str:
    """A transfer in one line, equal on all ranks."""
    if not is_host_copy(moving.start):
        return describe_collective(moving.start, by_number)
    what = "state" if moving.kind in STATES else "copy"
    return f"a {what} {'from' if comes_from_host(moving.start) else 'to'} the host"
