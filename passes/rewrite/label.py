"""Forward and backward graphs: give labels to collectives and their waits.

A copy of a gradient or a value to the host, and a copy of a value from the host, gets a label too.
The executor shows labels in the profiler and in the error of a collective that fails. The nodes
carry the labels, because later steps (folding, Inductor's own passes) move and rewrite nodes.
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
    """Give every collective and host copy in `gm`, and each of their waits, its label."""
    for node in (*our_collectives(gm), *filter(is_host_copy, gm.graph.nodes)):
        names = (unit_of_copy(node),) if is_host_copy(node) else labels_of(node)
        set_label(node, Label(kind_of(node), names, ctx.phase))
        for wait in waits_for(node):
            set_label(wait, Label(kind_of(node), names, ctx.phase, waits=True))
    for copy in gm.graph.find_nodes(op="call_function", target=torch.ops.shardc.to_host.default):
        set_label(copy, Label(OFFLOAD, labels_of(copy), ctx.phase))
    return gm
