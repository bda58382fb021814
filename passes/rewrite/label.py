"""Forward and backward graphs: every collective of ours, and its wait, knows its unit's name,
as does a copy of a gradient or a value to the host, or of a value from there.

What runs the graph shows the names in the profiler and in the error of a collective that fails. The
facts travel on the nodes: later steps (folding, Inductor's own passes) move and rewrite them.
"""

import torch
from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import (
    is_host_copy,
    kind_of,
    labels_of,
    our_collectives,
    unit_of_copy,
    waits_for,
)
from shardc.runtime.watch.progress import OFFLOAD, Label, set_label


@contract(needs="gathers", gives="labels")
def label_collectives(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Give every collective of `gm` and every wait for one its label."""
    for node in our_collectives(gm):
        kind, buckets = kind_of(node), labels_of(node)
        set_label(node, Label(kind, buckets, ctx.phase))
        for wait in waits_for(node):
            set_label(wait, Label(kind, buckets, ctx.phase, waits=True))
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.shardc.to_host.default):
        set_label(copy, Label(OFFLOAD, labels_of(copy), ctx.phase))
    for copy in filter(is_host_copy, gm.graph.nodes):
        kind, unit = kind_of(copy), (unit_of_copy(copy),)
        set_label(copy, Label(kind, unit, ctx.phase))
        for wait in waits_for(copy):
            set_label(wait, Label(kind, unit, ctx.phase, waits=True))
    return gm
