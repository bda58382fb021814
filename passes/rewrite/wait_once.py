"""Forward and backward graphs: one wait for a gather that is read several times.

AOT autograd's CSE merges equal gathers; from torch 2.15 on, it leaves their waits apart.
"""

from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.nodes import is_all_gather, is_wait, our_collectives


@contract(needs="gathers", gives="one_wait")
def wait_once(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace all waits for a gather by the first."""
    for start in filter(is_all_gather, our_collectives(gm)):
        waits = sorted(filter(is_wait, start.users))
        for wait in waits[1:]:
            wait.replace_all_uses_with(waits[0])
            gm.graph.erase_node(wait)
    return gm
