"""Graph of a step: wait for the last reductions as late as possible, and update meanwhile.

    before:  rs1 rs0 wait1 wait0 update([p0, p1, p2])
    after:   rs1 rs0 update([p2]) wait1 update([p1]) wait0 update([p0])

A gather of updated parameters, for the next step, starts right behind their update. The updates
that no such gather needs come behind the first one, to run meanwhile.

    before:  rs1 rs0 wait1 wait0 update([p0, p1, p2]) ag1 wait
    after:   rs1 rs0 wait1 update([p1]) ag1 update([p2]) wait0 update([p0]) wait

An op over lists of tensors (`_fused_adamw_`, `_foreach_mul_`) is divided where its tensors come
behind other waits, and in halves around the gather of the bucket that is reduced last: one hides
the reduction, one the gather. All other nodes keep their order, so the bits are the same. Where a
norm of all gradients clips them, every update comes behind every wait, and nothing moves.

The nodes behind the last collective that needs no reduction are looked at. Ranks have other nodes
there, because they have other parts of parameters; collectives and waits keep their order.
"""

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.estimate.cost import tensor_bytes
from shardc.passes.nodes import (
    awaited_by,
    awaits_reduction,
    brings_parameters,
    is_collective,
    is_random,
    is_transfer,
    is_view,
    is_wait,
    memory_of,
    reach,
    writes,
    written_by,
)
from shardc.passes.schedule.reorder import Key, reorder


