"""The eager executor runs an ATen graph op by op, and frees every value after its last use.

A graph that Inductor does not compile (by choice, for debugging, or after a failure) runs here, as
one Python function with a line for each op, which tracebacks show. Memory behaves as in eager
PyTorch: inputs come in one list, and each is dropped after its last use.
"""

import builtins
import itertools
import linecache
import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from shardc.runtime import compat
from shardc.runtime.watch.entering import BoxedGraph
from shardc.runtime.watch.progress import label_of, progress


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
    source = _Source(gm)
    text, file = "".join(source.lines), f"<graph {next(_numbers)} of the eager executor>"
    exec(compile(text, file, "exec"), source.values)
    call: BoxedGraph = source.values.pop(source.name)
    linecache.cache[file] = len(text), None, source.lines, file
    weakref.finalize(call, linecache.cache.pop, file, None)

    def run(inputs: list[object]) -> object:
        with compat.outside_selective_checkpoints():
            return call(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


_numbers = itertools.count()


class _Source:
    """The source of a Python function that runs a graph.

    Attributes:
        lines: a function that takes the inputs in one list. Its locals are the values of nodes, by
            the names of the nodes.
        name: the name of the function.
        values: its globals: ops, labels, and constants that have no literal.
    """

    def __init__(self, gm: GraphModule) -> None:
        constants = gm.graph.find_nodes(op="get_attr")
        self.values: dict[str, Any] = {n.name: getattr(gm, str(n.target)) for n in constants}
        self._names: dict[int, str] = {}
        self._taken = {*dir(builtins), *(node.name for node in gm.graph.nodes)}
        self.name, inputs = self._new_name("run"), self._new_name("inputs")
        self._boxed = self._new_name("boxed")
        given = gm.graph.find_nodes(op="placeholder")
        steps = [node for node in gm.graph.nodes if node.op == "call_function"]
        output = gm.graph.output_node()
        dead = _dead_after([*given, *steps], {*constants, *output.all_input_nodes})
        lines = [f"[{', '.join(node.name for node in given)}] = {inputs}", f"{inputs}.clear()"]
        lines += [f"del {node.name}" for node in given if dead[node]]
        lines += (line for node in steps for line in self._lines_of(node, dead[node]))
        lines.append(f"return {self._text(output.args[0])}")
        self.lines = [f"def {self.name}({inputs}):\n", *(f" {line}\n" for line in lines)]

    def _lines_of(self, node: Node, dead: list[Node]) -> Iterator[str]:
        """The lines that run a node and free the values that are `dead` after it."""
        operands = [each.name for each in dead if each is not node]
        to_free = [f"del {', '.join(operands)}"] if operands else []
        args = [self._text(arg) for arg in node.args]
        if isinstance(node.target, BoxedCall):
            yield f"{self._boxed} = {args[0]}"
            yield from to_free  # the list alone holds them
            args, to_free = [self._boxed], []
        args += (f"{key}={self._text(value)}" for key, value in node.kwargs.items())
        label = label_of(node)
        scope = "" if label is None else f"with {self._global(label, 'label')}: "
        result = "" if node in dead else f"{node.name} = "
        op = self._global(node.target, f"op_{getattr(node.target, '__name__', '')}")
        yield f"{scope}{result}{op}({', '.join(args)})"
        yield from to_free

    def _text(self, value: object) -> str:
        """An expression for an argument."""
        if isinstance(value, Node):
            return value.name
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(each)}, ' for each in value)})"
        if isinstance(value, dict):
            items = (f"{self._text(key)}: {self._text(each)}" for key, each in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            return f"slice{self._text((value.start, value.stop, value.step))}"
        is_literal = type(value) in _LITERALS and (type(value) is not float or math.isfinite(value))
        return repr(value) if is_literal else self._global(value, type(value).__name__)

    def _global(self, value: object, hint: str) -> str:
        """The name of an object that has no literal."""
        if id(value) not in self._names:
            self._names[id(value)] = name = self._new_name(hint)
            self.values[name] = compat.without_python(value)
        return self._names[id(value)]

    def _new_name(self, hint: str) -> str:
        name = re.sub(r"\W", "_", hint)
        while name in self._taken:
            name = f"{name}_{len(self._taken)}"
        self._taken.add(name)
        return name


_LITERALS = (bool, int, float, str, type(None))


def _dead_after(nodes: list[Node], kept: set[Node]) -> dict[Node, list[Node]]:
    """The nodes that no later node reads, for each node; without those that are `kept`."""
    seen, dead = set(kept), {}
    for node in reversed(nodes):
        dead[node] = [each for each in (node, *node.all_input_nodes) if each not in seen]
        seen.update(dead[node])
    return dead


def shapes_only(gm: GraphModule) -> BoxedGraph:
    """A boxed callable that computes nothing: it returns the fake tensors of the trace."""
    results = gm.graph.output_node().args[0]

    def run(inputs: list[object]) -> object:
        inputs.clear()
        return map_arg(results, lambda node: node.meta["val"])

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
