"""The finder of repeated stretches in a scheduled graph: the decision of `fold_repeats`, read only.

A stretch is a run of compute between two collectives. It is known by its text: its ops, their
constants, how they feed each other, what values they are given, which of them are read later, and
which are stored at once. Two stretches with equal text are the same function of their operands.

What a call cannot express ends a stretch: collectives and waits, higher-order ops, ops that write
to what they are given. Matmuls that write a gradient do not end a stretch, although they mutate:
there are many of them, and Inductor is told to keep calls and collectives in order. A stretch is
not replaced by a call if it takes or gives values whose size is symbolic, that lie on several
devices, or that are less aligned than an allocation is.
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
"""A stretch that is there twice costs as much to fold as it saves."""
SMALLEST = 2
"""Ops, views left out, that a stretch must have: one op is cheaper where it is."""
_ALIGNMENT = 16
"""Bytes: what a kernel that was compiled for one operand expects of all (Triton, vector loads)."""

_WRITE = torch.ops.shardc.write_matmul.default


@dataclass(frozen=True)
class Stretch:
    """A run of compute.

    Attributes:
        nodes: its nodes, in order.
        body: those of them that lead to a result; the others are views that are read later.
        operands: what the body reads of other nodes, in the order in which it does.
        results: those of its nodes whose values are read later, views of them too.
        views: views in it that are read later, each as the chain of views that leads to it from a
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
    """Stretches of equal text, each list one text, in graph order."""
    groups: dict[str, list[Stretch]] = {}
    for nodes in _runs(gm):
        stretch = _read(nodes)
        if stretch is not None:
            groups.setdefault(stretch.text, []).append(stretch)
    return [group for group in groups.values() if len(group) >= FEWEST_REPEATS]


def _runs(gm: GraphModule) -> Iterator[list[Node]]:
    """Maximal runs of nodes that a call can express, large enough to be worth one."""
    run: list[Node] = []
    for node in gm.graph.nodes:
        if _is_foldable(node):
            run.append(node)
        elif not compat.is_random_seed(node):
            yield from _worth_folding(run)
            run = []
    yield from _worth_folding(run)


def ends_no_stretch(node: Node) -> bool:
    """Whether stretches may go on around a node."""
    # What picks a seed reads an input only: it may as well come earlier.
    return _is_foldable(node) or compat.is_random_seed(node)


def _worth_folding(run: list[Node]) -> Iterator[list[Node]]:
    if sum(not is_view(node) for node in run) >= SMALLEST:
        yield run


def _is_foldable(node: Node) -> bool:
    if node.target is operator.getitem:
        return all(_is_foldable(source) for source in node.all_input_nodes)
    if is_transfer(node) or is_wait(node) or compat.is_random_seed(node):
        return False
    return writes(node) is False or node.target is _WRITE


def _read(nodes: Sequence[Node]) -> Stretch | None:
    """A run as a stretch; None if it cannot be a call."""
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
    """The views in `inside` that lead to `node`, if it is one, from what holds its memory."""
    chain: list[Node] = []
    while node in inside and _aliases(node):
        source = node.args[0]
        assert isinstance(source, Node)
        if not isinstance(source.meta.get("val"), Tensor) and not _aliases(source):
            break  # an item of what an op gives is no view
        chain.insert(0, node)
        node = source
    return tuple(chain)


def _aliases(node: Node) -> bool:
    """Whether a node may give its input's memory."""
    return is_view(node) or node.target is torch.ops.aten.reshape.default


def _is_plain(node: Node) -> bool:
    """Whether a value may go in or out of a call: a tensor of known size, aligned."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not _is_fixed(node):
        return False
    offset = value.storage_offset()
    return isinstance(offset, int) and offset * value.element_size() % _ALIGNMENT == 0


def _is_fixed(node: Node) -> bool:
    """Whether all sizes are numbers."""
    return all(
        all(isinstance(size, int) for size in (*leaf.shape, *leaf.stride()))
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, Tensor)
    ) and not any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves(node.meta.get("val")))


def _writes_to_shared(nodes: Sequence[Node], operands: Sequence[Node]) -> bool:
    """Whether the buffer of a gradient that comes in is seen through another operand, too."""
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
