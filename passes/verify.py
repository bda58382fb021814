"""Forward and backward graphs: prove what every pass before promised.

Every collective has exactly one wait; nothing else reads its result; weights that are resharded
are not among the tensors the forward saves. `collective_sequence` states what ranks compare.
"""

from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext, is_all_gather, is_collective, is_wait, spec_of_node
from shardc.runtime.unshard import UnshardSpec


def verify(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Raise AssertionError if `gm` breaks an invariant."""
    for node in gm.graph.nodes:
        if is_collective(node) and spec_of_node(node) is not None:
            users = list(node.users)
            assert len(users) == 1 and is_wait(users[0]), (
                f"{node.name} must be read by one wait only, is read by {users}"
            )
    if ctx.phase == "forward":
        _no_resharded_weight_is_saved(gm)
    return gm


def _no_resharded_weight_is_saved(gm: GraphModule) -> None:
    saved = set(gm.graph.output_node().all_input_nodes)
    for node in gm.graph.nodes:
        spec = spec_of_node(node) if is_all_gather(node) else None
        if spec is not None and spec.reshard_after_forward:
            kept = saved & {node, *node.users}
            assert not kept, f"resharded bucket {node.name} is saved for backward as {kept}"


def collective_sequence(gm: GraphModule) -> list[str]:
    """One line per collective of ours, in graph order: what ranks must have in common."""
    return [_line(node) for node in gm.graph.nodes if is_collective(node) and spec_of_node(node)]


def _line(node: Node) -> str:
    spec = spec_of_node(node)
    assert spec is not None
    return f"{getattr(node.target, '_opname', node.target)} of {describe_spec(spec)}"


def describe_spec(spec: UnshardSpec) -> str:
    """A bucket in one line, for the error that names what differs between ranks."""
    shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in spec.shapes)
    return f"{spec.numel} {spec.dtype} over {spec.world_size} ranks ({shapes})"
