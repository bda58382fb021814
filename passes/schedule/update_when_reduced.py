"""Graph of a step: wait for the last reductions as late as possible, and update meanwhile.

    before:  rs1 rs0 wait1 wait0 update([p0, p1, p2])
    after:   rs1 rs0 update([p2]) wait1 update([p1]) wait0 update([p0])

A gather of updated parameters, for the next step, starts right behind their update. The updates
that no such gather needs come behind the first one, to run meanwhile.

    before:  rs1 rs0 wait1 wait0 update([p0, p1, p2]) ag1 wait
    after:   rs1 rs0 wait1 update([p1]) ag1 update([p2]) wait0 update([p0]) wait

An op over lists of tensors (`_fused_adamw_`, `_foreach_mul_`) is divided where its tensors come
behind other waits. All other nodes keep their order, so the bits are the same. Where a norm of all
gradients clips them, every update comes behind every wait, and nothing moves.

The nodes behind the last collective that needs no reduction are looked at. Ranks have other nodes
there, because they have other parts of parameters; collectives and waits keep their order.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
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
    nodes = _end_of(gm)
    if not any(map(is_wait, nodes)):
        return gm
    levels, keys = _Levels(), dict[Node, Key]()
    for index, node in enumerate(nodes):
        for part in _divided(node, levels):
            keys[part] = levels.enter(part), 0, index
    starts = [keys[node][0] for node in _gathers_ahead(gm) if node in keys]
    reductions = sum(is_wait(node) and _may_reduce(node) for node in keys)
    if starts and min(starts) < reductions:
        keys |= _behind(min(starts), keys)
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


def _behind(level: int, keys: Mapping[Node, Key]) -> dict[Node, Key]:
    """Keys that put the nodes that no collective needs behind a level, and behind its gathers."""
    needed = _needed_by_collectives(list(keys))
    others = ((node, key) for node, key in keys.items() if node not in needed)
    return {node: (max(own, level), 1, index) for node, (own, _, index) in others}


def _needed_by_collectives(nodes: list[Node]) -> set[Node]:
    """Collectives, waits, and the nodes whose results or memory one of them needs."""
    needed, read, written = set[Node](), set[object](), set[object]()
    for node in reversed(nodes):
        own = {memory_of(each) for each in node.all_input_nodes}
        changed: set[object] = {memory_of(each) for each in _written(node)}
        if is_random(node):
            changed.add("random numbers")
        is_root = is_collective(node) or is_wait(node)
        if (
            is_root
            or changed & (read | written)
            or own & written
            or not needed.isdisjoint(node.users)
        ):
            needed.add(node)
            read |= own
            written |= changed
    return needed


def _written(node: Node) -> set[Node]:
    """The operands that a node writes; a wait writes that of its collective."""
    return set(node.all_input_nodes) if is_wait(node) else written_by(node)


def _end_of(gm: GraphModule) -> list[Node]:
    """The nodes behind the last call, or the last collective that needs no reduction."""
    reductions = [node for node in gm.graph.nodes if is_wait(node) and _may_reduce(node)]
    behind = reach(lambda node: node.users, *reductions).union(_gathers_ahead(gm))
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
    """The number of waits before each node, if each wait comes as late as possible.

    A node comes behind the writes of memory that it reads, and behind the reads and writes of
    memory that it writes. A wait writes the memory of its collective.
    """

    def __init__(self) -> None:
        self._of: dict[Node, int] = {}
        self._waits = self._started = 0
        self._read: defaultdict[object, int] = defaultdict(int)
        self._written: defaultdict[object, int] = defaultdict(int)

    def of(self, operand: Node, written: bool) -> int:
        """The level behind which a node may come that reads, or writes, an operand."""
        memory = memory_of(operand)
        level = max(self._of.get(operand, 0), self._written[memory])
        return max(level, self._read[memory]) if written else level

    def enter(self, node: Node) -> int:
        """Find the level of the next node."""
        if is_wait(node):
            self._waits += 1
        written = _written(node)
        level = max((self.of(each, each in written) for each in node.all_input_nodes), default=0)
        if is_random(node):
            level = self._written["random numbers"] = max(level, self._written["random numbers"])
        if is_collective(node) and brings_parameters(node):
            level = self._started = max(level, self._started)  # collectives keep their order
        elif is_wait(node) or is_collective(node):
            level = self._waits
            self._started = level if is_collective(node) else self._started
        for operand in node.all_input_nodes:
            noted = self._written if operand in written else self._read
            memory = memory_of(operand)
            noted[memory] = max(noted[memory], level)
        self._of[node] = level
        return level


def _divided(node: Node, levels: _Levels) -> Iterator[Node]:
    """A node in parts: one for each level of the tensors in its lists."""
    given = (*node.args, *node.kwargs.values())
    lists = [each for each in given if isinstance(each, list) and each]
    number = len(lists[0]) if lists else 0
    if not _is_over_lists(node) or any(len(each) != number for each in lists):
        yield node
        return
    written = written_by(node)
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place in range(number):
        tensors = [each[place] for each in lists if isinstance(each[place], Node)]
        level = max((levels.of(tensor, tensor in written) for tensor in tensors), default=0)
        places[level].append(place)
    if len(places) <= 1:
        yield node
        return
    for _, own in sorted(places.items()):
        yield _part(node, own)
    node.graph.erase_node(node)


def _is_over_lists(node: Node) -> bool:
    """Whether an op treats the tensors of its lists each by itself."""
    name = getattr(node.target, "_opname", "")
    items = all(user.target is operator.getitem for user in node.users)
    return name.startswith(("_foreach_", "_fused_")) and items


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
