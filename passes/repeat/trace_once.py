"""AOT autograd traces repeated calls of modules once.

    Dynamo graph:   h1 = block0(h0); h2 = block1(h1); ...      runs of nodes
    traced:         h1 = call("0", h0); h2 = call("1", h1)     one node each; the body once, apart
    joint graph:    block0; block1; ...; block1 backward; block0 backward     as if traced each

`call_once` replaces the runs before AOT autograd looks for the graph on disk; if it is not there,
`Calls.trace` traces the bodies. `Calls.inline` puts a body's nodes in the place of each call, in
the forward and in the backward, before any pass of shardc looks at the joint graph. So passes,
schedules and reports see the same graph as without bodies. To trace an op takes milliseconds, to
copy a node takes microseconds. Dynamo's own trace is as long as before.

Inductor's passes over joint graphs see a body once, and then the graph with calls in it. If that
makes a difference for a body, the body is inlined before these passes (`JointBody.finished`). If a
body writes to its operands, its runs of nodes go back into the graph.
"""

import functools
import hashlib
import itertools
import logging
import operator
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from shardc.passes.repeat.repeated_calls import Call, find_calls
from shardc.runtime import compat
from shardc.runtime.layout.spec import Moved

log = logging.getLogger("shardc.passes")
aten = torch.ops.aten


@dataclass(eq=False)
class _Kind:
    """Calls of equal text: the `first` is traced.

    Attributes:
        nodes: the nodes of `first`, as a graph of their own.
        inductor: Inductor's settings, if Inductor lowers the graph.
        body: the joint graph that AOT autograd traced; None before the trace, or without one.
    """

    first: Call
    nodes: Graph
    inductor: Mapping[str, object] | None
    body: compat.JointBody | None = None

    def trace(self) -> None:
        """Trace the body; keep it only if it has a tangent for each result with a gradient."""
        given = self.nodes.find_nodes(op="placeholder")
        operands = [compat.like(node.meta["example_value"]) for node in given]
        body = compat.trace_body(GraphModule({}, self.nodes), operands, self.inductor)
        self.body = body if body and body.tangents == sum(_trained(self.first)) else None


@dataclass(eq=False)
class _Traced:
    """A call with its nodes, as a graph of their own, and the calls of equal text."""

    call: Call
    nodes: Graph
    kind: _Kind

    @property
    def body(self) -> compat.JointBody:
        """The joint graph that AOT autograd traced of the first call."""
        assert self.kind.body is not None
        return self.kind.body

    @functools.cached_property
    def buckets(self) -> dict[Moved, Moved]:
        """The bucket of this call for each bucket of the body."""
        return dict(zip(self.kind.first.buckets, self.call.buckets, strict=True))

    @functools.cached_property
    def modules(self) -> dict[tuple[Any, ...], Any]:
        """The module of this call for each module of the body, by the stacks of their nodes."""
        stacks = (
            [node.meta.get("nn_module_stack") for node in call.nodes]
            for call in (self.kind.first, self.call)
        )
        pairs = zip(*stacks, strict=True)
        return {tuple(body.items()): own for body, own in pairs if body and own}


class Calls(dict[str, _Traced]):
    """The calls of bodies in one Dynamo graph, by name; its joint graph inlines them."""

    def trace(self, gm: GraphModule) -> None:
        """Trace a body of each kind; a call without a body becomes a run of nodes again in `gm`."""
        for kind in dict.fromkeys(each.kind for each in self.values()):
            kind.trace()
        for node in gm.graph.find_nodes(op="call_function", target=_call):
            name = node.args[0]
            if self[name].kind.body is None:
                _put_back(gm.graph, node, self.pop(name))
        gm.recompile()
        log.debug("%d calls of modules are traced once each kind", len(self))

    def inline_unfinished(self, gm: GraphModule) -> None:
        """`inline` the bodies that Inductor's passes have not run over."""
        Calls((name, each) for name, each in self.items() if not each.body.finished).inline(gm)

    def inline(self, gm: GraphModule) -> None:
        """Replace the calls in `gm`, a joint graph or a graph for inference, by their bodies."""
        inlined: dict[str, dict[Node, Any]] = {}
        memories: dict[str, compat.Memories] = {}
        for node in list(gm.graph.nodes):
            name = str(node.args[0]) if node.target in (_call, _call_backward) else ""
            if name not in self:
                continue
            traced, known = self[name], inlined.setdefault(name, {})
            memory = memories.setdefault(name, compat.Memories())
            if node.target is _call:
                _inline_forward(gm.graph, node, traced, known, memory)
            else:
                _inline_backward(gm.graph, node, traced, known, memory)
        if inlined:
            gm.graph.eliminate_dead_code()
            gm.recompile()
            self.clear()


