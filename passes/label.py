"""Forward and backward graphs: every collective of ours, and its wait, knows its unit's name,
as does a copy of a gradient to the host.

What runs the graph shows the names in the profiler and in the error of a collective that fails. The
facts travel on the nodes: later steps (folding, Inductor's own passes) move and rewrite them.
"""

import torch
from torch.fx import GraphModule

from shardc.passes.context import (
    PassContext,
    is_collective,
    kind_of,
    specs_of,
    waits_for,
)
from shardc.runtime.progress import OFFLOAD, Label, set_label


def label_collectives(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Give every collective of `gm` and every wait for one its label."""
    for node in gm.graph.nodes:
        if not is_collective(node) or not specs_of(node):
            continue
        kind, buckets = kind_of(node), ctx.labels_of(node) or ("?",)
        set_label(node, Label(kind, buckets, ctx.phase))
        for wait in waits_for(node):
            set_label(wait, Label(kind, buckets, ctx.phase, waits=True))
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.shardc.to_host.default):
        position = ctx.position_behind(copy.args[1])
        name = "?" if position is None else ctx.labels.get(position, "?")
        set_label(copy, Label(OFFLOAD, (name,), ctx.phase))
    return gm