@contract()
def update_when_reduced(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Put every node of the end of a step behind the waits that it needs, and before the others."""
    ahead = _gathers_ahead(gm)
    nodes = _end_of(gm, ahead)
    if not any(map(is_wait, nodes)):
        return gm
    levels, keys = _Levels(), dict[Node, Key]()
    for index, node in enumerate(nodes):
        for part in _divided(node, levels):
            keys[part] = levels.enter(part), 0, index
    starts = [keys[node][0] for node in ahead if node in keys]
    if starts:
        _run_behind(starts, keys)
    reorder(gm, keys)
    return gm


def _gathers_ahead(gm: GraphModule) -> list[Node]:
    """The gathers for the next step, behind all that is reduced."""
    found = list[Node]()
    for node in reversed(gm.graph.nodes):
        if is_collective(node) and brings_parameters(node):
            found.append(node)
        elif is_collective(node) or (is_wait(node) and _may_reduce(node)):
            break
    return found


def _run_behind(starts: list[int], keys: dict[Node, Key]) -> None:
    """Put the nodes that no collective needs behind gathers, which start at some levels.

    `levels_behind` gives their levels.
    """
    needed = _needed_by_collectives(list(keys))
    reductions = sum(is_wait(node) and _may_reduce(node) for node in keys)
    late = _Levels()  # 1 for nodes behind the last gather
    for node, (level, _, index) in list(keys.items()):
        if node in needed:
            continue
        parts, levels = [node], levels_behind(level, starts, reductions)
        if len(levels) > 1 and _lists_of(node):
            parts = _halves(node)
            del keys[node]
        for place, part in enumerate(parts):
            keys[part] = levels[0], 1, index
            if place == 1 or late.behind(part):
                keys[part] = max(starts), 1, index
                late.note(part, 1)


def levels_behind(level: int, starts: Collection[int], reductions: int) -> list[int]:
    """The levels of an update that no gather for the next step needs: two where it is divided.

    It comes behind the first gather. Where the last one starts behind the last reduction, both are
    of one bucket and take as long: half of the update comes before them, half behind.

    Args:
        level: the waits before the update.
        starts: the waits before each gather.
        reductions: the waits for reductions.
    """
    first, last = min(starts) if min(starts) < reductions else 0, max(starts)
    return [max(level, first), *([last] if last >= reductions > level else [])]


def _halves(node: Node) -> list[Node]:
    """An op over lists in two parts, with about as many bytes each."""
    sizes = [tensor_bytes(each.meta["val"]) for each in _lists_of(node)[0]]
    until = list(itertools.accumulate(sizes))
    cut = next(place for place, size in enumerate(until, 1) if 2 * size >= until[-1])
    cuts = [range(cut), range(cut, len(sizes))]
    parts = [_part(node, list(places)) for places in cuts if places]
    node.graph.erase_node(node)
    return parts


def _needed_by_collectives(nodes: list[Node]) -> set[Node]:
    """Collectives, waits, and the nodes whose results or memory one of them needs."""
    needed, memory = set[Node](), _Levels()
    for node in reversed(nodes):
        is_root = is_collective(node) or is_wait(node)
        met = memory.behind(node)
        if is_root or met or not needed.isdisjoint(node.users):
            needed.add(node)
            memory.note(node, 1)
    return needed


def _written(node: Node) -> set[Node]:
    """The operands that a node writes; a wait writes that of its collective."""
    return set(node.all_input_nodes) if is_wait(node) else written_by(node)


def _end_of(gm: GraphModule, ahead: list[Node]) -> list[Node]:
    """The nodes behind the last call, or the last collective that needs no reduction.

    Gathers `ahead` are among the nodes.
    """
    reductions = [node for node in gm.graph.nodes if is_wait(node) and _may_reduce(node)]
    behind = reach(lambda node: node.users, *reductions).union(ahead)
    end = list[Node]()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        is_call = writes(node) is None and not is_view(node)
        if is_call or (is_collective(node) and node not in behind):
            end.clear()
        else:
            end.append(node)
    return end


def _may_reduce(wait: Node) -> bool:
    """Whether a wait is for a reduction, in this graph or from a compiled one."""
    return awaits_reduction(wait) or not is_transfer(awaited_by(wait))


class _Levels:
    """The level of each node, and of the memory that nodes read and write.

    A node comes behind the writes of memory that it reads, and behind the reads and writes of
    memory that it writes. A wait writes the memory of its collective. Ops that draw random numbers
    keep their order.
    """

    def __init__(self) -> None:
        self._of: dict[Node, int] = {}
        self._waits = self._started = 0
        self._read: defaultdict[object, int] = defaultdict(int)
        self._written: defaultdict[object, int] = defaultdict(int)

    def behind(self, node: Node) -> int:
        """The level behind which a node may come."""
        random = self._written[_RANDOM] if is_random(node) else 0
        return max(random, self.behind_operands(node.all_input_nodes, _written(node)))

    def behind_operands(self, operands: Iterable[Node], written: Collection[Node]) -> int:
        """The level behind which a node may come by some of its operands."""
        level = 0
        for each in operands:
            memory = memory_of(each)
            level = max(level, self._of.get(each, 0), self._written[memory])
            level = max(level, self._read[memory]) if each in written else level
        return level

    def note(self, node: Node, level: int) -> None:
        """Note the level of a node."""
        written = _written(node)
        for each in node.all_input_nodes:
            noted, memory = self._written if each in written else self._read, memory_of(each)
            noted[memory] = max(noted[memory], level)
        if is_random(node):
            self._written[_RANDOM] = max(self._written[_RANDOM], level)
        self._of[node] = level

    def enter(self, node: Node) -> int:
        """Find the level of the next node: the number of waits before it, if each is latest."""
        level = self.behind(node)
        if is_wait(node):
            self._waits += 1
        if is_wait(node) or (is_collective(node) and not brings_parameters(node)):
            level = self._waits
        if is_collective(node):
            level = self._started = max(level, self._started)  # collectives keep their order
        self.note(node, level)
        return level


_RANDOM = "random numbers"


def _divided(node: Node, levels: _Levels) -> Iterator[Node]:
    """A node in parts: one for each level of the tensors in its lists."""
    lists = _lists_of(node)
    number = len(lists[0]) if lists else 0
    if not lists:
        yield node
        return
    written = written_by(node)
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place in range(number):
        tensors = [each[place] for each in lists if isinstance(each[place], Node)]
        places[levels.behind_operands(tensors, written)].append(place)
    if len(places) <= 1:
        yield node
        return
    for _, own in sorted(places.items()):
        yield _part(node, own)
    node.graph.erase_node(node)


def _lists_of(node: Node) -> list[list[Any]]:
    """The lists of an op that treats their tensors each by itself; empty for other ops."""
    name = getattr(node.target, "_opname", "")
    items = all(user.target is operator.getitem for user in node.users)
    given = (*node.args, *node.kwargs.values())
    lists = [each for each in given if isinstance(each, list) and each]
    is_one = name.startswith(("_foreach_", "_fused_")) and items
    return lists if is_one and len(set(map(len, lists))) == 1 else []


def _part(node: Node, places: list[int]) -> Node:
    """The op of `node` over some places of its lists; it takes over the readers of its results."""

    def cut(value: Any) -> Any:
        return [value[place] for place in places] if isinstance(value, list) and value else value

    args = tuple(map(cut, node.args))
    kwargs = {name: cut(value) for name, value in node.kwargs.items()}
    with node.graph.inserting_before(node):
        part = node.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    for user in list(node.users):
        if user.args[1] in places:
            user.args = part, places.index(user.args[1])  # type: ignore[arg-type]
    return part
