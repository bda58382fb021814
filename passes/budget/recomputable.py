"""A trial: the saved values that the backward may compute again, and the seconds that this takes.

Only values that are made and read within one unit may. The results of units stay saved, so the
backward of a unit computes values of this unit again and no others.

Values inside of a checkpoint of the user stay as they are. Random numbers are not drawn again, so
they are the same ones. Collectives of the model and ops that write run once.
"""

import operator
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from shardc.passes.budget.saved import Saved, SavedValues, is_value
from shardc.passes.budget.trial import Item, Trial
from shardc.passes.estimate.cost import evaluate, node_flops, node_seconds, symbol_hints
from shardc.passes.nodes import is_collective, is_random, is_view, is_wait, writes
from shardc.passes.rewrite.recompute import is_tagged
from shardc.runtime import compat


@dataclass(frozen=True)
class Recompute(Item):
    """A saved value that may be computed again instead, after those before it in a list.

    Its seconds are those of the nodes that are not computed again for an earlier one.

    Attributes:
        saved: the value.
        names: of the nodes that are computed again for it.
        is_heavy: whether there is a matmul or an attention among those that its seconds count.
    """

    saved: Saved
    names: frozenset[str]
    is_heavy: bool


def recomputable(trial: Trial, values: SavedValues) -> list[Recompute]:
    """The values that the backward may compute again, cheapest kind per byte first.

    Of a kind, the first units come first. Their values are held for longest: they are there when
    the later units compute theirs again.
    """
    graph = _Forward(trial, values)
    kinds: dict[str, list[Saved]] = defaultdict(list)
    for saved in values:
        if saved.is_inside:
            kinds[saved.kind].append(saved)
    chosen: list[Recompute] = []
    dropped, again = set[Node](), set[Node]()
    while kinds:
        best: tuple[float, str, list[Recompute]] | None = None
        for kind, members in kinds.items():
            tried = graph.recompute(members, dropped, again)
            if tried:
                price = sum(r.seconds for r in tried) / sum(r.nbytes for r in tried)
                best = min(best or (price, kind, tried), (price, kind, tried), key=lambda b: b[:2])
        if best is None:
            break
        _, kind, taken = best
        del kinds[kind]
        chosen += taken
        dropped |= {node for each in taken for node in each.saved.nodes}
        names = {name for each in taken for name in each.names}
        again |= {node for node in trial.forward.places if node.name in names}
    return chosen


class _Forward:
    """The forward graph of a trial, and the names that its backward has of it."""

    def __init__(self, trial: Trial, values: SavedValues) -> None:
        self._trial = trial
        self._values = values
        self._options = trial.forward.ctx.planned
        self._hints = symbol_hints(trial.forward.gm)
        self._in_backward = {node.name for node in trial.backward.places}
        self._seconds: dict[Node, float] = {}

    def recompute(
        self, members: Sequence[Saved], dropped: set[Node], again: set[Node]
    ) -> list[Recompute]:
        """The items of the values of a kind that can be computed again.

        The saved values `dropped` are not there: the nodes `again` compute them again.
        """
        without = dropped | {node for saved in members for node in saved.nodes}
        done, found = set(again), []
        for saved in members:
            needed = self._needed(saved, without)
            if needed is not None:
                new = needed - done
                seconds = sum(map(self._seconds_of, new))
                is_heavy = any(node_flops(node) != 0 for node in new)
                names = frozenset(node.name for node in needed)
                held = (saved.nbytes, saved.first, saved.end)
                found.append(Recompute(*held, seconds, saved, names, is_heavy))
                done |= needed
        return found

    def _needed(self, saved: Saved, without: Collection[Node]) -> set[Node] | None:
        """The nodes that make a value from those that the backward has; None if it may not be made.

        The backward has no more the saved values `without`.
        """
        found, todo = set[Node](), list(saved.nodes)
        while todo:
            node = todo.pop()
            there = node.name in self._in_backward and node not in without
            if node in found or there or is_tagged(node) or not is_value(node):
                continue
            if self._values.unit_of(node) != saved.unit or not _may_run_again(node):
                return None
            found.add(node)
            todo += node.all_input_nodes
        return found

    def _seconds_of(self, node: Node) -> float:
        if node not in self._seconds:
            seconds = node_seconds(node, self._options.profile, self._options.fused)
            self._seconds[node] = evaluate(seconds, self._hints)
        return self._seconds[node]


_WITHOUT_SCHEMA = (operator.getitem, torch.ops.higher_order.flex_attention)


def _may_run_again(node: Node) -> bool:
    if "recompute" in node.meta:  # told to be saved (a value that is overwritten), or by the user
        return False
    if node.target in _WITHOUT_SCHEMA:
        return True
    if is_collective(node) or is_wait(node) or writes(node) is not False:
        return False
    if compat.drops_nothing(node):
        return True
    return not is_random(node) and not _decides(node)


def _decides(node: Node) -> bool:
    """Whether rounding may change a node's result by a leap: a choice of experts, a sort, a size.

    A kernel that computes a value again may round at other places than the one whose value was
    saved.
    """
    tags = getattr(node.target, "tags", ())
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return True
    if torch.Tag.pointwise in tags or is_view(node) or not node.all_input_nodes:
        return False
    leaves = tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, Tensor) and not leaf.is_floating_point() for leaf in leaves)
