"""The cost model: seconds, FLOPs and bytes of every node, from shapes and a hardware profile.

Compute is a roofline: a node takes as long as its FLOPs or its bytes need, whichever is longer.
A collective is a ring: a fixed part, a latency for every step, and the bytes each rank receives
over the bandwidth of the slowest link. Figures are plain numbers where shapes are, and sympy
expressions where a size is symbolic, so one formula serves a hint and a table.

Left out: what the compiler fuses. Elementwise ops count what they write, not what they read,
because a fused chain keeps its intermediate values in registers.
"""

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from shardc.passes.context import c10d, is_view
from shardc.passes.profiles import Profile
from shardc.runtime import compat

Expr = Any
"""A number, or a sympy expression over the symbols of the graph and `WORLD`."""

WORLD = sympy.Symbol("W", integer=True, positive=True)
"""The world size, in tables over several."""

_FLOPS = compat.flop_formulas()

_ROUNDS: dict[Any, int] = {
    c10d.all_gather_into_tensor.default: 1,
    c10d.all_gather_into_tensor_out.default: 1,
    c10d.all_gather_into_tensor_coalesced.default: 1,
    c10d.reduce_scatter_tensor.default: 1,
    c10d.reduce_scatter_tensor_coalesced.default: 1,
    c10d.all_reduce.default: 2,
}
"""How often a collective moves its whole around the ring."""


def collective_seconds(nbytes: Expr, world: Expr, profile: Profile, rounds: int = 1) -> Expr:
    """Seconds that a ring needs to bring `nbytes` (the gathered or unreduced whole) around once.

    Args:
        nbytes: bytes of the whole, over all ranks.
        world: ranks; may be `WORLD`.
        profile: the links.
        rounds: 1 for all-gather and reduce-scatter, 2 for all-reduce.
    """
    inside, across, size = profile.inside, profile.across, profile.node_size
    moved = nbytes * (world - 1) / world
    within = (world - 1) * inside.latency + moved / inside.bandwidth
    nodes = world / size
    between = (
        (world - nodes) * inside.latency
        + nodes * across.latency
        + moved / min(across.bandwidth, inside.bandwidth)
    )
    if isinstance(world, sympy.Expr):
        ring = sympy.Piecewise((0, world <= 1), (within, world <= size), (between, True))
        return rounds * ring + profile.message
    ring = 0.0 if world <= 1 else within if world <= size else between
    return rounds * ring + profile.message


MESSAGES_PER_BUCKET = 2
"""A bucket is worth a message of its own where it takes this many times the fixed cost to send."""


def bucket_grain(world: int, profile: Profile) -> int:
    """Bytes of the smallest bucket that a unit is split into.

    Smaller buckets let the first matmul start sooner and the last reduction end sooner; each costs
    a message.
    """
    fixed = collective_seconds(0, world, profile)
    slope = collective_seconds(2**30, world, profile) - fixed
    return int(MESSAGES_PER_BUCKET * fixed / slope * 2**30) if world > 1 else 0


def tensor_bytes(value: Any) -> Expr:
    """Bytes of the tensors in `value`, dense."""
    total: Expr = 0
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            size: Expr = leaf.element_size()
            for dim in leaf.shape:
                size = size * compat.size_expr(dim)
            total = total + size
    return total


def node_flops(node: Node) -> Expr:
    """FLOPs of a matmul, convolution or attention; 0 for everything else."""
    formula = _FLOPS.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return compat.size_expr(formula(*args, **kwargs, out_val=node.meta.get("val")))


def node_bytes(node: Node) -> Expr:
    """Bytes of memory traffic: what it writes, and for all but elementwise ops what it reads."""
    written = tensor_bytes(node.meta.get("val"))
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return written
    return written + sum(tensor_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)


def node_seconds(node: Node, profile: Profile) -> Expr:
    """Seconds that a compute node takes; views and what is no op take none."""
    if node.op != "call_function" or is_view(node):
        return 0
    value = next((v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)), None)
    if value is None:
        return 0
    traffic = node_bytes(node) / (profile.memory_bandwidth * profile.memory_efficiency)
    flops = node_flops(node)
    longest = traffic if flops == 0 else _longer(flops / profile.peak(value.dtype), traffic)
    return longest + profile.overhead


def transfer_seconds(node: Node, world: Expr, profile: Profile) -> Expr:
    """Seconds that a collective occupies the wire."""
    gathered = tensor_bytes(node.meta.get("val"))
    given = sum(tensor_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)
    whole = _longer(gathered, given)
    return collective_seconds(whole, world, profile, _ROUNDS.get(node.target, 1))


UNKNOWN = 1
"""What a size counts as that depends on data: no trace shows a value for it."""


def symbol_hints(gm: GraphModule) -> dict[Any, int]:
    """The value that every symbol had when `gm` was traced."""
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else (value,):
            hints = compat.symbol_values(size)
            if hints:
                return hints
    return {}


def evaluate(expr: Expr, values: Mapping[Any, float]) -> float:
    """A figure as a number, its symbols replaced by `values`."""
    if not isinstance(expr, sympy.Expr):
        return float(expr)
    return float(expr.subs({symbol: values.get(symbol, UNKNOWN) for symbol in expr.free_symbols}))


def _longer(left: Expr, right: Expr) -> Expr:
    if isinstance(left, sympy.Expr) or isinstance(right, sympy.Expr):
        return sympy.Max(left, right)
    return max(left, right)
