"""Forward and backward graph: save chosen values on the host, and load them in the backward.

    forward:   ... x ... return y, x
    becomes:   ... x; host = save_on_host(x); x_on_host = wait(host, x) ... return y, x_on_host
    backward:  x ... f(x)
    becomes:   x_on_host ... value = load_from_host(x_on_host); x = wait(value); f(x)

The pass edits both graphs right after the partitioner: the saved outputs of the forward are the
inputs of the backward. `schedule` moves the copies behind compute.
"""

import torch
from torch.fx import Graph, GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import (
    COPIED_FOR,
    LOAD,
    SAVE,
    WAIT_SAVED,
    c10d,
    note,
    returned_and_saved,
)

_SUFFIX = "_on_host"


@contract(needs="tags")
def offload_saved(forward: GraphModule, backward: GraphModule, ctx: PassContext) -> None:
    """Save the values named in `ctx.kept.offloaded` on the host."""
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    returned, saved = returned_and_saved(forward, ctx.results)
    for node in sorted(set(saved).difference(returned)):
        unit = ctx.kept.offloaded.get(node.name)
        if unit is not None and node.name in given:
            host = _save(forward.graph, node, unit)
            _load(backward.graph, given[node.name], host, node.meta["val"].device, unit)


def _save(graph: Graph, node: Node, unit: str) -> Node:
    """Copy a saved value to the host right after its node; return the copy, now saved instead."""
    output = graph.output_node()
    with graph.inserting_after(node):
        start = graph.call_function(SAVE, (node,))
    with graph.inserting_after(start):
        wait = graph.create_node(
            "call_function", WAIT_SAVED, (start, node), name=node.name + _SUFFIX
        )
    for each in (start, wait):
        each.meta = {key: node.meta[key] for key in _FACTS if key in node.meta}
        each.meta["val"] = SAVE(node.meta["val"])
    note(start, COPIED_FOR, unit)
    output.replace_input_with(node, wait)
    return wait


def _load(graph: Graph, given: Node, host: Node, device: torch.device, unit: str) -> None:
    """Give a backward the copy on the host, and load it before the first reader of the value."""
    with graph.inserting_before(given):
        saved = graph.placeholder(host.name)
    saved.meta = {**given.meta, "val": host.meta["val"]}
    first = min(given.users)
    with graph.inserting_before(first):
        start = graph.call_function(LOAD, (saved, device))
        wait = graph.call_function(c10d.wait_tensor.default, (start,))
    for each in (start, wait):
        each.meta = {key: given.meta[key] for key in _FACTS if key in given.meta}
        each.meta["val"] = given.meta["val"]
    note(start, COPIED_FOR, unit)
    given.replace_all_uses_with(wait)
    graph.erase_node(given)


_FACTS = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "partitioner_tag")
"""The keys of a node's meta that its copies share."""