_traced: weakref.WeakValueDictionary[str, _Traced] = weakref.WeakValueDictionary()
"""The calls of all graphs that are compiled now, by name: the ops get only the name."""


# -- before the trace ----------------------------------------------------------------------------


def call_once(gm: GraphModule, inductor: Mapping[str, object] | None) -> Calls:
    """Replace repeated calls of modules in a Dynamo graph, in place; empty if none repeat.

    `inductor` has Inductor's settings, if Inductor lowers the graph.
    """
    calls = Calls()
    settings = None if inductor is None else compat.settings_of_bodies(inductor)
    twins: dict[Node, Node] = {}
    groups = find_calls(gm)
    apart = [[_as_graph(call) for call in group] for group in groups]  # before a call is replaced
    for group, graphs in zip(groups, apart, strict=True):
        kind = _Kind(group[0], graphs[0], settings)
        for call, nodes in zip(group, graphs, strict=True):
            name = f"{len(calls)} {hashlib.sha256(call.text.encode()).hexdigest()}"
            calls[name] = _traced[name] = _Traced(call, nodes, kind)
            twins |= _replace(gm.graph, call, name, twins)
    return calls


def _trained(call: Call) -> list[bool]:
    """For each result of a call, whether it requires a gradient."""
    return [result.meta["example_value"].requires_grad for result in call.results]


def _as_graph(call: Call) -> Graph:
    """A call as a graph of its own: operands in, results out."""
    graph = Graph()
    inner: dict[Node, Node] = {}
    for index, operand in enumerate(call.operands):
        inner[operand] = graph.placeholder(f"operand_{index}")
        inner[operand].meta = {"example_value": operand.meta["example_value"]}
    for node in call.nodes:
        inner[node] = graph.node_copy(node, inner.__getitem__)
    graph.output(tuple(inner[result] for result in call.results))
    return graph


