"""Graphs to fold: ops that would share a kernel move between the same two collectives.

    before:  mm0; add; norm; wait1; scale(norm, w1); mm1
    after:   mm0; wait1; add; norm; scale(norm, w1); mm1

Inductor fuses elementwise ops and reductions at any distance, but not across the border of a call,
and calls end at collectives. So such an op moves down to the first reader that it could be fused
with. Ops that read a value in the same size as an earlier op move up to that op. Collectives,
matmuls and other ops that Inductor does not fuse keep their places.

Each run between two collectives makes the constants that it reads. On request, each run also
computes the other values in registers that it reads: otherwise a call would store such a value for
the next call. A checkpoint and a memory budget recompute such values.

An op that moves down keeps its operands live until its new place. An op that moves up is live
earlier. Both would be so without folding. No op moves further than `FURTHEST`.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from shardc.passes.estimate.cost import (
    in_registers,
    is_constant,
    is_fusible,
    is_pointwise,
    tensor_bytes,
)
from shardc.passes.estimate.kernels import keeps_kernels
from shardc.passes.nodes import (
    WRITES,
    is_random,
    is_transfer,
    is_view,
    is_wait,
    moves_state,
    reach,
    readers_of,
    sources_of,
    writes,
)
from shardc.passes.repeat.repeated_stretches import ends_no_stretch
from shardc.passes.schedule.reorder import reorder

FURTHEST = 4
"""The most places that an op may move: past two borders and the run between them."""


def move_near_readers(gm: GraphModule, anew: bool = False, in_order: bool = False) -> None:
    """Reorder `gm`; runs of nodes that end a stretch are the borders of calls.

    Args:
        anew: whether each run computes the values in registers that it reads. Blocks with runs that
            read different values are then no longer equal.
        in_order: whether a kernel on a CPU keeps its place between two matmuls.
    """
    places = Places(gm, in_order)
    places.repeat_constants()
    if anew:
        places.compute_anew()
    places.carry_views()
    reorder(gm, {node: (place,) for node, place in places.of.items()})


class Places:
    """The places of nodes, near their readers: runs of compute have even numbers, borders odd ones.

    Attributes:
        of: the place of every node that calls an op.
        end: the place behind all others, where the output of the graph reads.
    """

    def __init__(self, gm: GraphModule, in_order: bool) -> None:
        self.of: dict[Node, int] = {}
        self._movable: dict[int, list[Node]] = defaultdict(list)
        self._closed: set[int] = set()
        self._hoisted: set[Node] = set()
        self._behind: set[Node] = set()
        self._ahead: set[Node] = set()
        place = 0
        for node in filter(lambda n: n.op == "call_function", gm.graph.nodes):
            foldable = ends_no_stretch(node)
            if is_view(node) and place % 2:  # a view of an earlier value, or of one at the border
                within = any(self.of.get(given) == place for given in node.all_input_nodes)
                self.of[node] = place if within else place - 1
                continue
            place += place % 2 == foldable
            self.of[node] = place
            if foldable and is_fusible(node):
                self._movable[place].append(node)
            elif not foldable and not _writes_to_its_own(node):
                self._closed.add(place)
        self.end = place + 2 - place % 2
        if in_order:
            self._keep_between_calls()
        for place in range(2, self.end, 2):
            self._hoist(place)
        for place in range(0, self.end, 2):
            self._sink(place)

    def _keep_between_calls(self) -> None:
        """Keep each op before or after the matmuls, and similar calls, of its place."""
        for nodes, kept in ((self.of, self._behind), (reversed(self.of), self._ahead)):
            called = set[int]()
            for node in nodes:
                if keeps_kernels(node):
                    called.add(self.of[node])
                elif self.of[node] in called:
                    kept.add(node)

    def _sink(self, place: int) -> None:
        """Move ops from `place` down to their first reader, if Inductor could fuse both."""
        # If a hoisted op sank again, the kernel that it joined would store its operands.
        stay = self._hoisted | self._ahead
        while True:
            down = self._way_down(place, stay)
            # A reduction that leaves its operand behind would read the whole operand once more.
            torn = {
                node
                for node in down
                if torch.Tag.pointwise not in node.target.tags  # type: ignore[union-attr]
                and any(
                    self.of.get(source) == place and is_fusible(source) and source not in down
                    for source in sources_of(node)
                )
            }
            if not torn:
                break
            stay |= torn
        self._move(down)

    def _way_down(self, place: int, stay: set[Node]) -> dict[Node, int]:
        """The new place of each op that moves down from `place`; ops in `stay` do not move."""
        down: dict[Node, int] = {}
        for node in sorted(set(self._movable[place]) - stay, reverse=True):
            readers = {
                user: down.get(user, self.of.get(user, self.end)) for user in readers_of(node)
            }
            first = min(readers.values(), default=place)
            there = {user for user, where in readers.items() if where == first}
            if (
                place < first <= place + FURTHEST
                and self._is_open(place, first)
                and any(map(is_fusible, there - self._behind_unfused(there, first)))
            ):
                down[node] = first
        return down

    def _behind_unfused(self, readers: set[Node], place: int) -> set[Node]:
        """The unfused nodes of `readers`, and the nodes at `place` that depend on them."""
        starts = [reader for reader in readers if not is_fusible(reader)]
        return reach(lambda n: (u for u in readers_of(n) if self.of.get(u) == place), *starts)

    def _hoist(self, place: int) -> None:
        """Move ops up from `place` to ops of the same size that read or make their operands.

        An op crosses two borders only if the move frees a gathered bucket.
        """
        for above in range(place - 2, max(place - FURTHEST, 0) - 1, -2):
            if not self._is_open(above, place):
                break
            self._hoist_to(above, place)

    def _hoist_to(self, to: int, place: int) -> None:
        above = {pair for n in self._movable[to] for pair in _in_size(n, (n, *sources_of(n)))}
        here = frozenset(self._movable[place]) - self._behind
        todo = set(here)
        while todo:
            group = reach(lambda n: here.intersection([*sources_of(n), *readers_of(n)]), todo.pop())
            todo -= group
            read = {source for node in group for source in sources_of(node)} - group
            ready = all(self.of.get(source, -1) <= to for source in read)
            near = to == place - 2 or self._frees_a_bucket(group, to)
            if ready and near and any(above & _in_size(node, sources_of(node)) for node in group):
                self._move(dict.fromkeys(group, to))
                self._hoisted |= group

    def _frees_a_bucket(self, group: set[Node], place: int) -> bool:
        """Whether `group` reads gathered buckets, and is their only reader after `place`.

        The ops at `place` that `group` depends on count as part of it: they could sink to `group`.
        """
        movable = group.union(self._movable[place])
        together = reach(lambda n: movable.intersection(sources_of(n)), *group)
        read = {source for node in together for source in sources_of(node)}
        later = [reader for source in filter(is_wait, read) for reader in readers_of(source)]
        return bool(later) and all(
            self.of.get(reader, self.end) <= place for reader in later if reader not in group
        )

    def repeat_constants(self) -> None:
        """Make a constant in every place that reads it: else a call reads it from memory."""
        for node in [n for n in self.of if is_constant(n)]:
            for place in {self.of.get(user, self.end) for user in readers_of(node)}:
                if place not in (self.of[node], self.end):
                    self._copy(node, place)
            if not node.users:
                self._erase(node)

    def compute_anew(self) -> None:
        """Compute a value in registers in every place that reads it.

        The operands that are held longer must be no larger than the value.
        """
        anew = self._computed_anew()
        for node in sorted(anew, reverse=True):
            own = self.of[node]
            places = {self.of.get(user, self.end) for user in readers_of(node)}
            for place in sorted(p for p in places - {own} if self._is_open(own, p)):
                held = self._held_to_compute(node, place, anew)
                if _nbytes(held) <= _nbytes([node]):
                    self._copy(node, place)
            if all(is_view(user) and not any(readers_of(user)) for user in node.users):
                self._erase(node)

    def smaller_than_held(self) -> list[Node]:
        """The values that `compute_anew` leaves stored: the operands held for them are larger."""
        found = list[Node]()
        anew, later = self._computed_anew(), defaultdict[Node, set[int]](set)
        for node in sorted(anew, reverse=True):
            later[node].update(self.of.get(user, self.end) for user in readers_of(node))
            places = later[node] - {self.of[node]}
            held = {place: _nbytes(self._held_to_compute(node, place, anew)) for place in places}
            if any(nbytes > _nbytes([node]) for nbytes in held.values()):
                found.append(node)
                continue
            for source in sources_of(node):
                later[source] |= places
        return found

    def _computed_anew(self) -> set[Node]:
        """The values that each reading kernel may compute for itself."""
        return {n for n in in_registers(self.of) if is_pointwise(n) and not is_random(n)}

    def _held_to_compute(self, node: Node, place: int, anew: Collection[Node]) -> set[Node]:
        """The nodes held longer if `node` is computed at `place`: operands with no later reader.

        The operands of an operand in `anew` stand in its place, if they are no larger.
        """

        def late(node: Node) -> set[Node]:
            return {source for source in sources_of(node) if self._last_read(source) < place}

        held: dict[Node, set[Node]] = {}
        for each in sorted(reach(lambda n: late(n).intersection(anew), node)):
            ways = ((held.get(source, {source}), {source}) for source in late(each))
            held[each] = set[Node]().union(*(min(way, key=_nbytes) for way in ways))
        return held[node]

    def _last_read(self, node: Node) -> int:
        return max((self.of.get(user, self.end) for user in readers_of(node)), default=0)

    def _erase(self, node: Node) -> None:
        """Remove a value that nothing reads, and its views."""
        for view in list(node.users):
            self._erase(view)
        node.graph.erase_node(node)
        del self.of[node]

    def _copy(self, node: Node, place: int) -> None:
        """Copy `node` to `place`, for its readers there."""
        readers = {user for user in readers_of(node) if self.of.get(user) == place}
        with node.graph.inserting_before(min(readers)):
            copied = node.graph.node_copy(node)
        self.of[copied] = place
        self._read_instead(node, copied, readers)

    def _read_instead(self, node: Node, other: Node, readers: set[Node]) -> None:
        """Let `readers` read `other` and its views in the place of `node` and its views."""
        for user in list(node.users):
            if user in readers:
                user.replace_input_with(node, other)
            elif is_view(user) and not readers.isdisjoint(readers_of(user)):
                with node.graph.inserting_after(other):
                    view = node.graph.node_copy(user, lambda n: other if n is node else n)
                self.of[view] = self.of[other]
                self._read_instead(user, view, readers)

    def carry_views(self) -> None:
        """Move views behind their bases and before their readers."""
        views = [node for node, place in self.of.items() if is_view(node) and place % 2 == 0]
        for node in reversed(views):
            last = min((self.of.get(user, self.end) for user in node.users), default=self.end)
            self.of[node] = min(self.of[node], last - last % 2)
        for node in views:
            first = max((self.of.get(i, 0) for i in node.all_input_nodes), default=0)
            self.of[node] = max(self.of[node], first + first % 2)

    def _is_open(self, first: int, last: int) -> bool:
        return self._closed.isdisjoint(range(first, last))

    def _move(self, to: dict[Node, int]) -> None:
        for node, place in to.items():
            self._movable[self.of[node]].remove(node)
            self._movable[place].append(node)
            self.of[node] = place


def _writes_to_its_own(node: Node) -> bool:
    """Whether a node at a border writes to nothing that ops read, so that ops may cross it."""
    if moves_state(node):  # `sent`: the schema has this write against dead-code removal
        return True
    if is_transfer(node) or is_wait(node) or is_view(node):
        return not writes(node)
    return WRITES in node.meta  # the input of a reduction


def _nbytes(nodes: Iterable[Node]) -> float:
    """Bytes of the nodes' results; infinite if a size is symbolic: such a place is not folded."""
    sizes = [tensor_bytes(node.meta.get("val")) for node in nodes]
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else math.inf


def _in_size(node: Node, values: Iterable[Node]) -> set[tuple[Node, int]]:
    """Pair `values` with the element count of the largest tensor that `node` reads or makes."""
    met = [given.meta.get("val") for given in (node, *node.all_input_nodes)]
    sizes = [leaf.numel() for leaf in tree_leaves(met) if isinstance(leaf, Tensor)]
    known = [size for size in sizes if isinstance(size, int)]
    return {(value, max(known)) for value in values} if known else set()
