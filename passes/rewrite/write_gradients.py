"""Backward graph: compute weight gradients where the reduce-scatter reads them.

    before:  g0 = mm(a, b); g1 = mm(c, d); g2 = sum(e); flat = pack([g0, g1, g2]);
             reduce_scatter(flat)
    after:   flat = first_matmul(a, b); write_matmul(flat, c, d); g2 = sum(e);
             write_parts(flat, [g2]); reduce_scatter(flat)

A gradient that comes from a matmul is written by that matmul, the first into memory that it takes;
the rest (biases, norms, what several uses add up to) is copied, in one op. A bucket without such
matmuls stays packed, and one that is one gradient and no padding is a view. Last of the passes that
edit, because from here on order carries meaning: the writes are no data dependencies of the
reduction.
"""

import itertools
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import WRITES, meta_for_another

aten, ops = torch.ops.aten, torch.ops.shardc


@contract(needs="scheduled", ends="movable")
def write_gradients(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace every `pack` of `gm` that is a gradient, or is given matmuls."""
    graph = gm.graph
    for pack in graph.find_nodes(op="call_function", target=ops.pack.default):
        parts, sizes, dtype, *pending = pack.args
        assert isinstance(parts, (list, tuple)) and isinstance(sizes, (list, tuple))
        if pending and pending[0] is not None:
            continue  # what is added to must be copied first: `pack` does both
        if len(parts) == 1 and parts[0].meta["val"].dtype == dtype:
            with graph.inserting_before(pack):
                flat = graph.call_function(aten.reshape.default, (parts[0], [-1]))
            flat.meta = meta_for_another(pack)
            pack.replace_all_uses_with(flat)
            graph.erase_node(pack)
        elif own := {part for part in parts if parts.count(part) == 1 and _is_own(part, pack)}:
            _write(graph, pack, [node for node in graph.nodes if node in own])
    return gm


def _write(graph: Graph, pack: Node, matmuls: list[Node]) -> None:
    """Let `matmuls`, in the order of the graph, and copies write the input of the reduction in the
    place of `pack`."""
    parts, sizes, *_ = pack.args
    assert isinstance(parts, (list, tuple)) and isinstance(sizes, (list, tuple))
    places = list(zip(parts, itertools.accumulate(sizes, initial=0), sizes, strict=False))
    starts = {part: start for part, start, _ in places}
    first, *others = matmuls
    with graph.inserting_before(first):
        args = (*first.args, sum(sizes), starts[first])
        flat = graph.call_function(ops.first_matmul.default, args)
    flat.meta = meta_for_another(pack) | _writing(first)
    for matmul in others:
        with graph.inserting_before(matmul):
            args = (flat, *matmul.args, starts[matmul])
            graph.call_function(ops.write_matmul.default, args).meta = _writing(matmul)
    copied = [(part, start) for part, start, _ in places if part and part not in matmuls]
    gaps = [number for part, *place in places if part is None for number in place]
    if copied or gaps:
        with graph.inserting_before(pack):
            args = (flat, [part for part, _ in copied], [start for _, start in copied], gaps)
            write = graph.call_function(ops.write_parts.default, args)
        write.meta[WRITES] = [part.meta["val"] for part, _ in copied]
    pack.replace_all_uses_with(flat)
    for node in (pack, *matmuls):
        graph.erase_node(node)


def _writing(matmul: Node) -> dict[str, Any]:
    """The meta of what writes the result of `matmul` into a buffer."""
    meta = meta_for_another(matmul)
    meta[WRITES] = meta.pop("val")
    return meta


def _is_own(part: Node | None, pack: Node) -> bool:
    """Whether `part` is a matmul that nothing but `pack` reads."""
    if part is None:
        return False
    same = part.meta["val"].dtype == pack.meta["val"].dtype
    return same and part.target is aten.mm.default and set(part.users) == {pack}