def _put_back(graph: Graph, node: Node, traced: _Traced) -> None:
    """Replace a call by its nodes."""
    given = cast(Sequence[Any], node.args[1])
    known = dict(zip(traced.nodes.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        for inner in traced.nodes.nodes:
            if inner.op not in ("placeholder", "output"):
                known[inner] = graph.node_copy(inner, known.__getitem__)
    results: Any = traced.nodes.output_node().args[0]
    _take_items(graph, node, [known[result] for result in results])


def _replace(graph: Graph, call: Call, name: str, twins: Mapping[Node, Node]) -> dict[Node, Node]:
    """Replace the nodes of a call by a call of the body; return the replacement of each result.

    `twins` gives the replacements of results of earlier calls.
    """
    operands = [twins.get(operand, operand) for operand in call.operands]
    own: dict[Node, Node] = {}
    with graph.inserting_before(call.nodes[0]):
        results = graph.call_function(_call, (name, operands))
        for index, result in enumerate(call.results):
            own[result] = graph.call_function(operator.getitem, (results, index))
            own[result].meta = dict(result.meta)
    for result, item in own.items():
        result.replace_all_uses_with(item)
    for node in reversed(call.nodes):
        graph.erase_node(node)
    return own


# -- in the joint graph --------------------------------------------------------------------------


def _inline_forward(
    graph: Graph, node: Node, traced: _Traced, known: dict[Node, Any], memory: compat.Memories
) -> None:
    body = traced.body
    inputs = body.graph.graph.find_nodes(op="placeholder")
    _give(inputs[: body.operands], node.args[1], known, memory)
    results = _outputs(body)[: body.results]
    _share(node, results, memory)
    _copy(graph, node, _forward(body), traced, known, memory)
    _take_items(graph, node, [known[result] for result in results])


def _inline_backward(
    graph: Graph, node: Node, traced: _Traced, known: dict[Node, Any], memory: compat.Memories
) -> None:
    body = traced.body
    inputs = body.graph.graph.find_nodes(op="placeholder")[body.operands :]
    with graph.inserting_before(node):
        tangents = [
            _as_traced(graph, tangent, wanted.meta["val"])
            for tangent, wanted in zip(node.args[1], inputs, strict=True)  # type: ignore[arg-type]
        ]
    _give(inputs, tangents, known, memory)
    rest = [each for each in _computed(body) if each not in known]
    gradients = [g for g in _outputs(body)[body.results :] if g is not None]
    _share(node, gradients, memory)
    _copy(graph, node, rest, traced, known, memory)
    _take_items(graph, node, [known[gradient] for gradient in gradients])


def _as_traced(graph: Graph, tangent: Any, wanted: Tensor) -> Node:
    """A tangent with the strides that the body was traced for; zeros if the tangent is None."""
    if tangent is None:
        made = graph.call_function(
            aten.full.default,
            (list(wanted.shape), 0),
            {"dtype": wanted.dtype, "device": wanted.device, "pin_memory": False},
        )
    elif tangent.meta["val"].stride() == wanted.stride():
        return cast(Node, tangent)
    else:
        strides = list(wanted.stride())
        empty = graph.call_function(
            aten.new_empty_strided.default, (tangent, wanted.shape, strides)
        )
        empty.meta["val"] = compat.Memories().copy(wanted)
        made = graph.call_function(aten.copy.default, (empty, tangent))
    made.meta["val"] = compat.Memories().copy(wanted)
    return made


def _give(
    inputs: Sequence[Node], given: Any, known: dict[Node, Any], memory: compat.Memories
) -> None:
    for inner, outer in zip(inputs, given, strict=True):
        known[inner] = outer
        memory.stand_for(inner.meta["val"], outer.meta["val"])


def _share(node: Node, results: Sequence[Node], memory: compat.Memories) -> None:
    """Let `results` share the storages of the call's items: nodes outside may be views of these."""
    for item in node.users:
        result, value = results[cast(int, item.args[1])].meta["val"], item.meta["val"]
        if result.untyped_storage().nbytes() == value.untyped_storage().nbytes():
            memory.stand_for(result, value)


def _outputs(body: compat.JointBody) -> Any:
    return body.graph.graph.output_node().args[0]


def _forward(body: compat.JointBody) -> list[Node]:
    """The nodes up to the last result, without the nodes that need a tangent."""
    late = set(body.graph.graph.find_nodes(op="placeholder")[body.operands :])
    nodes = _computed(body)
    last = max(nodes.index(result) for result in _outputs(body)[: body.results])
    for node in nodes[: last + 1]:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return [node for node in nodes[: last + 1] if node not in late]


def _computed(body: compat.JointBody) -> list[Node]:
    return [n for n in body.graph.graph.nodes if n.op not in ("placeholder", "output")]


def _copy(
    graph: Graph,
    before: Node,
    nodes: Sequence[Node],
    traced: _Traced,
    known: dict[Node, Any],
    memory: compat.Memories,
) -> None:
    """Copy the body's `nodes` to the place of a call, as if they were traced there."""
    with graph.inserting_before(before):
        for node in nodes:
            copied = known[node] = graph.node_copy(node, known.__getitem__)
            copied.meta = _meta(node, traced)
            value = node.meta.get("val")
            if value is not None:
                plain = isinstance(value, Tensor)
                copied.meta["val"] = memory.copy(value) if plain else tree_map(memory.copy, value)


def _meta(node: Node, traced: _Traced) -> dict[str, Any]:
    """The meta of a body's node, with the call's own modules and buckets."""
    meta = dict(node.meta)
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        if meta.get(key):
            meta[key] = traced.modules.get(tuple(meta[key].items()), meta[key])
    custom = meta.get("custom") or {}
    if "shardc" in custom:
        own = tuple(traced.buckets.get(bucket, bucket) for bucket in custom["shardc"])
        meta["custom"] = {**custom, "shardc": own}
    return meta


def _take_items(graph: Graph, node: Node, items: Sequence[Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(items[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


# -- the ops -------------------------------------------------------------------------------------

_library = torch.library.Library("shardc", "FRAGMENT")
_library.define("call(str name, Tensor[] operands) -> Tensor[]")
_library.define("call_backward(str name, Tensor?[] tangents) -> Tensor[]")
_call, _call_backward = torch.ops.shardc.call.default, torch.ops.shardc.call_backward.default


def _made(nodes: Sequence[Any]) -> list[Tensor]:
    values = [node.meta["val"] for node in nodes if node is not None]
    return [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values
    ]


@torch.library.register_fake("shardc::call", lib=_library)
def _(name: str, operands: Sequence[Tensor]) -> list[Tensor]:
    body = _traced[name].body
    return _made(_outputs(body)[: body.results])


@torch.library.register_fake("shardc::call_backward", lib=_library)
def _(name: str, tangents: Sequence[Tensor | None]) -> list[Tensor]:
    body = _traced[name].body
    return _made(_outputs(body)[body.results :])


def _note(ctx: Any, inputs: tuple[str, list[Tensor]], output: list[Tensor]) -> None:
    ctx.name = inputs[0]
    ctx.set_materialize_grads(False)
    trained = _trained(_traced[ctx.name].call)
    ctx.mark_non_differentiable(*itertools.compress(output, map(operator.not_, trained)))


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    traced = _traced[ctx.name]
    tangents = list(itertools.compress(grads, _trained(traced.call)))
    given = iter(_call_backward(ctx.name, tangents))
    body = traced.body
    return None, [None if g is None else next(given) for g in _outputs(body)[body.results :]]


torch.library.register_autograd("shardc::call", _backward, setup_context=_note, lib=_library)
