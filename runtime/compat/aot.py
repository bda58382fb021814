"""AOT autograd: fake tensors, symbolic sizes, the partitioner, the formulas of its ops."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen
from torch.fx.node import Argument

from shardc.runtime.compat.dynamo import is_traced

_T = TypeVar("_T")


def copied_graph(graph: Graph) -> Graph:
    """A copy of a graph, with the same description of its inputs and outputs (2.13).

    `copy.deepcopy` alone would copy the description, too, and torch would warn: the description's
    leaves are of a deprecated class.
    """
    codegen = graph._codegen
    graph.set_codegen(CodeGen())
    try:
        copied = copy.deepcopy(graph)
    finally:
        graph.set_codegen(codegen)
    copied.set_codegen(copy.copy(codegen))
    return copied


def compiled_when_called(root: GraphModule, graph: Graph) -> GraphModule:
    """A module of a graph; its Python code is made when the module is called or the code read."""
    return _LazyGraphModule(root, graph)


@contextmanager
def compiling_when_called() -> Iterator[None]:
    """Inside, modules of graphs make their Python code when they are called or the code is read."""
    make, read = GraphModule.recompile, GraphModule.code

    def recompile(gm: GraphModule) -> None:
        kind = type(gm)  # of this module alone

        def forward(module: GraphModule, *args: object, **kwargs: object) -> object:
            make(module)
            return kind.forward(module, *args, **kwargs)

        kind.forward = forward

    def code(gm: GraphModule) -> str:
        make(gm)
        return str(read.__get__(gm))

    with (
        mock.patch.object(GraphModule, "recompile", recompile),
        mock.patch.object(GraphModule, "code", property(code)),
    ):
        yield


def size_expr(size: object) -> Any:
    """A size as a number, or as the sympy expression behind a SymInt."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_number else expr
    return size


def symbol_values(size: object) -> dict[Any, int]:
    """The values of the symbols in the trace that a SymInt comes from; empty for other sizes.

    Only whole numbers count: a float is left out, and so is the length of a jagged tensor's dim.
    """
    if not isinstance(size, torch.SymInt):
        return {}
    env = size.node.shape_env
    known = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
    return {symbol: int(value) for symbol, value in known.items() if value.is_Integer}


def flop_formulas() -> dict[object, Callable[..., object]]:
    """torch's formulas of FLOPs, by op, with the CPU's attention added."""
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    name, cpu = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"
    formulas = dict(flop_registry)
    for ending, before in (("", 0), ("_backward", 1)):
        kinds = (name, *(name.replace("flash", other) for other in ("efficient", "cudnn")))
        for op in (getattr(aten, f"{kind}{ending}") for kind in kinds):
            formulas[op] = _with_equal_heads(formulas[op], before)
        formulas[getattr(aten, f"{cpu}{ending}")] = formulas[getattr(aten, f"{name}{ending}")]
    return formulas


def _with_equal_heads(formula: Callable[..., object], before: int) -> Callable[..., object]:
    """The FLOP formula of an attention, also for fewer heads of keys and values (refused by 2.11).

    Args:
        formula: takes (query, key, value, ...), tensors or shapes, after `before` other arguments.
        before: the number of arguments before the query.
    """

    def flops(*args: Any, **kwargs: object) -> object:
        query, *others = (tuple(each.shape) for each in args[before : before + 3])
        wide = [(*shape[:1], query[1], *shape[2:]) for shape in others]
        return formula(*args[:before], query, *wide, *args[before + 3 :], **kwargs)

    return flops


def place_of_random_op(target: object) -> int | None:
    """The position of the random op among the arguments of a call that saves or sets its state.

    None for other calls. The partitioner makes such calls for ops that are recomputed and may draw
    random numbers.
    """
    ops = torch.ops.higher_order
    for name, place in (("run_and_save_rng_state", 0), ("run_with_rng_state", 1),
                        ("graphsafe_run_with_rng_state", 0)):  # fmt: skip
        if target is getattr(ops, name, None):
            return place
    return None


