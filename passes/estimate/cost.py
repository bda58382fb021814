"""The cost model: seconds, FLOPs and bytes of every node, from shapes and a hardware profile.

Compute is a roofline: a node takes as long as its FLOPs or its bytes need, whichever is longer (on
CPUs, which wait for memory, as both).
A collective is a ring: a fixed part, a latency for every step, and the bytes each rank receives
over the bandwidth of the slowest link. Figures are plain numbers where shapes are, and sympy
expressions where a size is symbolic, so one formula serves a hint and a table.

Under Inductor (`fused`), elementwise values that only elementwise ops or reductions read are never
stored: they stay in the registers of one kernel. They cost nothing themselves; the op at the end of
such a chain reads what the chain reads. On CPUs, one that is slow and read twice is stored. That is
a model: a kernel that could not be fused moves more. Left out: caches, and the arithmetic of
elementwise ops other than tanh and its like.
"""

import functools
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
    is_view,
    moved_by,
    moves_state,
    readers_of,
    sources_of,
    state_bytes,
    writes,
)
from shardc.runtime import compat
from shardc.runtime.layout.spec import UnshardSpec

Expr = Any
"""A number, or a sympy expression over the symbols of the graph and `WORLD`."""

WORLD = sympy.Symbol("W", integer=True, positive=True)
"""The world size, in tables over several."""

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
        ring = sympy.Piecewise((within, world <= size), (between, True))
        return sympy.Piecewise((0, world <= 1), (rounds * ring + profile.message, True))
    if world <= 1:
        return 0.0  # a copy
    return rounds * (within if world <= size else between) + profile.message


def exchange_seconds(nbytes: Expr, world: Expr, profile: Profile) -> Expr:
    """Seconds of an all-to-all in which every rank sends `nbytes`, its own part included.

    Every rank sends to all others at once, and pays `PEER` for each. A ring enters a node once,
    over all of its network cards; here what goes to other nodes has a rank's share of them.
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
"""Seconds to post a message to one rank, and the one from it: what all-to-alls of a few bytes among
8 to 1,024 GPUs take is about that. No data sheet has it."""


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
    for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
        if isinstance(leaf, Tensor):
            size: Expr = leaf.element_size()
            for dim in leaf.shape:
                size = size * compat.size_expr(dim)
            total = total + size
    return total


WRITING_MATMULS = (torch.ops.shardc.first_matmul, torch.ops.shardc.write_matmul)
"""Write into a buffer; the first takes the memory for it."""
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
    """FLOPs of a grouped matmul, in which rows go to one of several matrices each: torch's op or
    that of transformers.

    Args:
        left: (rows, K), or (K, rows) for the gradient of the matrices.
        right: (matrices, K, N), or (rows, N).
        others: offsets; the gradient too for a backward, which does two such products.
        out_val: what it gives.
    """
    products = 2 if isinstance(out_val, (tuple, list)) else 1
    return products * 2 * left.numel() * right.shape[-1]


def called(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node calls, and its arguments; an op that is given a random state is looked
    through."""
    place = compat.place_of_random_op(node.target)
    if place is None:
        return node.target, node.args
    return node.args[place], node.args[place + 1 :]


def _made(node: Node) -> Any:
    """The value or values that a node makes or writes."""
    if compat.place_of_random_op(node.target) is not None:  # its items have values, it has none
        return [item.meta.get("val") for item in node.users]
    return node.meta.get(WRITES, node.meta.get("val"))


def first_made(node: Node) -> Tensor | None:
    """The first tensor that a node makes or writes."""
    made = _made(node)
    if isinstance(made, Tensor):
        return made
    return next((v for v in tree_leaves(made) if isinstance(v, Tensor)), None)


Registers = dict[Node, bool]
"""Which nodes `stays_in_registers`, as far as it is known, while nobody changes their graph."""


def node_bytes(node: Node, fused: bool = False, known: Registers | None = None) -> Expr:
    """Bytes of memory traffic: what a node reads and writes, and its fused producers read."""
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
        source = operand
        while is_view(source) and source.all_input_nodes:
            source = source.all_input_nodes[0]
        if fused and _stays(source, known):
            todo += source.all_input_nodes
        else:
            whole = tensor_bytes(source.meta.get("val"))
            total = total + _shorter(tensor_bytes(operand.meta.get("val")), whole)
    return total


