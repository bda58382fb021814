"""The finder of repeated stretches in a scheduled graph, for `fold_repeats`; it edits nothing.

A stretch is a run of compute between two collectives. A text identifies a stretch: its ops, their
constants, the edges between them, the metadata of their values, the results with later readers, and
the values stored at once. Two stretches of equal text are the same function of their operands.

A stretch ends at an op that a call cannot express: a collective, a wait, a higher-order op, or an
op that writes to its operands. A matmul that writes a gradient does not end a stretch, although it
mutates: such matmuls are many, and shardc tells Inductor to keep calls and collectives in order.
A stretch does not become a call if its operands and results have symbolic sizes, lie on several
devices, or are less aligned than an allocation.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from shardc.passes.nodes import is_transfer, is_view, is_wait, writes
from shardc.passes.repeat.repeated_calls import Name
from shardc.runtime import compat

FEWEST_REPEATS = 3
"""The fewest stretches of one text: two cost as much to fold as they save."""
SMALLEST = 2
"""The fewest ops of a stretch, views left out: a single op is cheaper without a call."""
_ALIGNMENT = 16
"""Alignment in bytes: a kernel compiled for one operand expects it of all (Triton, vectors)."""

_WRITE = torch.ops.shardc.write_matmul.default


@dataclass(frozen=True)
class Stretch:
    """A run of compute.

    Attributes:
        nodes: its nodes, in order.
        body: its nodes that write or that a result needs; the others are views that are read later.
        operands: the nodes outside of the stretch that the body reads, in the order of the reads.
        results: its nodes that are read later, themselves or through views.
        views: its views that are read later, each as the chain of views that leads to it from a
            result or an operand.
        text: equal for stretches that are the same function of their operands.
    """

    nodes: tuple[Node, ...]
    body: tuple[Node, ...]
    operands: tuple[Node, ...]
    results: tuple[Node, ...]
    views: tuple[tuple[Node, ...], ...]
    text: str


def find_repeats(gm: GraphModule) -> list[list[Stretch]]:
    """Repeated stretches, in graph order: one list for each text."""
    groups: dict[str, list[Stretch]] = {}
    for nodes in _runs(gm):
        is_large = sum(not is_view(node) for node in nodes) >= SMALLEST
        if is_large and (stretch := _read(nodes)) is not None:
            groups.setdefault(stretch.text, []).append(stretch)
    return [group for group in groups.values() if len(group) >= FEWEST_REPEATS]


def _runs(gm: GraphModule) -> Iterator[list[Node]]:
    """The maximal runs of nodes that a call can express."""
    run: list[Node] = []
    for node in gm.graph.nodes:
        if _is_foldable(node):
            run.append(node)
        elif not compat.is_random_seed(node):
            yield run
            run = []
    yield run


def ends_no_stretch(node: Node) -> bool:
    """Whether a stretch may go on after a node."""
    # A node that picks a seed reads an input only: it may as well come earlier.
    return _is_foldable(node) or compat.is_random_seed(node)


def _is_foldable(node: Node) -> bool:
    if node.target is operator.getitem:
        return all(_is_foldable(source) for source in node.all_input_nodes)
    if is_transfer(node) or is_wait(node) or compat.is_random_seed(node):
        return False
    return writes(node) is False or node.target is _WRITE


def _read(nodes: Sequence[Node]) -> Stretch | None:
    """Read a run of nodes as a stretch; None if the run cannot be a call."""
    inside = set(nodes)
    found: set[Node] = set()
    views = []
    for node in nodes:
        if any(user not in inside for user in node.users):
            chain = _view_chain(node, inside)
            source = chain[0].args[0] if chain else node
            assert isinstance(source, Node)
            found |= {source} & inside
            if chain:
                views.append(chain)
    results = tuple(node for node in nodes if node in found)
    body = _leading_to(results, nodes)
    operands = tuple(
        dict.fromkeys(i for node in body for i in node.all_input_nodes if i not in inside)
    )
    border = [*operands, *results]
    if not results or not all(_is_plain(node) for node in border):
        return None
    if len({node.meta["val"].device for node in border}) > 1:
        return None
    if not all(_is_fixed(node) for node in nodes) or _writes_to_shared(body, operands):
        return None
    text = _text(body, operands, results)
    return Stretch(tuple(nodes), body, operands, results, tuple(views), text)


def _leading_to(results: Sequence[Node], nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes that `results` need, and nodes that write."""
    needed = {*results, *(node for node in nodes if node.target is _WRITE)}
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return tuple(node for node in nodes if node in needed)


def _view_chain(node: Node, inside: set[Node]) -> tuple[Node, ...]:
    """The chain of views in `inside` from the owner of a storage to `node`; empty if no view."""
    chain: list[Node] = []
    while node in inside and _aliases(node):
        source = node.args[0]
        assert isinstance(source, Node)
        if not isinstance(source.meta.get("val"), Tensor) and not _aliases(source):
            break  # an item of an op's results is no view
        chain.insert(0, node)
        node = source
    return tuple(chain)


def _aliases(node: Node) -> bool:
    """Whether the result of a node may alias its input."""
    return is_view(node) or node.target is torch.ops.aten.reshape.default


def _is_plain(node: Node) -> bool:
    """Whether a value may be an operand or result of a call: an aligned tensor of known size."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _is_fixed(node):
        return False
    offset = value.storage_offset()
    return isinstance(offset, int) and offset * value.element_size() % _ALIGNMENT == 0


def _is_fixed(node: Node) -> bool:
    """Whether all sizes of a node's results are numbers."""
    return all(
        all(isinstance(size, int) for size in (*leaf.shape, *leaf.stride()))
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, Tensor)
    ) and not any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(node.meta.get("val")))


def _writes_to_shared(nodes: Sequence[Node], operands: Sequence[Node]) -> bool:
    """Whether another operand aliases an operand that a gradient is written to."""
    written = {node.args[0] for node in nodes if node.target is _WRITE} & set(operands)
    return any(_aliases(operand) and set(operand.all_input_nodes) & written for operand in operands)


# -- the text ------------------------------------------------------------------------------------


def _text(body: Sequence[Node], operands: Sequence[Node], results: Sequence[Node]) -> str:
    names = {node: f"%{index}" for index, node in enumerate((*operands, *body))}
    lines = [f"{names[operand]} = {_value(operand)}" for operand in operands]
    for node in body:
        arguments = map_arg((node.args, node.kwargs), lambda n: Name(names[n]))
        made = f"{_value(node)}{' at once' if compat.is_stored_at_once(node) else ''}"
        lines.append(f"{names[node]} = {node.target}{arguments!r} -> {made}")
    lines.append(f"return {[names[result] for result in results]}")
    return "\n".join(lines)


def _value(node: Node) -> str:
    leaves: list[Any] = tree_leaves(node.meta.get("val"))
    return str(
        [
            (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
    )
