"""Joint graphs of parts of a Dynamo graph, traced by AOT autograd as a whole graph is traced."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardc.runtime.compat.aot import functorch_config, keeping_reductions


@dataclass(frozen=True)
class JointBody:
    """The joint graph that AOT autograd traced of a part of a graph.

    Attributes:
        graph: takes operands, then tangents; returns results, then a gradient or None per operand.
        results: the number of results.
        operands: the number of operands.
        tangents: the number of tangents.
        finished: whether Inductor's passes over joint graphs have run.
    """

    graph: GraphModule
    results: int
    operands: int
    tangents: int
    finished: bool = False


class _Traced(Exception):
    """The joint graph is traced: AOT autograd has nothing more to do."""


def settings_of_bodies(given: Mapping[str, object]) -> dict[str, object]:
    """Settings for `trace_body`: the given ones, and the passes over joint graphs that are set now.

    The compile under way adds passes of its own later, before it traces bodies.
    """
    from torch._inductor import config

    return {name: getattr(config, name) for name in _JOINT_PASSES} | dict(given)


_JOINT_PASSES = ("joint_custom_pre_pass", "joint_custom_post_pass")


def trace_body(
    body: GraphModule, operands: Sequence[Tensor], settings: Mapping[str, object] | None
) -> JointBody | None:
    """The joint graph of `body`, or its forward where no operand requires a gradient.

    None where the joint graph has more inputs or outputs than `body`, or where results alias: then
    `body` writes to an operand, or returns an alias of an operand or of another result.

    Args:
        body: a graph with the ops of a Dynamo graph; returns a tuple of tensors.
        operands: tensors made by `like`.
        settings: from `settings_of_bodies` if Inductor will lower the graph; None for the eager
            executor. With settings, Inductor's decompositions apply, and its passes run over
            `body` before the trace. Its passes over joint graphs run after the trace, unless they
            would draw seeds or the user has passes of his own.
    """
    if settings is None:
        return _checked(_trace(body, operands, {}), body, operands)
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_pre_grad_passes
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(dict(settings)):
        body = _recursive_pre_grad_passes(body, operands)
        joint = _trace(body, operands, select_decomp_table())
        traced = _checked(joint, body, operands)
        own = config.joint_custom_pre_pass or config.joint_custom_post_pass
        if traced is None or own or _is_given_seeds(joint):
            return traced
        joint = _finish(joint)
    traced = _checked(joint, body, operands)
    return traced and replace(traced, finished=True)


def _trace(body: GraphModule, operands: Sequence[Tensor], table: Mapping[Any, Any]) -> GraphModule:
    """The joint graph of `body`, or its forward."""
    from torch._functorch.aot_autograd import aot_module_simplified

    found: list[GraphModule] = []

    def keep(graph: GraphModule, *args: object, **kwargs: object) -> Any:
        found.append(graph)
        raise _Traced

    stop: Any = keep
    mode = torch._guards.TracingContext.get().fake_mode
    context = torch._guards.tracing(torch._guards.TracingContext(mode))
    settings = functorch_config().patch(enable_autograd_cache=False)
    with context, settings, keeping_reductions(), suppress(_Traced):
        aot_module_simplified(
            body,
            list(operands),
            fw_compiler=stop,
            bw_compiler=stop,
            inference_compiler=stop,
            partition_fn=stop,
            decompositions=dict(table),
        )
    return found[0]


def _is_given_seeds(joint: GraphModule) -> bool:
    """Whether Inductor replaces random ops of the graph; one op draws all seeds of a graph."""
    aten = torch.ops.aten
    replaced = {aten.rand, aten.randn, aten.randint}
    return any(getattr(n.target, "overloadpacket", None) in replaced for n in joint.graph.nodes)


def _finish(joint: GraphModule) -> GraphModule:
    """Run Inductor's passes over joint graphs on one joint graph."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    first = next(iter(joint.graph.nodes)).meta["val"]
    return _recursive_joint_graph_passes(joint, input_device=first.device)


def _checked(joint: GraphModule, body: GraphModule, operands: Sequence[Tensor]) -> JointBody | None:
    """The joint graph of `body` if it only reads operands and returns new tensors; else None."""
    results = len(body.graph.output_node().args[0])  # type: ignore[arg-type]
    inputs = joint.graph.find_nodes(op="placeholder")
    outputs: Any = joint.graph.output_node().args[0]
    made = outputs[:results]
    trained = [t for t in operands if t.requires_grad]
    values = [node.meta.get("val") for node in made if isinstance(node, torch.fx.Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) != results:
        return None
    tangents = len(inputs) - len(operands)
    if tangents < 0 or len(outputs) != results + (len(operands) if trained and tangents else 0):
        return None
    given = {_memory(node.meta["val"]) for node in inputs[: len(operands)]}
    own = {_memory(value) for value in tensors}
    if len(own) != results or own & given:
        return None
    return JointBody(joint, results, len(operands), tangents)


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def like(value: Tensor) -> Tensor:
    """A new tensor without data for the trace under way, like `value`."""
    mode = torch._guards.TracingContext.get().fake_mode
    with mode or nullcontext():
        return torch.empty_strided(
            value.shape,
            value.stride(),
            dtype=value.dtype,
            device=value.device,
            requires_grad=value.requires_grad,
        )


def is_plain_fake(value: object) -> bool:
    """Whether a value of a trace is a strided tensor of known size, no subclass."""
    from torch._subclasses.fake_tensor import FakeTensor

    return (
        isinstance(value, FakeTensor)
        and type(value) in (FakeTensor, torch.nn.Parameter, torch.nn.Buffer)
        and value.layout == torch.strided
        and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    )


class Memories:
    """Copies of the values of a trace; two copies share a storage where their originals do."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def stand_for(self, value: Tensor, by: Tensor) -> None:
        """Copy later views of `value` as views of `by`, a tensor of the same size."""
        moved = _offset_bytes(by) - _offset_bytes(value)
        self._known[_memory(value)] = by.untyped_storage(), moved

    def copy(self, value: Any) -> Any:
        """A copy of one value."""
        from torch._subclasses.fake_tensor import FakeTensor

        if not isinstance(value, FakeTensor):
            return value
        key = _memory(value)
        if key not in self._known:
            size = value.untyped_storage().nbytes()
            self._known[key] = torch.UntypedStorage(size, device="meta"), 0
        storage, moved = self._known[key]
        offset = value.storage_offset() + moved // value.element_size()
        with torch._C._DisableTorchDispatch():
            inner = torch.empty(0, dtype=value.dtype, device="meta")
            inner.set_(storage, offset, value.shape, value.stride())
        return FakeTensor(value.fake_mode, inner, value.fake_device)


def _offset_bytes(value: Tensor) -> int:
    return int(value.storage_offset()) * value.element_size()
