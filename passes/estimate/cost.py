"""The cost model: seconds, FLOPs and bytes of every node, from shapes and a hardware profile.

Compute is a roofline: a node takes the time for its FLOPs or the time for its bytes, the longer of
both (on CPUs, which wait for memory, their sum).
A collective is a ring. Its seconds are a fixed part, a latency for every step, and the bytes that
each rank receives divided by the bandwidth of the slowest link. Figures are plain numbers, or sympy
expressions if a size is symbolic, so that one formula serves a hint and a table.

Under Inductor (`fused`), an elementwise value is never stored if only elementwise ops or reductions
read it: it stays in the registers of one kernel, without traffic. The last op of such a chain reads
the operands of the chain. On CPUs, a value that is slow to compute and has two readers is stored.
The model is simpler than Inductor: a kernel that Inductor does not fuse moves more bytes. The model
leaves out caches, and the arithmetic of elementwise ops other than tanh and similar ops.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from shardc.passes.estimate.hardware import Profile, current_profile
from shardc.passes.nodes import (
    FETCH,
    IN_STEPS,
    RETURN,
    WRITES,
    c10d,
    is_host_copy,
    is_view,
    moved_by,
    moves_state,
    ranks_in,
    readers_of,
    source_of,
    sources_of,
    state_bytes,
    writes,
)
from shardc.runtime import compat
from shardc.runtime.layout.spec import UnshardSpec

Expr = Any
"""A number, or a sympy expression over the symbols of the graph and `WORLD`."""

WORLD = sympy.Symbol("W", integer=True, positive=True)
"""The world size, in tables over several world sizes."""

aten = torch.ops.aten
_FLOPS = compat.flop_formulas()

_ROUNDS: dict[Any, int] = {
    c10d.all_gather_into_tensor.default: 1,
    c10d.all_gather_into_tensor_out.default: 1,
    c10d.all_gather_into_tensor_coalesced.default: 1,
    c10d.reduce_scatter_tensor.default: 1,
    c10d.reduce_scatter_tensor_coalesced.default: 1,
    c10d.all_reduce.default: 2,
    torch.ops.shardc.all_gather.default: 1,
    torch.ops.shardc.reduce_scatter.default: 1,
}
"""How many times a collective moves its whole buffer around the ring."""


def collective_seconds(nbytes: Expr, world: Expr, profile: Profile, rounds: int = 1) -> Expr:
    """Seconds to move `nbytes` (the gathered or unreduced whole) around a ring, `rounds` times.

    Args:
        nbytes: bytes of the whole, over all ranks.
        world: the number of ranks, or `WORLD`.
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
        ring = sympy.Piecewise((within, world <= size), (between, True))
        return sympy.Piecewise((0, world <= 1), (rounds * ring + profile.message, True))
    if world <= 1:
        return 0.0  # a copy
    return rounds * (within if world <= size else between) + profile.message


def exchange_seconds(nbytes: Expr, world: Expr, profile: Profile) -> Expr:
    """Seconds of an all-to-all in which every rank sends `nbytes`, its own part included.

    Every rank sends to all other ranks at once, and pays `PEER` for each of them. A ring enters a
    node once, over all network cards of the node; in an all-to-all, each rank sends to other nodes
    over its share of the cards.
    """
    inside, across, size = profile.inside, profile.across, profile.node_size
    share = min(across.bandwidth / size, inside.bandwidth)
    fixed = (world - 1) * PEER + profile.message
    within = fixed + inside.latency + nbytes * (world - 1) / world / inside.bandwidth
    beside = nbytes * (size - 1) / world / inside.bandwidth
    beyond = nbytes * (world - size) / world / share
    between = fixed + max(inside.latency, across.latency) + _longer(beside, beyond)
    if isinstance(world, sympy.Expr):
        return sympy.Piecewise((0, world <= 1), (within, world <= size), (between, True))
    if world <= 1:
        return 0.0
    return within if world <= size else between


