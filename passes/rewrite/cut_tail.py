"""Backward graph: cut off the waits for the last reductions, and the nodes behind them.

    before:  ... grad0 pack0 rs0 wait_rs1 wait_rs0            (outputs wait_rs1, wait_rs0)
    head:    ... grad0 pack0 rs0                              (outputs rs1, rs0, pack1, pack0)
    tail:    wait_rs1 wait_rs0                                (outputs wait_rs1, wait_rs0)

Inductor compiles the head, and the tail runs op by op. So a step that is one graph
(`shardc.compile_step`) sees these waits, and updates other parameters before them. The inputs of
reductions that are under way are outputs of the head: Inductor would use their memory again.
"""

from torch.fx import Graph, GraphModule, Node

from shardc.passes.nodes import (
    awaited_by,
    awaits_reduction,
    facts_of,
    is_view,
    is_wait,
    note,
    reach,
)
from shardc.runtime import compat


class Tail:
    """The end of a backward graph, which can be pickled.

    Attributes:
        module: its graph; the inputs are the outputs of the head.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __getstate__(self) -> tuple[GraphModule, list[dict[str, object]]]:
        return self.module, [facts_of(node) for node in self.module.graph.nodes]

    def __setstate__(self, state: tuple[GraphModule, list[dict[str, object]]]) -> None:
        self.module, facts = state
        for node, known in zip(self.module.graph.nodes, facts, strict=True):
            for key, value in known.items():
                note(node, key, value)


def cut_tail(gm: GraphModule) -> tuple[GraphModule, Tail | None]:
    """Cut a finished backward graph into its head and its tail; None where nothing is cut off."""
    tail = _tail_of(gm.graph)
    if not tail:
        return gm, None
    output = gm.graph.output_node()
    read = [operand for node in (*tail, output) for operand in node.all_input_nodes]
    sent = [x for node in filter(is_wait, tail) for x in awaited_by(node).all_input_nodes]
    passed = [node for node in dict.fromkeys([*read, *sent]) if node not in tail]

    head, end = Graph(), Graph()
    in_head: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        if node not in tail and node is not output:
            in_head[node] = head.node_copy(node, in_head.__getitem__)
    head.output(tuple(in_head[node] for node in passed)).meta = {
        **output.meta, compat.KEPT_OUTPUTS: list(range(len(passed))),
    }  # fmt: skip

    in_end = {node: end.placeholder(node.name) for node in passed}
    for node in passed:
        in_end[node].meta = {key: x for key, x in node.meta.items() if key == "val"}
    for node in tail:
        in_end[node] = end.node_copy(node, in_end.__getitem__)
    end.node_copy(output, in_end.__getitem__)

    cut = compat.compiled_when_called(gm, head)
    cut.meta.update(gm.meta)
    return cut, Tail(compat.compiled_when_called(gm, end))


def _tail_of(graph: Graph) -> dict[Node, None]:
    """The nodes from the first wait for a reduction on after which the graph computes nothing.

    Empty where messages are quantised: Inductor makes few kernels of the many ops that read one.
    """
    behind = reach(lambda node: node.users, *filter(awaits_reduction, graph.nodes))
    tail = list[Node]()
    for node in graph.nodes:
        if node in behind:
            tail.append(node)
        elif node.op == "call_function" and not is_view(node) and not is_wait(node):
            tail.clear()
    calls = [node for node in tail if node.op == "call_function"]
    waits = sum(map(is_wait, calls))
    computed = [node for node in calls if not (is_view(node) or is_wait(node))]
    return dict.fromkeys(calls if len(computed) <= MOST_COMPUTED * waits else ())


MOST_COMPUTED = 3
"""The most ops of a tail that compute, for each of its waits: a division, a cast, a sum."""