def op_arguments(node: torch.fx.Node) -> dict[str, Argument]:
    """The arguments of a node that calls an op, by name; empty for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def argument_of(
    op: object, args: Sequence[Argument], kwargs: Mapping[str, Argument], name: str
) -> Argument:
    """An argument of a call of an op, or its default; None if the op has no such argument."""
    known = op._schema.arguments if isinstance(op, torch._ops.OpOverload) else ()
    for place, argument in enumerate(known):
        if argument.name == name:
            given = args[place] if place < len(args) else argument.default_value
            return kwargs.get(name, given)
    return None


@contextmanager
def fake_tensors(device_type: str = "cpu") -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, tensors have shapes only; gives a function that makes one like a tensor, on a device.

    The function raises NotImplementedError for a nested tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(tensor: Tensor) -> Tensor:
        if tensor.is_nested:
            raise NotImplementedError(
                "a nested tensor has no shape without its values: give one padded to equal "
                "lengths, or run a step on ranks and see shardc.report(model)"
            )
        return torch.empty_like(tensor, device=device_type)

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield fake


def fake_tensors_of_trace() -> AbstractContextManager[object]:
    """Inside, new tensors are fake tensors of the compile under way.

    AOT autograd takes such a tensor unchanged. A real tensor for which Dynamo has no source would
    get symbols for sizes, and a guard on the symbols fails: nothing gives their values at run time.
    """
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    return nullcontext() if mode is None else mode


def is_body(joint: GraphModule) -> bool:
    """Whether a joint graph is the body of a higher-order op, and not a graph to partition.

    AOT autograd describes the outputs of its own graphs. It partitions compile regions by
    themselves, and names their tangents.
    """
    inputs = joint.graph.find_nodes(op="placeholder")
    has_tangents = any(str(node.target).startswith("tangents") for node in inputs)
    return "desc" not in joint.graph.output_node().meta and not has_tangents


def inputs_of_joint(joint: GraphModule) -> dict[int, torch.fx.Node]:
    """Inputs of a joint graph, by their number in the Dynamo graph (2.13).

    AOT autograd takes a tensor subclass apart: for such an input, the first of its inner tensors.
    """
    found: dict[int, torch.fx.Node] = {}
    for place, node in enumerate(joint.graph.find_nodes(op="placeholder")):
        described = node.meta.get("desc")
        while hasattr(described, "base"):
            described = described.base
        found.setdefault(place if described is None else getattr(described, "idx", -1), node)
    return found


def results_of_joint(joint: GraphModule) -> int | None:
    """The number of outputs of a joint graph that are results of its forward (2.13).

    The results come before the gradients. None where the graph has no tangents. The inputs do not
    give the number: a subclass that is taken apart has several inputs, and fewer gradients.
    """
    inputs, output = joint.graph.find_nodes(op="placeholder"), joint.graph.output_node()
    tangents = sum(str(node.target).startswith("tangents") for node in inputs)
    outputs, described = output.args[0], output.meta.get("desc")
    assert isinstance(outputs, (list, tuple))
    if not tangents:
        return None
    if described is None:
        return len(outputs) - (len(inputs) - tangents)
    # An output in the place of a missing gradient has no description.
    ends = (place for place, each in enumerate(described) if each is None or each.is_grad())
    return next(ends, len(outputs))


def compile_aot(
    gm: GraphModule,
    example_inputs: Sequence[object],
    forward: Callable[..., object],
    backward: Callable[..., object],
    partition: Callable[..., object],
) -> Callable[..., object]:
    """Compile a Dynamo graph by AOT autograd, with our compilers and no decompositions.

    The backward is compiled with its forward. AOT autograd does so anyway for dynamic sizes, and a
    rank may have dynamic sizes where other ranks have none.
    """
    from torch._dynamo.backends.common import aot_autograd

    cache = functorch_config().patch(enable_autograd_cache=False)
    with cache, compiling_backward_at_once(), keeping_reductions(), writing_no_graphs():
        return aot_autograd(
            fw_compiler=donating_nothing(forward),
            bw_compiler=backward,
            inference_compiler=forward,
            partition_fn=partition,
            decompositions={},
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


def donating_nothing(compile_graph: Callable[..., _T]) -> Callable[..., _T]:
    """`compile_graph` for forwards; no backward writes into tensors that the forward saved.

    A backward that writes into saved tensors can run only once: AOT autograd then refuses
    `retain_graph=True`. 2.11 to 2.15 refuse it also where the setting `donated_buffer` was off
    during the compile and is on later.
    """

    def compiled(*args: object, **kwargs: object) -> _T:
        context = torch._guards.TracingContext.try_get()
        donated = context and context.fw_metadata and context.fw_metadata.bw_donated_idxs
        if donated:
            donated.clear()
        return compile_graph(*args, **kwargs)

    return compiled


def min_cut_partition(
    joint: GraphModule, *args: Any, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """Cut a joint graph in two, saving as little as possible."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with giving_states_where_drawn():
        return min_cut_rematerialization_partition(joint, *args, **kwargs)


