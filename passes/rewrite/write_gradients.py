"""Backward graph: compute weight gradients where the reduce-scatter reads them.

    before:  g0 = mm(a, b); g1 = mm(c, d); g2 = sum(e); flat = pack([g0, g1, g2]);
             reduce_scatter(flat)
    after:   flat = first_matmul(a, b); write_matmul(flat, c, d); g2 = sum(e);
             write_parts(flat, [g2]); reduce_scatter(flat)

A matmul writes its gradient into the input of the reduction, and the first matmul allocates that
input. One op copies the other gradients (biases, norms, sums over several uses). A bucket without
such matmuls stays packed. For a bucket of one gradient without padding, the input is a view. The
pass is the last that edits, because order carries meaning afterwards: the reduction has no data
dependency on the writes.
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
    """Replace every `pack` of `gm` that packs a single gradient, or matmuls."""
    graph = gm.graph
    for pack in graph.find_nodes(op="call_function", target=ops.pack.default):
        parts, sizes, dtype, *pending = pack.args
        assert isinstance(parts, (list, tuple)) and isinstance(sizes, (list, tuple))
        if pending and pending[0] is not None:
            continue  # `pack` first copies the waiting gradient, then adds
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
    """Replace `pack`: `matmuls`, in graph order, and copies write the input of the reduction."""
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
    """The meta of an op that writes the result of `matmul` into a buffer."""
    meta = meta_for_another(matmul)
    meta[WRITES] = meta.pop("val")
    return meta


def _is_own(part: Node | None, pack: Node) -> bool:
    """Whether `part` is a matmul in the dtype of `pack`, and only `pack` reads it."""
    if part is None:
        return False
    same = part.meta["val"].dtype == pack.meta["val"].dtype
    return same and part.target is aten.mm.default and set(part.users) == {pack}
