"""Joint graph: which parameters of a bucket the backward differentiates.

The gradient of a segment is a reduce-scatter of `shardc::pack`, whose parts are None where nothing
flowed: parameters read under `no_grad`, detached, or not at all. Their gradient stays None, as
without sharding. This pass reads; it changes nothing.
"""

import torch
from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext, spec_of_node


def find_used_slots(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Set `ctx.differentiated`: for each primal, in order, the slots its gradient packs.

    And `ctx.results`, if there is a backward at all.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    primals = [node for node in inputs if not str(node.target).startswith("tangents")]
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    results = len(outputs) - len(primals)
    if len(primals) < len(inputs):
        ctx.results = results
    ctx.differentiated = [_packed(grad) for grad in outputs[results:]]
    return gm


def _packed(grad: object) -> frozenset[int]:
    slots, todo, seen = set[int](), [grad], set[Node]()
    while todo:
        node = todo.pop()
        if not isinstance(node, Node) or node in seen:
            continue
        seen.add(node)
        if node.target is not torch.ops.shardc.pack.default:
            todo += node.all_input_nodes
            continue
        spec, parts = spec_of_node(node), node.args[0]
        assert spec is not None and isinstance(parts, (list, tuple))
        pairs = zip(parts, spec.pieces, strict=True)
        slots |= {slot for part, (_, slot) in pairs if part is not None and slot is not None}
    return frozenset(slots)