PEER = 1e-6
"""Seconds to post the message to one rank and the message from it. All-to-alls of a few bytes among
8 to 1,024 GPUs take about so long for each rank. No data sheet has this figure."""


MESSAGES_PER_BUCKET = 2
"""A bucket is worth a message if its bytes take so many times the fixed seconds of a message."""


def bucket_grain(world: int, profile: Profile) -> int:
    """Bytes of the smallest bucket that a unit is split into.

    With smaller buckets, the first matmul starts sooner and the last reduction ends sooner. But
    each bucket costs a message.
    """
    fixed = collective_seconds(0, world, profile)
    slope = collective_seconds(2**30, world, profile) - fixed
    return int(MESSAGES_PER_BUCKET * fixed / slope * 2**30) if world > 1 else 0


def tensor_bytes(value: Any) -> Expr:
    """Bytes of the tensors in `value`, counted as dense."""
    leaves = (value,) if isinstance(value, Tensor) else tree_leaves(value)
    return sum(
        math.prod(map(compat.size_expr, leaf.shape), start=leaf.element_size())
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )


WRITING_MATMULS = (torch.ops.shardc.first_matmul, torch.ops.shardc.write_matmul)
"""Matmuls that write into a buffer; `first_matmul` also allocates the buffer."""
_MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


def is_matmul(node: Node) -> bool:
    """Whether the matmul library computes the node."""
    op = getattr(node.target, "overloadpacket", None)
    return op in _MATMULS or op in WRITING_MATMULS


def node_flops(node: Node) -> Expr:
    """FLOPs of a matmul, convolution or attention; 0 for everything else."""
    target, args = called(node)
    op = getattr(target, "overloadpacket", target)
    if op in WRITING_MATMULS:
        args, op = tuple(each for each in args if isinstance(each, Node))[-2:], aten.mm
    formula = _FLOPS.get(op)
    if "grouped_mm" in str(target):
        formula = _grouped_matmul_flops
    if formula is None:
        return 0
    args, kwargs = map_arg((args, node.kwargs), lambda n: n.meta.get("val"))
    return compat.size_expr(formula(*args, **kwargs, out_val=_made(node)))


def _grouped_matmul_flops(left: Any, right: Any, *others: Any, out_val: Any, **kwargs: Any) -> Any:
    """FLOPs of a grouped matmul: each row by one of several matrices; a backward has two products.

    Shapes: `left` (rows, K), or (K, rows) for the gradient of the matrices; `right` (matrices, K,
    N), or (rows, N).
    """
    products = 2 if isinstance(out_val, (tuple, list)) else 1
    return products * 2 * left.numel() * right.shape[-1]


