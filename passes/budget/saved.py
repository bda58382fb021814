"""A trial: the values that the forward saves for its backward, and when nothing reads them.

Values of one kind are those at the same place of equal units ("mlp.up_proj: matmul" of every
block). Left out are gathered buckets and values made of them alone, and values inside of a
checkpoint of the user.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from shardc.passes.budget.trial import Phase, Trial
from shardc.passes.estimate.cost import evaluate, symbol_hints, tensor_bytes
from shardc.passes.estimate.memory import storage_roots
from shardc.passes.nodes import labels_of, module_of, our_collectives, returned_and_saved
from shardc.passes.rewrite.recompute import is_tagged


@dataclass(frozen=True)
class Saved:
    """A value that the forward saves.

    Attributes:
        kind: the place in a unit at which it is made, in words; equal for equal units.
        unit: the name of its unit.
        nodes: of the forward graph, which are saved; they share memory.
        nbytes: held less while it is not saved.
        first, end: the interval of places in which nothing reads it (`Item`).
        is_inside: whether all its readers in the forward belong to its unit.
    """

    kind: str
    unit: str
    nodes: tuple[Node, ...]
    nbytes: int
    first: int
    end: int
    is_inside: bool


class SavedValues:
    """The values that the forward of a trial saves, in the order in which it makes them."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._units = sorted(_unit_names(trial.forward.gm))
        self._unit_by_path: dict[str, str | None] = {}

    def __iter__(self) -> Iterator[Saved]:
        return iter(self._values)

    @cached_property
    def _values(self) -> list[Saved]:
        forward, backward = self._trial.forward, self._trial.backward
        hints, counts, found = symbol_hints(forward.gm), defaultdict[str, int](int), list[Saved]()
        roots, aliases = storage_roots(forward.gm), defaultdict[Node, list[Node]](list)
        for node, root in roots.items():
            aliases[root].append(node)
        given = {node.name: node for node in backward.gm.graph.find_nodes(op="placeholder")}
        for root, nodes in _saved_by_root(forward, roots).items():
            unit = self.unit_of(root)
            if unit is None or not is_value(root) or is_tagged(root):
                continue
            users = {user for node in aliases[root] for user in node.users}
            places = [forward.places[user] for user in users if user in forward.places]
            is_inside = all(self.unit_of(user) == unit for user in users if user.op != "output")
            kind = _kind(root, unit)
            counts[f"{unit} {kind}"] += 1
            if (number := counts[f"{unit} {kind}"]) > 1:
                kind = f"{kind} {number}"
            nbytes = int(evaluate(tensor_bytes(root.meta["val"]), hints))
            if nbytes:
                first = max(places, default=forward.places[root]) + 1
                readers = [u for n in nodes if n.name in given for u in given[n.name].users]
                read = min((backward.places[u] for u in readers if u in backward.places), default=0)
                end = self._trial.border + read
                found.append(Saved(kind, unit, tuple(nodes), nbytes, first, end, is_inside))
        return found

    def unit_of(self, node: Node) -> str | None:
        """The name of the unit that a node belongs to; None if it is outside of all."""
        path = module_of(node)
        if path not in self._unit_by_path:
            self._unit_by_path[path] = _unit_at(path, self._units)
        return self._unit_by_path[path]


def _saved_by_root(forward: Phase, roots: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """The nodes that are saved and not returned to the caller, by the node that made their
    memory."""
    results, saved = returned_and_saved(forward.gm, forward.ctx.results)
    returned = {roots[node] for node in results if node in roots}
    found: dict[Node, list[Node]] = defaultdict(list)
    for node in saved:
        if node in roots and roots[node] not in returned:
            found[roots[node]].append(node)
    return found


def _unit_at(path: str, units: Sequence[str]) -> str | None:
    """The unit, of all `units`, that the module at `path` belongs to."""
    if len(units) == 1:
        return units[0]
    # A unit's name may be part of the path: the compiled module may hold the sharded model. Of
    # "1.0", unit "1" has the node, not unit "0"; of "1.attention", the inner one of the two.
    around = [unit for unit in units if f".{unit}." in f".{path}."]
    return min(around, key=lambda u: (f".{path}.".index(f".{u}."), -len(u)), default=None)


def is_value(node: Node) -> bool:
    """Whether a node makes tensors. (Sizes are saved anyway.)"""
    tensors = (isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("val")))
    return node.op == "call_function" and any(tensors)


def _kind(node: Node, unit: str) -> str:
    module = module_of(node)
    where = module.rpartition(unit)[2].strip(".") if unit else module
    starred = re.sub(r"\d+", "*", unit)
    return f"{starred} {where}: {_in_words(node)}".replace(" :", "")


def _in_words(node: Node) -> str:
    op = str(getattr(node.target, "_opname", node.name))
    if "attention" in op:
        return "attention"
    return "matmul" if op in ("mm", "addmm", "bmm", "baddbmm") else op


def _unit_names(gm: GraphModule) -> set[str]:
    labels = {label for node in our_collectives(gm) for label in labels_of(node)}
    return {re.sub(r"\[\d+\]$", "", label) for label in labels}
