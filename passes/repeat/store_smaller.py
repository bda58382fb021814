"""Forward and backward graphs: values that are smaller than what they are computed from are stored.

    before:  mm0; mm1; a = mm0 * mm1; mm2; wait; b = a * c      mm0 and mm1 are held for b
    after:   mm0; mm1; a = mm0 * mm1, stored; mm2; wait; b = a * c

Inductor computes an elementwise value where it is read, however late that is, and holds all that it
reads until then. With a memory budget, the smaller of the two is held. A value is marked where
Inductor is told to store it, so that plans know. Where blocks are folded it would be stored anyway:
a call gives it to the next one.

Left out: values that are read before the next collective. Their kernel would have one more result
for a short time.
"""

from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.repeat.near_readers import smaller_than_held
from shardc.passes.repeat.repeated_stretches import ends_no_stretch
from shardc.runtime import compat


@contract(needs="scheduled")
def store_smaller(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Mark the values of `gm` to store, if its memory is planned and Inductor runs it."""
    options = ctx.options
    if options is not None and options.fused and options.in_order:
        for node in smaller_than_held(gm, ends_no_stretch, in_order=True):
            compat.store_at_once(node)
    return gm