def called(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node calls, and its arguments.

    A call that saves or sets a random state counts as the random op that it contains.
    """
    place = compat.place_of_random_op(node.target)
    if place is None:
        return node.target, node.args
    return node.args[place], node.args[place + 1 :]


def _made(node: Node) -> Any:
    """The value or values that a node makes or writes."""
    if compat.place_of_random_op(node.target) is not None:  # items have values, the call has none
        return [item.meta.get("val") for item in node.users]
    return node.meta.get(WRITES, node.meta.get("val"))


def first_made(node: Node) -> Tensor | None:
    """The first tensor that a node makes or writes."""
    made = _made(node)
    if isinstance(made, Tensor):
        return made
    return next((v for v in tree_leaves(made) if isinstance(v, Tensor)), None)


Registers = dict[Node, bool]
"""Known answers of `stays_in_registers`, valid while nobody changes the graph of the nodes."""


def node_bytes(node: Node, fused: bool = False, known: Registers | None = None) -> Expr:
    """Bytes of memory traffic: a node's reads and writes, and the reads of its fused producers."""
    known = {} if known is None else known
    written = tensor_bytes(_made(node))
    if node.target in _READS_ROWS:
        return 2 * written
    buffer = node.args[0] if WRITES in node.meta and "val" not in node.meta else None
    total, seen, todo = written, set[Node](), [n for n in node.all_input_nodes if n is not buffer]
    while todo:
        operand = todo.pop()
        if operand in seen:
            continue
        seen.add(operand)
        source = source_of(operand)
        if fused and _stays(source, known):
            todo += source.all_input_nodes
        else:
            whole = tensor_bytes(source.meta.get("val"))
            total = total + _shorter(tensor_bytes(operand.meta.get("val")), whole)
    return total


def is_fusible(node: Node) -> bool:
    """Whether Inductor lowers an op to a loop, which it can fuse with other loops."""
    target, tags = node.target, getattr(node.target, "tags", ())
    # torch 2.11 has no tag for reductions.
    named = any(target in ops for ops in (_REDUCTIONS, _READS_ROWS, _LOOPS, _JOINS))
    tagged = torch.Tag.pointwise in tags or getattr(torch.Tag, "reduction", None) in tags
    return (named or tagged or compat.is_random_value(node)) and product_in(node) is None


def stays_in_registers(node: Node) -> bool:
    """Whether Inductor would never store this value."""
    joins = node.target in _JOINS
    if compat.is_stored_at_once(node):
        return False
    if not joins and not is_pointwise(node) and not is_constant(node):
        return False
    users = list(readers_of(node))
    if joins:
        return bool(users) and _is_joined_in_loop(node, users)
    looped = all(is_pointwise(u) or is_reduction(u) or u.target in _READ_IN_LOOPS for u in users)
    return bool(users) and looped and not (len(users) > 1 and is_stored_for_reuse(node))


def _stays(node: Node, known: Registers) -> bool:
    if node not in known:
        known[node] = stays_in_registers(node)
    return known[node]


def in_registers(nodes: Iterable[Node]) -> dict[Node, set[Node]]:
    """Map each value that Inductor never stores to the stored values that it is computed from.

    Inductor stores a value with several readers if it is computed from over `MOST_READ` values.
    """
    reads: dict[Node, set[Node]] = {}
    for node in nodes:
        if stays_in_registers(node):
            stored = set[Node]().union(*(reads.get(s, {s}) for s in sources_of(node)))
            if len(stored) <= MOST_READ or len(set(readers_of(node))) == 1:
                reads[node] = stored
    return reads


MOST_READ = 4
"""The most stored values from which each of several readers computes a value anew (Inductor's
`realize_reads_threshold`)."""


def _is_joined_in_loop(node: Node, users: list[Node]) -> bool:
    """Whether the readers of a join compute the joined values in their loops.

    If all readers are pointwise, one joined value must be pointwise. If a reduction is among the
    readers, all joined values must be pointwise.
    """
    computed = [is_pointwise(joined) for joined in node.all_input_nodes]
    if all(map(is_pointwise, users)):
        return any(computed)
    return all(computed) and all(is_pointwise(user) or is_reduction(user) for user in users)


def is_stored_for_reuse(node: Node) -> bool:
    """Whether Inductor stores a value with several readers: on CPUs, a value slow to compute.

    The caller must know that there are several readers.
    """
    return runs_on_cpu(node) and _is_slow(node)


def runs_on_cpu(node: Node) -> bool:
    """Whether the plan runs a node on a CPU; a machine without GPUs may also plan for GPUs."""
    value = first_made(node)
    return value is not None and value.device.type == "cpu" and not current_profile("cpu").overlaps


def _is_slow(node: Node) -> bool:
    """Whether the loop that computes a value contains an exponential or a similar op."""
    todo = [node]
    while todo:
        node = todo.pop()
        if getattr(node.target, "overloadpacket", None) in _SLOW:
            return True
        todo += [o for o in node.all_input_nodes if is_pointwise(o) and len(o.users) == 1]
    return False


def is_pointwise(node: Node) -> bool:
    """Whether an op computes each element from one element of each operand, in a loop."""
    return _has_pointwise_tag(node.target) and product_in(node) is None


def product_in(node: Node) -> Node | None:
    """The matmul that only a sum reads: on CPUs, Inductor merges both into one op, at the sum."""
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    values = [each.meta.get("val") if isinstance(each, Node) else None for each in node.args]
    a, b = values
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not runs_on_cpu(node):
        return None
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    given = (each for each in reversed(node.args) if isinstance(each, Node))
    products = (n for n in given if n.target is aten.mm.default and set(n.users) == {node})
    return next(products, None)


@functools.cache
def _has_pointwise_tag(target: object) -> bool:
    return torch.Tag.pointwise in getattr(target, "tags", ())


def is_constant(node: Node) -> bool:
    """Whether an op makes a constant tensor, and nothing writes to that tensor."""
    if node.target not in _CONSTANTS or node.all_input_nodes:
        return False
    return all(user.op == "output" or writes(user) is False for user in node.users)


def is_empty(node: Node) -> bool:
    """Whether an op only allocates memory."""
    return node.target in _EMPTY


def is_reduction(node: Node) -> bool:
    """Whether Inductor lowers an op to a loop that reduces."""
    return node.target in _REDUCTIONS


_REDUCTIONS: set[Any] = {
    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.amax.default,
    aten.var_mean.correction, aten.native_layer_norm.default,
    aten._softmax.default, aten._log_softmax.default,
}  # fmt: skip

_CONSTANTS: set[Any] = {
    aten.full.default, aten.scalar_tensor.default, torch.ops.prims.iota.default,
}  # fmt: skip

_LOOPS: set[Any] = {
    *_CONSTANTS, aten.select_scatter.default, aten.slice_scatter.default,
    aten.constant_pad_nd.default, aten._to_copy.default,
}  # fmt: skip
"""Further ops that Inductor lowers to loops."""

_JOINS: set[Any] = {aten.cat.default}
"""Ops whose operands are computed at their places in the result."""

_TRANSCENDENTAL: set[Any] = {
    aten.tanh, aten.erf, aten.sin, aten.cos, aten.gelu, aten.gelu_backward,
}  # fmt: skip

_SLOW: set[Any] = {
    aten.exp, aten.sigmoid, aten.tanh, aten.log, aten.log2, aten.log10, aten.log1p,
}  # fmt: skip

_EMPTY: set[Any] = {aten.empty.memory_format, aten.empty_strided.default}

_READS_ROWS: set[Any] = {
    aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default,
}  # fmt: skip
"""Ops that read no more bytes of a table than they write."""

_READ_IN_LOOPS = _JOINS | _READS_ROWS | _LOOPS
"""Further ops that compute their operands in their own loops."""


def node_seconds(
    node: Node, profile: Profile, fused: bool = False, known: Registers | None = None
) -> Expr:
    """Seconds that a compute node takes: 0 for a view, the arithmetic for a value in registers.

    `known` is a cache for calls with nodes of one graph, valid while nobody changes the graph.
    """
    known = {} if known is None else known
    if node.op != "call_function" or is_view(node) or is_empty(node):
        return 0
    value = first_made(node)
    if value is None:
        return 0
    arithmetic: Expr = 0
    if getattr(node.target, "overloadpacket", None) in _TRANSCENDENTAL:
        arithmetic = tensor_bytes(value) / value.element_size() / profile.transcendental
    if fused and _stays(node, known):
        return arithmetic
    traffic = node_bytes(node, fused, known) / (
        profile.memory_bandwidth * profile.memory_efficiency
    )
    flops = node_flops(node)
    if flops == 0:
        return traffic + arithmetic + profile.overhead
    rate = profile.peak(value.dtype)
    if "attention" in str(called(node)[0]):
        rate *= profile.attention_efficiency / (1 if _is_causal(node) else 2)
    together = _longer(flops / rate, traffic) if profile.overlaps else flops / rate + traffic
    return together + profile.overhead


def _is_causal(node: Node) -> bool:
    """Whether an attention skips later positions; an op without the argument counts as causal."""
    target, args = called(node)
    return compat.argument_of(target, args, node.kwargs, "is_causal") is not False


def among_copies(profile: Profile, shards: int) -> Profile:
    """The profile of a group of ranks that hold one segment of several copies of a model.

    Each copy has `shards` ranks. A node with `shards` ranks or fewer has one rank in such a group.
    All groups of a node share its network cards.
    """
    together = max(1, profile.node_size // shards)
    share = profile.across.bandwidth * together / profile.node_size
    return replace(profile, node_size=together, across=replace(profile.across, bandwidth=share))


def _profile_of(node: Node, profile: Profile) -> Profile:
    specs = [moved.spec for moved in moved_by(node)]
    if node.target is IN_STEPS:
        assert specs[0].hierarchy is not None
        return among_copies(profile, specs[0].hierarchy.local)
    for r, shards in ((spec.reduction, spec.world_size) for spec in specs):
        if r.replicas is not None and r.replicas in node.args:
            return among_copies(profile, shards)
        if r.hierarchy is not None and r.hierarchy.across in node.args:
            return among_copies(profile, r.hierarchy.local)
    return profile


def transfer_seconds(node: Node, world: Expr, profile: Profile) -> Expr:
    """Seconds of a collective on the wire, and of the copy of its segment from the host before.

    For a gather in steps, only the step across nodes counts; `following_seconds` gives the step
    inside nodes.
    """
    profile = _profile_of(node, profile)
    if node.target is IN_STEPS:
        nodes, local = node.args[3], node.args[5]
        column = transfer_bytes(node) / local
        return _from_host(node, profile) + collective_seconds(column, nodes, profile)
    if node.target in (FETCH, RETURN):
        return rows_seconds(_rows_sent(node), world, profile, back=node.target is RETURN)
    if node.target is c10d.all_to_all_single.default:
        return exchange_seconds(transfer_bytes(node), world, profile)
    rounds = _ROUNDS.get(node.target, 1)
    seconds = collective_seconds(transfer_bytes(node), world, profile, rounds)
    if node.target is torch.ops.shardc.all_gather.default:
        seconds = seconds + _from_host(node, profile)
    return seconds


def _from_host(node: Node, profile: Profile) -> Expr:
    """Seconds to copy a gather's segment from the host; 0 if the segment is on the device."""
    if not profile.host_bandwidth or all(moved.spec.device is None for moved in moved_by(node)):
        return 0
    segment = node.args[0]
    return host_seconds(tensor_bytes(segment.meta.get("val")), profile)  # type: ignore[union-attr]


def copy_bytes(node: Node) -> Expr:
    """Bytes that a copy to or from the host moves: a value, or an optimizer's state."""
    return state_bytes(node) if moves_state(node) else tensor_bytes(node.meta.get("val"))


def host_seconds(nbytes: Expr, profile: Profile) -> Expr:
    """Seconds to copy `nbytes` between the device and pinned memory of the host."""
    return nbytes / profile.host_bandwidth


def seconds_on_wire(node: Node, profile: Profile, hints: Mapping[Any, float]) -> float:
    """Seconds that a transfer occupies the wire that carries it first."""
    if is_host_copy(node):
        return float(host_seconds(evaluate(copy_bytes(node), hints), profile))
    return evaluate(transfer_seconds(node, ranks_in(node), profile), hints)


def following_seconds(node: Node, profile: Profile) -> Expr:
    """Seconds that a gather in steps takes inside nodes; 0 for other collectives."""
    if node.target is not IN_STEPS:
        return 0
    return collective_seconds(transfer_bytes(node), node.args[5], profile)


def fixed_seconds(node: Node, profile: Profile) -> float:
    """The part of `seconds_on_wire` that does not depend on the bytes that are sent."""
    profile, world = _profile_of(node, profile), ranks_in(node)
    if node.target is c10d.all_to_all_single.default:
        return float(exchange_seconds(0, world, profile))
    return float(collective_seconds(0, world, profile, _ROUNDS.get(node.target, 1)))


def rows_seconds(nbytes: Expr, ranks: int, profile: Profile, back: bool) -> Expr:
    """Seconds to fetch rows of a table; with `back`, to return the gradients of rows.

    A fetch has three messages: they ask for rows, deal out the segments, and bring the rows. A
    return has two.
    """
    seconds = exchange_seconds(nbytes, ranks, profile)
    empty = exchange_seconds(0, ranks, profile)
    return seconds + (empty if back else 2 * empty + READ_BY_HOST)


READ_BY_HOST = 5e-5
"""Seconds for the host to read the number of fetched rows, and to continue."""


def rows_bytes(
    count: Expr, rows: int, width: int, ranks: int, dtype: torch.dtype, back: bool
) -> Expr:
    """Bytes that every rank sends to fetch `count` rows of a table, or to return gradients.

    The table has the shape (`rows`, `width`); `dtype` is that of rows or gradients on the wire.
    """
    dealt = -(-rows // ranks)
    return (dealt + _shorter(count, rows)) * width * dtype.itemsize + (0 if back else rows)


def _rows_sent(node: Node) -> Expr:
    """Bytes that a rank sends for a `FETCH` or `RETURN`."""
    back = node.target is RETURN
    dtype, ranks = (node.args[4], node.args[5]) if back else (node.args[2], node.args[4])
    rows, width = node.args[-2:]
    looked_up = node.args[0 if back else 1].meta["val"]  # type: ignore[union-attr]
    count = math.prod(map(compat.size_expr, looked_up.shape[:1] if back else looked_up.shape))
    return rows_bytes(count, rows, width, ranks, dtype, back)  # type: ignore[arg-type]


def whole_seconds(spec: UnshardSpec, profile: Profile) -> float:
    """Seconds to gather a bucket and to reduce its gradient over one copy of the model."""
    part, world = spec.numel // spec.world_size, spec.world_size
    seconds = gather_seconds(spec, profile)
    if not any(spec.trainable):
        return seconds
    r = spec.reduction
    if r.wire is not None and r.replicas is None:
        return seconds + exchange_seconds(r.wire.row_bytes(part) * world, world, profile)
    reduced = (r.dtype or spec.compute_dtype).itemsize * part
    return seconds + collective_seconds(reduced * world, world, profile)


def gather_seconds(spec: UnshardSpec, profile: Profile) -> float:
    """Seconds to gather a bucket."""
    part, world = spec.numel // spec.world_size, spec.world_size
    gathered = (
        part * spec.compute_dtype.itemsize if spec.wire is None else spec.wire.row_bytes(part)
    )
    return float(collective_seconds(gathered * world, world, profile))


def transfer_bytes(node: Node) -> Expr:
    """Bytes of the whole that a collective moves: gathered, not yet reduced, or sent."""
    if node.target in (FETCH, RETURN):
        return _rows_sent(node)
    gathered = tensor_bytes(node.meta.get("val"))
    given = sum(tensor_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)
    return _longer(gathered, given)


UNKNOWN = 1
"""The value of a size that depends on data: no trace has a value for such a size."""


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
    """A figure as a number, with its symbols replaced by `values`."""
    if not isinstance(expr, sympy.Expr):
        return float(expr)
    return float(expr.subs({symbol: values.get(symbol, UNKNOWN) for symbol in expr.free_symbols}))


def _longer(left: Expr, right: Expr) -> Expr:
    if isinstance(left, sympy.Expr) or isinstance(right, sympy.Expr):
        return sympy.Max(left, right)
    return max(left, right)


def _shorter(left: Expr, right: Expr) -> Expr:
    if isinstance(left, sympy.Expr) or isinstance(right, sympy.Expr):
        return sympy.Min(left, right)
    return min(left, right)
