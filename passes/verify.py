"""Forward and backward graphs: prove what every pass before promised.

Every collective has exactly one wait for each bucket it moves; nothing else reads its result;
weights that are resharded are not among the tensors the forward saves. `collective_sequence`
states what ranks compare.
"""

from torch.fx import GraphModule

from shardc.passes.context import (
    PassContext,
    describe,
    is_all_gather,
    is_collective,
    is_wait,
    results_of,
    spec_of_node,
    specs_of,
)
from shardc.runtime.progress import label_of


def verify(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Raise AssertionError if `gm` breaks an invariant."""
    for node in gm.graph.nodes:
        if is_collective(node) and spec_of_node(node) is not None:
            for result in results_of(node):
                users = list(result.users)
                assert len(users) == 1 and is_wait(users[0]), (
                    f"{result.name} must be read by one wait only, is read by {users}"
                )
    if ctx.phase == "forward":
        _no_resharded_weight_is_saved(gm, ctx)
    return gm


def _no_resharded_weight_is_saved(gm: GraphModule, ctx: PassContext) -> None:
    saved = set(gm.graph.output_node().all_input_nodes)
    for node in gm.graph.nodes:
        if is_all_gather(node) and specs_of(node) and ctx.reshards(node):
            kept = saved & {reader for result in results_of(node) for reader in result.users}
            assert not kept, f"resharded bucket {node.name} is saved for backward as {kept}"


def collective_sequence(gm: GraphModule) -> list[str]:
    """One line per collective of ours, in graph order: what ranks must have in common."""
    ours = [node for node in gm.graph.nodes if is_collective(node) and specs_of(node)]
    labels = [label_of(node) for node in ours]
    return [
        describe(node, label.buckets if label else ())
        for node, label in zip(ours, labels, strict=True)
    ]
