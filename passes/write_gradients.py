"""Backward graph: compute weight gradients where the reduce-scatter reads them.

    before:  g0 = mm(a, b); g1 = sum(c); flat = pack([g0, g1]); reduce_scatter(flat)
    after:   flat = empty(); write_matmul(flat, a, b); g1 = sum(c); write_parts(flat, [g1]);
             reduce_scatter(flat)

A gradient that comes from a matmul is written by that matmul; the rest (biases, norms, what several
uses add up to) is copied, in one op. A bucket that is one gradient and no padding needs neither:
it is a view. Last of the passes that edit, because from here on order carries meaning: the writes
are no data dependencies of the reduction.
"""

import torch
from torch.fx import GraphModule, Node

from shardc.passes.context import WRITES, PassContext

aten, ops = torch.ops.aten, torch.ops.shardc


def write_gradients(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace every `pack` of `gm`."""
    for pack in gm.graph.find_nodes(op="call_function", target=ops.pack.default):
        parts, sizes, dtype, *pending = pack.args
        assert isinstance(parts, (list, tuple)) and isinstance(sizes, (list, tuple))
        if pending and pending[0] is not None:
            continue  # what is added to must be copied first: `pack` does both
        if len(parts) == 1 and parts[0].meta["val"].dtype == dtype:
            with gm.graph.inserting_before(pack):
                flat = gm.graph.call_function(aten.reshape.default, (parts[0], [-1]))
        else:
            flat = _write(gm, pack, list(parts), list(sizes))
        flat.meta = dict(pack.meta)
        pack.replace_all_uses_with(flat)
        gm.graph.erase_node(pack)
    return gm


def _write(gm: GraphModule, pack: Node, parts: list[Node | None], sizes: list[int]) -> Node:
    graph, starts = gm.graph, [sum(sizes[:index]) for index in range(len(sizes))]
    matmuls = {
        part: start
        for part, start in zip(parts, starts, strict=True)
        if part is not None and parts.count(part) == 1 and _is_own(part, pack)
    }
    example = pack.meta["val"]
    rank = {node: index for index, node in enumerate(graph.nodes)}
    first = min([pack, *matmuls], key=rank.__getitem__)
    with graph.inserting_before(first):
        options = {"dtype": example.dtype, "device": example.device}
        flat = graph.call_function(aten.empty.memory_format, ([sum(sizes)],), options)
    copied, copied_starts, gaps = [], [], []
    for part, start, size in zip(parts, starts, sizes, strict=True):
        if part is None:
            gaps += [start, size]
        elif part in matmuls:
            with graph.inserting_before(part):
                write = graph.call_function(ops.write_matmul.default, (flat, *part.args, start))
            write.meta = {k: v for k, v in part.meta.items() if k != "val"}
            write.meta[WRITES] = part.meta["val"]
        else:
            copied.append(part)
            copied_starts.append(start)
    if copied or gaps:
        with graph.inserting_before(pack):
            write = graph.call_function(
                ops.write_parts.default, (flat, copied, copied_starts, gaps)
            )
        write.meta[WRITES] = [part.meta["val"] for part in copied if part is not None]
    pack.args = ([None if part in matmuls else part for part in parts], *pack.args[1:])
    for part in matmuls:
        graph.erase_node(part)
    return flat


def _is_own(part: Node, pack: Node) -> bool:
    """Whether `part` is a matmul that nothing but `pack` reads."""
    same = part.meta["val"].dtype == pack.meta["val"].dtype
    return same and part.target is aten.mm.default and set(part.users) == {pack}
