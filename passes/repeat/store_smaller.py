"""Forward and backward graphs: store values that are smaller than their operands.

    before:  mm0; mm1; a = mm0 * mm1; mm2; wait; b = a * c      mm0 and mm1 are held for b
    after:   mm0; mm1; a = mm0 * mm1, stored; mm2; wait; b = a * c

Inductor computes an elementwise value at its reader, however late that is, and holds the operands
until then. With a memory budget, the pass marks a value that is smaller than its operands. Inductor
stores a marked value at once, and the plan of memory reads the mark. In folded blocks such a value
is stored anyway: a call gives it to the next call.

The pass leaves out values that are read before the next collective: their kernel would have one
more result for a short time.
"""

from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.repeat.near_readers import Places
from shardc.runtime import compat


@contract(needs="scheduled")
def store_smaller(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Mark the values of `gm` to store, if it has a memory budget and Inductor runs it."""
    options = ctx.options
    if options is not None and options.fused and options.in_order:
        for node in Places(gm, in_order=True).smaller_than_held():
            compat.store_at_once(node)
    return gm