def is_fusible(node: Node) -> bool:
    """Whether Inductor makes loops of an op, which it fuses with others that it makes loops of."""
    target, tags = node.target, getattr(node.target, "tags", ())
    # 2.11 has no tag for reductions.
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
    """The values that Inductor never stores, and which stored ones each is computed from.

    It stores what it computes from many if several read it.

    Args:
        nodes: of a graph, in its order.
    """
    reads: dict[Node, set[Node]] = {}
    for node in nodes:
        if stays_in_registers(node):
            stored = set[Node]().union(*(reads.get(s, {s}) for s in sources_of(node)))
            if len(stored) <= MOST_READ or len(set(readers_of(node))) == 1:
                reads[node] = stored
    return reads


MOST_READ = 4
"""From so many values what several read is computed where it is read (Inductor's
`realize_reads_threshold`)."""


def _is_joined_in_loop(node: Node, users: list[Node]) -> bool:
    """Whether what is joined is computed by its readers: all is, or they are pointwise."""
    computed = [is_pointwise(joined) for joined in node.all_input_nodes]
    if all(map(is_pointwise, users)):
        return any(computed)
    return all(computed) and all(is_pointwise(user) or is_reduction(user) for user in users)


def is_stored_for_reuse(node: Node) -> bool:
    """Whether Inductor stores a value where several read it: on CPUs, one that is slow to compute.

    That several do is for the caller to know.
    """
    return runs_on_cpu(node) and _is_slow(node)


def runs_on_cpu(node: Node) -> bool:
    """Whether a node is planned for a CPU; plans for GPUs may be made on one."""
    value = first_made(node)
    return value is not None and value.device.type == "cpu" and not current_profile("cpu").overlaps


def _is_slow(node: Node) -> bool:
    """Whether an exponential or its like is part of what computes a value in one loop."""
    todo = [node]
    while todo:
        node = todo.pop()
        if getattr(node.target, "overloadpacket", None) in _SLOW:
            return True
        todo += [o for o in node.all_input_nodes if is_pointwise(o) and len(o.users) == 1]
    return False


def is_pointwise(node: Node) -> bool:
    """Whether an op makes each value of one of each that it reads, in a loop."""
    return _has_pointwise_tag(node.target) and product_in(node) is None


def product_in(node: Node) -> Node | None:
    """The matmul that a sum alone reads: on CPUs, Inductor makes one op of both, at the sum."""
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
    """Whether an op makes a tensor of numbers in the graph, and nothing writes to it."""
    if node.target not in _CONSTANTS or node.all_input_nodes:
        return False
    return all(user.op == "output" or writes(user) is False for user in node.users)


def is_empty(node: Node) -> bool:
    """Whether an op only takes memory."""
    return node.target in _EMPTY


def is_reduction(node: Node) -> bool:
    """Whether Inductor makes a loop of it that gives fewer values than it reads."""
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
"""Further ops that Inductor makes loops of."""

_JOINS: set[Any] = {aten.cat.default}
"""What they are given is computed in its place in the result."""

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
"""Of a table these read no more than they write."""

_READ_IN_LOOPS = _JOINS | _READS_ROWS | _LOOPS
"""Further ops that compute what they read where they read it."""


def node_seconds(
    node: Node, profile: Profile, fused: bool = False, known: Registers | None = None
) -> Expr:
    """Seconds that a compute node takes; views take none, in registers only the arithmetic does.

    Args:
        node: of a graph.
        profile: the device.
        fused: whether Inductor fuses elementwise ops.
        known: filled and read in calls for nodes of one graph that nobody changes between them.
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
    """Whether an attention skips what comes later; those that cannot be asked do."""
    target, args = called(node)
    return compat.argument_of(target, args, node.kwargs, "is_causal") is not False


def among_copies(profile: Profile, shards: int) -> Profile:
    """`profile` as the ranks see it that hold the same segment of several copies of a model.

    Each copy has `shards` ranks. Of a node that is as large as a copy, or smaller, one rank is in
    such a group, and all groups of a node share its network cards.
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
    """Seconds that a collective occupies the wire, after its input has come from the host.

    Of a gather in steps, those across nodes; `following_seconds` are inside of them.
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
    """Seconds for a gather's segment to come from the host; 0 where it is on the device."""
    if not profile.host_bandwidth or all(moved.spec.device is None for moved in moved_by(node)):
        return 0
    segment = node.args[0]
    return host_seconds(tensor_bytes(segment.meta.get("val")), profile)  # type: ignore[union-attr]


