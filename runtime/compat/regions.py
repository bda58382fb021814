"""Calls of equal modules: Dynamo traces one call, and its graph gets the nodes for each call."""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeAlias, cast
from unittest import mock

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

Forward: TypeAlias = Callable[..., object]
"""The `forward` of a class of modules."""


def traces_regions_once() -> bool:
    """Whether Dynamo reuses the graph of an equal call of a compile region (2.13 to 2.15)."""
    from torch._dynamo import config

    return hasattr(config, "inline_invoke_subgraph")


@contextmanager
def as_regions(classes: Iterable[type[nn.Module]]) -> Iterator[None]:
    """Inside, Dynamo traces a call of a module only if it has traced no equal call (2.13 to 2.15).

    A call equals a traced call if every guard of the traced call holds: Dynamo compares the facts
    that it read of the module, of its parameters and of its inputs. Such calls are regions in
    Dynamo's graph, until `inline_regions`.

    Args:
        classes: classes of the modules; a class is left out if its `forward` is no plain function.
    """
    regions: dict[types.FunctionType, Forward] = {}
    with ExitStack() as stack:
        for cls in classes:
            forward = cls.forward
            if isinstance(forward, types.FunctionType):
                if forward not in regions:
                    regions[forward] = _region(forward)
                stack.enter_context(mock.patch.object(cls, "forward", regions[forward]))
        stack.enter_context(_quick_comparisons())
        yield


def _region(forward: types.FunctionType) -> Forward:
    """A copy of `forward` marked as a region; torch marks the given function itself."""
    from torch._higher_order_ops.invoke_subgraph import (
        NestedCompileRegionOptions,
        mark_compile_region,
    )

    copied = types.FunctionType(
        forward.__code__,
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    options = cast(NestedCompileRegionOptions, _own())
    return cast(Forward, mark_compile_region(copied, options, _MOST_KINDS))


_MOST_KINDS = 1024
"""The most graphs that the calls of one function may have; torch raises for more."""


@functools.cache
def _own() -> object:
    """The options that identify the regions of `as_regions`."""
    from torch._higher_order_ops.invoke_subgraph import NestedCompileRegionOptions

    return NestedCompileRegionOptions()


@contextmanager
def _quick_comparisons() -> Iterator[None]:
    """Inside, Dynamo compares the calls of regions with a tenth of the work (2.13 to 2.15).

    Dynamo interprets the Python of `pytree` to flatten the inputs of each call, and rewrites the
    whole path of each value that it compares. Here `pytree` runs, and a part of a path is rewritten
    once.
    """
    from torch import _guards
    from torch._dynamo.variables import invoke_subgraph
    from torch._dynamo.variables.base import VariableTracker
    from torch._guards import Source

    slow_fingerprint = invoke_subgraph.build_fingerprint_with_pytree
    slow_clone = _guards.ChainedSource.clone
    rewrite: Callable[[Source], Source] | None = None
    rewritten: dict[int, tuple[Source, Source]] = {}

    def fingerprint(
        tx: "InstructionTranslatorBase",
        args: Sequence[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> invoke_subgraph.InputFingerprint:
        inputs = [_content(arg) for arg in args], {k: _content(v) for k, v in kwargs.items()}
        leaves, spec = pytree.tree_flatten(inputs)
        tags = [invoke_subgraph.classify_vt(leaf) for leaf in leaves]
        tagged = [(tag, leaf) for tag, leaf in zip(tags, leaves, strict=True) if tag is not None]
        if len(tagged) < len(leaves):
            return slow_fingerprint(tx, args, kwargs)
        sources = [getattr(leaf, "source", None) for leaf in leaves]
        return invoke_subgraph.InputFingerprint(tagged, sources, treespec=spec)

    def clone(
        path: _guards.ChainedSource, transform_fn: Callable[[Source], Source] | None = None
    ) -> Source:
        nonlocal rewrite
        if transform_fn is not rewrite:
            rewrite = transform_fn
            rewritten.clear()
        if id(path) not in rewritten:
            rewritten[id(path)] = path, slow_clone(path, transform_fn)
        return rewritten[id(path)][1]

    with (
        mock.patch.object(invoke_subgraph, "build_fingerprint_with_pytree", fingerprint),
        mock.patch.object(_guards.ChainedSource, "clone", clone),
    ):
        yield


def _content(variable: "VariableTracker") -> object:
    """The tuple, list or dict behind Dynamo's variable; other variables are given back."""
    from torch._dynamo.variables import ConstDictVariable, ListVariable, TupleVariable

    kind = type(variable)
    if kind is TupleVariable:
        return tuple(_content(item) for item in cast(TupleVariable, variable).items)
    if kind is ListVariable:
        return [_content(item) for item in cast(ListVariable, variable).items]
    if kind is ConstDictVariable:
        items = cast(ConstDictVariable, variable)
        if items.user_cls is dict:
            return {k.vt.as_python_constant(): _content(v) for k, v in items.items.items()}
    return variable


def inline_regions(gm: GraphModule) -> None:
    """Replace the calls of the regions of `as_regions` by the regions' nodes (2.13 to 2.15).

    Each node names the module of its call.

    Raises:
        ValueError: a region has bodies of its own: checkpoints, or other regions.
    """
    for body in [each for each in gm.modules() if isinstance(each, GraphModule)]:
        prefixes: dict[str, str] = {}
        for node in body.graph.find_nodes(op="call_function", target=_INVOKE):
            name = str(node.args[1])
            region = getattr(body, str(cast(Node, node.args[0]).target))
            if region.meta.get("nested_region_config") is _own():
                _inline(body, node, region.graph, prefixes.setdefault(name, _path(node)))
        body.recompile()
    gm.delete_all_unused_submodules()


_INVOKE = torch.ops.higher_order.invoke_subgraph


def _inline(body: GraphModule, call: Node, region: torch.fx.Graph, first: str) -> None:
    inner: dict[Node, Argument] = dict(
        zip(region.find_nodes(op="placeholder"), call.args[2:], strict=True)
    )
    with body.graph.inserting_before(call):
        for node in region.nodes:
            if node.op == "get_attr":
                raise ValueError("a region has bodies of its own")
            if node.op not in ("placeholder", "output"):
                copied = inner[node] = body.graph.node_copy(node, inner.__getitem__)
                copied.meta = _meta(node, first, _path(call))
    results = cast(tuple[Node, ...], region.output_node().args[0])
    for user in list(call.users):
        user.replace_all_uses_with(cast(Node, inner[results[cast(int, user.args[1])]]))
        body.graph.erase_node(user)
    named = cast(Node, call.args[0])
    body.graph.erase_node(call)
    if not named.users:
        body.graph.erase_node(named)


def _path(node: Node) -> str:
    """The path of the innermost module that a node lies in."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(next(reversed(stack.values()))[0])


def _meta(node: Node, first: str, own: str) -> dict[str, object]:
    """The meta of a node of a region; module paths move from the first call (`first`) to `own`."""
    meta = dict(node.meta)
    stack = meta.get("nn_module_stack")
    if stack:
        meta["nn_module_stack"] = {
            key: (own + path[len(first) :] if path.startswith(first) else path, kind)
            for key, (path, kind) in stack.items()
        }
    return meta
