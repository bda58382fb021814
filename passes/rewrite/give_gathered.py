"""Dynamo graph: buckets that stay gathered for the next forward become results of the graph.

    before:  full = unshard(segment, moved); w = full[0]; return (loss,)
    after:   full = unshard(segment, moved); w = full[0]; whole = full[1]; return (loss, whole)

The bucket takes the result, and holds it until a backward may free it (`telling_buckets`). Without
the pass it would be gathered once more when its backward ends. A gather in the body of a
higher-order op gives nothing: the body is computed again, and its values are its own.
"""

import operator
from typing import Any, cast

import torch
from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.runtime.comm.unshard import unshard
from shardc.runtime.layout.spec import Moved

WHOLE = "shardc_whole"
"""The key in the meta of a result that is a whole bucket, for the input that is its segment."""


@contract(needs="gathers")
def give_gathered(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Give out each bucket with `UnshardSpec.kept` that `gm` gathers, behind all other results.

    A graph without gradients gives out none: no backward would free them.
    """
    if not torch.is_grad_enabled():
        return gm
    output = gm.graph.output_node()
    results: list[Any] = [*cast(tuple[object, ...], output.args[0])]
    for gather in gm.graph.find_nodes(op="call_function", target=unshard):
        moved = cast(Moved, gather.args[1])
        if not moved.spec.kept or moved.position < 0:
            continue
        with gm.graph.inserting_after(gather):
            whole = gm.graph.call_function(operator.getitem, (gather, len(moved.spec.shapes)), {})
        segment = gather.args[0].meta["example_value"]
        spec = moved.spec
        whole.meta = {
            **gather.meta,
            WHOLE: moved.position,
            "example_value": segment.new_empty(spec.numel, dtype=spec.compute_dtype).detach(),
        }
        results.append(whole)
    output.args = (tuple(results),)
    return gm


def given_by(gm: GraphModule) -> list[int]:
    """The inputs that are segments of the buckets that `gm` gives out, in order of the results."""
    results = cast(tuple[object, ...], gm.graph.output_node().args[0])
    metas = [getattr(result, "meta", {}) for result in results]
    return [meta[WHOLE] for meta in metas if WHOLE in meta]
