"""The finder of repeated module calls in a Dynamo graph, for `trace_once`; it edits nothing.

A call is the run of nodes that one call of a module left. A text identifies a call: its ops, their
constants, the edges between them, the metadata of their values, and the results with later readers.
Two calls of equal text are the same function of their operands. Parameters are among the operands:
the text has the signature of each bucket, which equal units share.

The finder leaves out a call with an op that acts on more than its results: on gradient mode, on
autocast, or on a body of its own (activation checkpointing). It also leaves out a call with an
operand or result of symbolic size. A write to an operand shows when the body is traced.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from shardc.runtime import compat
from shardc.runtime.layout.spec import Moved

FEWEST_CALLS = 3
"""The fewest calls of one text: with fewer, a body costs as much as it saves."""
SMALLEST = 6
"""The fewest nodes of a call: a few ops are cheaper to trace than a call of a body."""

_PLAIN = (
    int, float, complex, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

_KNOWN = ("torch", "_operator", "math", "builtins", "shardc")
"""Packages in which a name identifies a function."""


@dataclass(frozen=True)
class Call:
    """The nodes that one call of a module left in a Dynamo graph.

    Attributes:
        nodes: its nodes, in order.
        operands: the nodes outside of the call that it reads, in the order of the reads.
        results: its nodes with readers outside of the call.
        buckets: the buckets that it reads, in order.
        text: equal for calls that are the same function of their operands.
    """

    nodes: tuple[Node, ...]
    operands: tuple[Node, ...]
    results: tuple[Node, ...]
    buckets: tuple[Moved, ...]
    text: str


def find_calls(gm: GraphModule) -> list[list[Call]]:
    """Repeated calls of the outermost modules, in graph order: one list for each text.

    No call lies inside a call of another list.
    """
    nodes = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    return list(_within(nodes, _stacks(nodes), 0))


def _within(
    nodes: Iterable[Node], stacks: Mapping[Node, list[str]], depth: int
) -> Iterator[list[Call]]:
    """Repeated calls at a depth of modules, and inside the calls that do not repeat there."""
    groups: dict[str, list[Call]] = {}
    inside: list[Node] = []
    for path, run in itertools.groupby(nodes, lambda node: stacks[node][: depth + 1]):
        if len(path) > depth:
            within = list(run)
            inside += within
            if call := read_call(within):
                groups.setdefault(call.text, []).append(call)
    repeated = [group for group in groups.values() if len(group) >= FEWEST_CALLS]
    yield from repeated
    taken = {node for group in repeated for call in group for node in call.nodes}
    left = [node for node in inside if node not in taken]
    if left:
        yield from _within(left, stacks, depth + 1)


def _stacks(nodes: list[Node]) -> dict[Node, list[str]]:
    """The modules that each node lies in, outermost first.

    A node that a pass added has no modules, and gets the modules of the next node.
    """
    stacks: dict[Node, list[str]] = {}
    following: list[str] = []
    for node in reversed(nodes):
        known = node.meta.get("nn_module_stack")
        if known:
            following = [str(path) for path, _ in known.values()]
        stacks[node] = following
    return stacks


def read_call(nodes: Sequence[Node]) -> Call | None:
    """Read a run of nodes as a call; None if the run cannot be a call of a body."""
    inside = set(nodes)
    if len(nodes) < SMALLEST or not all(_is_plain(node) for node in nodes):
        return None
    results = tuple(node for node in nodes if any(user not in inside for user in node.users))
    operands = tuple(
        dict.fromkeys(i for node in nodes for i in node.all_input_nodes if i not in inside)
    )
    values = [node.meta.get("example_value") for node in (*operands, *results)]
    if not results or not all(compat.is_plain_fake(value) for value in values):
        return None
    buckets: list[Moved] = []
    text = _text(nodes, operands, results, buckets)
    if text is None:
        return None
    return Call(tuple(nodes), operands, results, tuple(buckets), text)


def _is_plain(node: Node) -> bool:
    """Whether a node only computes its results."""
    if node.op not in ("call_function", "call_method"):
        return False
    if compat.is_higher_order(node.target):
        return False
    if not _is_named(node.target):
        return False
    opens, closes = compat.region_nodes()
    switches = {compat.SET_GRAD_ENABLED, *opens, *closes, *compat.AUTOCAST}
    value = node.meta.get("example_value")
    numbers = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return node.target not in switches and not numbers


def _is_named(target: object) -> bool:
    """Whether a name identifies the target of a node; it does not identify a closure.

    The Dynamo of torch 2.11 makes closures over the mesh and the placements of a DTensor.
    """
    if isinstance(target, str) or compat.is_op(target):
        return True
    name = getattr(target, "__qualname__", "")
    return bool(name) and "<locals>" not in name and _module(target).split(".")[0] in _KNOWN


class _Unknown(Exception):
    """An argument that no text identifies."""


def _text(
    nodes: Sequence[Node],
    operands: Sequence[Node],
    results: Sequence[Node],
    buckets: list[Moved],
) -> str | None:
    """The text of a call; None if an argument has no text. The call's buckets go to `buckets`."""
    names = {node: Name(f"%{index}") for index, node in enumerate((*operands, *nodes))}

    def say(argument: Any) -> Any:
        if isinstance(argument, Node):
            return names[argument]
        if isinstance(argument, Moved):
            buckets.append(argument)
            return Name(f"bucket {argument.signature}")
        if isinstance(argument, slice):
            return slice(*map(say, (argument.start, argument.stop, argument.step)))
        if argument is None or argument is Ellipsis or isinstance(argument, _PLAIN):
            return argument
        raise _Unknown

    lines = [f"{names[operand]} = {_value(operand)}" for operand in operands]
    try:
        for node in nodes:
            arguments = tree_map(
                say, (node.args, node.kwargs), is_leaf=lambda a: isinstance(a, Moved)
            )
            lines.append(f"{names[node]} = {_target(node)}{arguments!r} -> {_value(node)}")
    except _Unknown:
        return None
    return "\n".join([*lines, f"return {[names[result] for result in results]}"])


class Name(str):
    """The name of a node among the arguments of another node; its `repr` has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def _target(node: Node) -> str:
    if isinstance(node.target, str) or compat.is_op(node.target):
        return f"{node.op} {node.target}"
    return f"{node.op} {_module(node.target)}.{cast(Any, node.target).__qualname__}"


def _module(target: object) -> str:
    """The module that defines a function; "torch" for a built-in of torch, which names none."""
    return getattr(target, "__module__", None) or "torch"


def _value(node: Node) -> str:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor):
        return type(value).__name__
    facts = (value.dtype, tuple(value.shape), value.stride(), value.device, value.requires_grad)
    return str(facts)
