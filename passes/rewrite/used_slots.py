"""Joint graph: mark segments for later passes, and find the slots that get a gradient.

The gradient of a segment is a reduce-scatter of `shardc::pack`. A part of the pack is None if no
gradient flowed to a parameter: it was read under `no_grad`, detached, or not read at all. The
gradient of such a parameter stays None, as without sharding.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import RETURN, SEGMENT, graph_modules, moved_by
from shardc.runtime import compat


@dataclass(frozen=True)
class Differentiated:
    """Facts read off a joint graph.

    Attributes:
        results: the number of the forward's outputs that the caller gets; None where no backward
            follows.
        slots: by input of the Dynamo graph that is a segment, the slots that get a gradient; at -1
            the slots in code that several calls share.
    """

    results: int | None
    slots: Mapping[int, frozenset[int]]

    def slots_of(self, position: int, read: frozenset[int]) -> frozenset[int]:
        """The slots among `read` of one segment that get a gradient, as far as known."""
        return self.slots.get(position, read if -1 in self.slots else frozenset())


@contract(needs="gathers", gives="segments")
def mark_segments(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Mark the inputs that are segments of gathered or reduced buckets, or held buckets."""
    inputs = compat.inputs_of_joint(gm)
    for position in {moved.position for node in gm.graph.nodes for moved in moved_by(node)} - {-1}:
        inputs[position].meta[SEGMENT] = True
    for position in ctx.held:
        inputs[position].meta[SEGMENT] = True
    return gm


def differentiated(gm: GraphModule) -> Differentiated:
    """The slots that the gradients of `gm` pack, or return rows for."""
    slots: dict[int, frozenset[int]] = {}
    for body in graph_modules(gm):
        for pack in body.graph.find_nodes(op="call_function", target=torch.ops.shardc.pack.default):
            (moved,), parts = moved_by(pack), pack.args[0]
            assert isinstance(parts, (list, tuple))
            pairs = zip(parts, moved.spec.pieces, strict=True)
            packed = {slot for part, (_, slot) in pairs if part is not None and slot is not None}
            slots[moved.position] = slots.get(moved.position, frozenset()) | packed
        for back in body.graph.find_nodes(op="call_function", target=RETURN):
            (moved,), start = moved_by(back), back.args[-3]
            own = {s for s in range(len(moved.spec.shapes)) if moved.spec.starts[s] == start}
            slots[moved.position] = slots.get(moved.position, frozenset()) | own
    return Differentiated(compat.results_of_joint(gm), slots)
