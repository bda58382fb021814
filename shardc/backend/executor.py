"""The eager executor runs an ATen graph op by op, and frees every value after its last use.

A graph that Inductor does not compile (by choice, for debugging, or after a failure) runs here.
Memory behaves as in eager PyTorch: inputs come in one list, and each is dropped after its last use.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardc.runtime import compat
from shardc.runtime.watch.entering import BoxedGraph
from shardc.runtime.watch.progress import label_of, progress

_UNLABELLED = nullcontext()


@dataclass(frozen=True, eq=False)
class BoxedCall:
    """The target of a node that calls a compiled graph, which frees its inputs while it runs.

    Attributes:
        run: the compiled graph.
        names: names of buckets, by the names in the compiled code.
        groups: the groups of its collectives.
    """

    run: BoxedGraph
    names: dict[str, str]
    groups: tuple[str, ...]
    __name__ = "compiled_graph"

    def __call__(self, inputs: list[object]) -> object:
        progress.next_names = self.names
        return self.run(inputs)


def eager_executor(gm: GraphModule) -> BoxedGraph:
    """A boxed callable that runs `gm`: it takes its inputs as one list and empties it."""
    nodes = [node for node in gm.graph.nodes if node.op != "placeholder"]
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    constants = {n: getattr(gm, str(n.target)) for n in nodes if n.op == "get_attr"}
    steps = [node for node in nodes if node.op == "call_function"]
    labels = {node: label for node in steps if (label := label_of(node)) is not None}
    last_use: dict[Node, list[Node]] = {}
    seen: set[Node] = set(gm.graph.output_node().all_input_nodes)
    for node in reversed([*placeholders, *steps]):
        if node not in seen:  # never read: freed as soon as it exists
            last_use.setdefault(node, []).append(node)
            seen.add(node)
        for operand in node.all_input_nodes:
            if operand not in seen and operand not in constants:
                seen.add(operand)
                last_use.setdefault(node, []).append(operand)
    unread = [node for node in placeholders if node in last_use]
    result = gm.graph.output_node().args[0]

    def run(inputs: list[object]) -> object:
        env: dict[Node, Any] = {**constants, **dict(zip(placeholders, inputs, strict=True))}
        inputs.clear()
        for node in unread:
            del env[node]
        look_up = env.__getitem__
        with compat.outside_selective_checkpoints():
            for node in steps:
                assert callable(node.target)
                if isinstance(node.target, BoxedCall):
                    given = list(map_arg(node.args[0], look_up))
                    for dead in last_use.get(node, ()):
                        del env[dead]
                    env[node] = node.target(given)
                    continue
                with labels.get(node, _UNLABELLED):
                    env[node] = node.target(
                        *map_arg(node.args, look_up), **map_arg(node.kwargs, look_up)
                    )
                for dead in last_use.get(node, ()):
                    del env[dead]
        return map_arg(result, look_up)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def shapes_only(gm: GraphModule) -> BoxedGraph:
    """A boxed callable that computes nothing: it returns the fake tensors of the trace."""
    results = gm.graph.output_node().args[0]

    def run(inputs: list[object]) -> object:
        inputs.clear()
        return map_arg(results, lambda node: node.meta["val"])

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
