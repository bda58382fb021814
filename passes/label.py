"""Forward and backward graphs: every collective of ours, and its wait, knows its unit's name,
as does a copy of a gradient to the host.

What runs the graph shows the names in the profiler and in the error of a collective that fails. The
facts travel on the nodes: later steps (folding, Inductor's own passes) move and rewrite them.
"""

import torch
from torch.fx import GraphModule

from shardc.passes.context import PassContext, kind_of, labels_of, our_collectives, waits_for
from shardc.runtime.comm.progress import OFFLOAD, Label, set_label


def label_collectives(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Give every collective of `gm` and every wait for one its label."""
    for node in our_collectives(gm):
        kind, buckets = kind_of(node), labels_of(node)
        set_label(node, Label(kind, buckets, ctx.phase))
        for wait in waits_for(node):
            set_label(wait, Label(kind, buckets, ctx.phase, waits=True))
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.shardc.to_host.default):
        set_label(copy, Label(OFFLOAD, labels_of(copy), ctx.phase))
    return gm