def giving_states_where_drawn() -> AbstractContextManager[object]:
    """Inside, a partitioner adds no random state to ops that draw no random numbers.

    A partitioner wraps a recomputed op that may draw random numbers: a call of its own runs the op
    with the random state of the op's first run. It would wrap an attention without dropout, too,
    and nothing could be fused or folded with the call.
    """
    from torch._functorch import partitioners

    give_states = partitioners.functionalize_rng_ops

    def where_drawn(
        joint: GraphModule, forward: GraphModule, backward: GraphModule, sizes: int
    ) -> tuple[GraphModule, GraphModule]:
        tagged = [n for n in joint.graph.nodes if "recompute" in n.meta and drops_nothing(n)]
        tags = {node: node.meta.pop("recompute") for node in tagged}
        parts = give_states(joint, forward, backward, sizes)
        for node, tag in tags.items():
            node.meta["recompute"] = tag
        return parts

    return mock.patch.object(partitioners, "functionalize_rng_ops", where_drawn)


def drops_nothing(node: torch.fx.Node) -> bool:
    """Whether a node is an attention without dropout, which draws no random numbers."""
    return bool(argument_of(node.target, node.args, node.kwargs, "dropout_p") == 0.0)


def compiling_backward_at_once() -> AbstractContextManager[object]:
    """Inside, AOT autograd compiles a backward with its forward."""
    return functorch_config().patch(force_non_lazy_backward_lowering=True)


def keeping_reductions() -> AbstractContextManager[object]:
    """Inside, AOT autograd does not merge reductions of equal gradients.

    Parameters of two buckets may have equal gradients, each gradient with storage of its own. A
    user's own reduction may be an all-to-all.
    """
    from torch._functorch import compile_utils

    theirs, ours = torch.ops._c10d_functional, torch.ops.shardc
    reductions = [theirs.reduce_scatter_tensor, theirs.all_reduce, theirs.all_to_all_single]
    reductions += [ours.reduce_scatter, ours.custom_reduce_scatter]
    return mock.patch.object(compile_utils, "rand_ops", [*compile_utils.rand_ops, *reductions])


@contextmanager
def writing_no_graphs() -> Iterator[None]:
    """Inside, AOT autograd writes graphs as text only where somebody reads them.

    Otherwise it writes every graph as text, for its log and for the structured trace.
    """
    from torch._functorch._aot_autograd import graph_compile

    own = (getattr(graph_compile, f"{name}_log", None) for name in ("aot_joint", "aot_graphs"))
    names = ("_log_joint_graph", "_log_fw_bw_graphs")
    known = all(hasattr(graph_compile, name) for name in names)
    if not known or is_traced() or any(log and log.isEnabledFor(logging.INFO) for log in own):
        yield
        return
    no_text = (lambda *args: None, lambda *args: (None, None))
    with ExitStack() as stack:
        for name, nothing in zip(names, no_text, strict=True):
            stack.enter_context(mock.patch.object(graph_compile, name, nothing))
        yield


def functorch_config() -> Any:
    import torch._functorch.config

    return torch._functorch.config
