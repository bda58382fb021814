"""What passes share: the context they are given and the predicates they ask of nodes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from shardc.runtime.unshard import UnshardSpec, spec_of

c10d = torch.ops._c10d_functional

GATHERS = {
    c10d.all_gather_into_tensor.default,
    c10d.all_gather_into_tensor_out.default,
    c10d.all_gather_into_tensor_coalesced.default,
}
REDUCES = {
    c10d.reduce_scatter_tensor.default,
    c10d.reduce_scatter_tensor_coalesced.default,
    c10d.all_reduce.default,
}


@dataclass
class PassContext:
    """What a pass may know beside the graph.

    Attributes:
        phase: "dynamo", "joint", "forward" or "backward".
        used: per placeholder name of a segment, the slots its graph reads (`insert_unshard`).
        differentiated: per input of a joint graph, the slots that get a gradient
            (`find_used_slots`).
    """

    phase: str
    used: dict[str, frozenset[int]] = field(default_factory=dict)
    differentiated: list[frozenset[int]] = field(default_factory=list)


def signature_of(node: Node) -> str | None:
    """The signature that `unshard` left on a node it traced, if it did."""
    custom: dict[str, Any] = node.meta.get("custom") or {}
    return custom.get("shardc")


def spec_of_node(node: Node) -> UnshardSpec | None:
    """The spec of the bucket that this node gathers or reduces, if it is one of ours."""
    signature = signature_of(node)
    return spec_of(signature) if signature is not None else None


def is_all_gather(node: Node) -> bool:
    """Whether the node starts an all-gather."""
    return node.op == "call_function" and node.target in GATHERS


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    return node.op == "call_function" and (
        getattr(node.target, "namespace", None) == "_c10d_functional" and not is_wait(node)
    )


def is_wait(node: Node) -> bool:
    """Whether the node waits for a collective."""
    return node.op == "call_function" and node.target is c10d.wait_tensor.default


def graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """`gm` and the bodies of its higher-order ops (activation checkpointing), outermost first."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))


def body_operands(call: Node, body: Graph) -> Iterator[tuple[Node, Node]]:
    """Pairs (placeholder of the body, operand of the call); operands come last in the call."""
    operands = [leaf for leaf in tree_leaves(call.args) if isinstance(leaf, Node)]
    placeholders = [node for node in body.nodes if node.op == "placeholder"]
    return zip(reversed(placeholders), reversed(operands), strict=False)
