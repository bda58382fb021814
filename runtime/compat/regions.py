"""Calls of equal modules that Dynamo traces once, and then puts into its graph as often as made."""

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

Forward: TypeAlias = Callable[..., object]
"""The `forward` of a class of modules."""


def traces_regions_once() -> bool:
    """Whether Dynamo takes the graph of an equal call of a nested compile region (2.13 to 2.15)."""
    from torch._dynamo import config

    return hasattr(config, "inline_invoke_subgraph")


@contextmanager
def as_regions(classes: Iterable[type[nn.Module]]) -> Iterator[None]:
    """Inside, Dynamo traces a call of a module only where it has not traced an equal one.

    Equal means that every guard of the traced one holds: Dynamo compares what it read of the
    module, of its parameters and of its inputs. Such calls are regions in its graph, until
    `inline_regions`. (2.13 to 2.15)

    Args:
        classes: of the modules; those whose `forward` is no plain function are left out.
    """
    before: dict[type[nn.Module], Forward | None] = {}
    regions: dict[types.FunctionType, Forward] = {}
    try:
        for cls in classes:
            forward = cls.forward
            if isinstance(forward, types.FunctionType):
                if forward not in regions:
                    regions[forward] = _region(forward)
                before[cls] = vars(cls).get("forward")
                cls.forward = regions[forward]
        yield
    finally:
        for cls, own in before.items():
            if own is None:
                del cls.forward
            else:
                cls.forward = own


def _region(forward: types.FunctionType) -> Forward:
    """A copy of `forward` that is a region; torch marks the function that it is given."""
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
"""Different graphs that calls of one function may have; torch raises where there are more."""


@functools.cache
def _own() -> object:
    """The options by which regions of `as_regions` are known."""
    from torch._higher_order_ops.invoke_subgraph import NestedCompileRegionOptions

    return NestedCompileRegionOptions()


def inline_regions(gm: GraphModule) -> None:
    """Put the nodes of the regions of `as_regions` in the place of their calls (2.13 to 2.15).

    Each says the module that its call is of.

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
    """The meta of a node of a region; modules inside of the first call become those of its own."""
    meta = dict(node.meta)
    stack = meta.get("nn_module_stack")
    if stack:
        meta["nn_module_stack"] = {
            key: (own + path[len(first) :] if path.startswith(first) else path, kind)
            for key, (path, kind) in stack.items()
        }
    return meta