def copy_bytes(node: Node) -> Expr:
    """Bytes of a copy to the host or back: of a value, or of an optimizer's state."""
    return state_bytes(node) if moves_state(node) else tensor_bytes(node.meta.get("val"))


def host_seconds(nbytes: Expr, profile: Profile) -> Expr:
    """Seconds that `nbytes` take between the device and pinned memory of the host."""
    return nbytes / profile.host_bandwidth


def following_seconds(node: Node, profile: Profile) -> Expr:
    """Seconds that a gather in steps takes inside of nodes; 0 for other collectives."""
    if node.target is not IN_STEPS:
        return 0
    return collective_seconds(transfer_bytes(node), node.args[5], profile)


def fixed_seconds(node: Node, world: int, profile: Profile) -> float:
    """The part of `transfer_seconds` that does not depend on what is sent; among a known number of
    ranks."""
    profile = _profile_of(node, profile)
    if node.target is c10d.all_to_all_single.default:
        return float(exchange_seconds(0, world, profile))
    return float(collective_seconds(0, world, profile, _ROUNDS.get(node.target, 1)))


def rows_seconds(nbytes: Expr, ranks: int, profile: Profile, back: bool) -> Expr:
    """Seconds that it takes to fetch rows of a table; `back`: to return their gradients.

    Three messages say which rows are wanted, deal out the segments, and bring rows; two return.
    """
    seconds = exchange_seconds(nbytes, ranks, profile)
    empty = exchange_seconds(0, ranks, profile)
    return seconds + (empty if back else 2 * empty + READ_BY_HOST)


READ_BY_HOST = 5e-5
"""Seconds for the host to read how many rows are fetched, and to go on."""


def rows_bytes(
    count: Expr, rows: int, width: int, ranks: int, dtype: torch.dtype, back: bool
) -> Expr:
    """Bytes that every rank sends to fetch `count` rows of a table, or to return gradients.

    Args:
        rows, width: of the table.
        dtype: in which rows, or their gradients, are sent.
    """
    dealt = -(-rows // ranks)
    return (dealt + _shorter(count, rows)) * width * dtype.itemsize + (0 if back else rows)


def _rows_sent(node: Node) -> Expr:
    """Bytes that a rank sends for a `FETCH` or `RETURN`."""
    back = node.target is RETURN
    dtype, ranks = (node.args[4], node.args[5]) if back else (node.args[2], node.args[4])
    rows, width = node.args[-2:]
    looked_up = node.args[0 if back else 1].meta["val"]  # type: ignore[union-attr]
    count = 1
    for size in looked_up.shape[:1] if back else looked_up.shape:
        count = count * compat.size_expr(size)
    return rows_bytes(count, rows, width, ranks, dtype, back)  # type: ignore[arg-type]


def whole_seconds(spec: UnshardSpec, profile: Profile) -> float:
    """Seconds to gather a bucket and to reduce its gradient over one copy of the model."""
    part, world = spec.numel // spec.world_size, spec.world_size
    gathered = (
        part * spec.compute_dtype.itemsize if spec.wire is None else spec.wire.row_bytes(part)
    )
    seconds = collective_seconds(gathered * world, world, profile)
    if not any(spec.trainable):
        return seconds
    r = spec.reduction
    if r.wire is not None and r.replicas is None:
        return seconds + exchange_seconds(r.wire.row_bytes(part) * world, world, profile)
    reduced = (r.dtype or spec.compute_dtype).itemsize * part
    return seconds + collective_seconds(reduced * world, world, profile)


def transfer_bytes(node: Node) -> Expr:
    """Bytes of the whole that a collective moves: gathered, before it is reduced, or sent."""
    if node.target in (FETCH, RETURN):
        return _rows_sent(node)
    gathered = tensor_bytes(node.meta.get("val"))
    given = sum(tensor_bytes(operand.meta.get("val")) for operand in node.all_input_nodes)
    return _longer(gathered, given)


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


def _shorter(left: Expr, right: Expr) -> Expr:
    if isinstance(left, sympy.Expr) or isinstance(right, sympy.Expr):
        return sympy.Min(left, right)
    return min(left, right)
