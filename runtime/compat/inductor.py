"""Inductor: its lowering, its settings, its scheduler and the code it writes."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch.fx import GraphModule

from shardc.runtime.compat.aot import (
    compiling_backward_at_once,
    donating_nothing,
    giving_states_where_drawn,
    is_body,
    keeping_reductions,
    min_cut_partition,
    writing_no_graphs,
)
from shardc.runtime.compat.aot_cache import Compiled, Guest, aot_cache

LabelOf = Callable[[torch.fx.Node], object]
"""Gives a node the context in which it runs, or None."""

Output: TypeAlias = Any
"""A graph as Inductor compiled it; its class is another in each version of torch."""

Input = torch.Tensor | int | torch.SymInt | None
"""What a graph is traced with."""

Kernel: TypeAlias = Any
"""A node of Inductor's own graph."""


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Input],
    inner_compile: Callable[..., Output],
    patches: dict[str, object],
    cache: Guest | None = None,
) -> Compiled:
    """Inductor, with `inner_compile` lowering each partitioned graph.

    The backward is compiled together with its forward, on all ranks alike. AOT autograd's cache
    works through `cache`; without one it is off. A backward does not write into what the forward
    saved: with `retain_graph=True` the next one reads it.
    """
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    with (
        aot_cache(cache),
        compiling_backward_at_once(),
        giving_states_where_drawn(),
        keeping_reductions(),
        writing_no_graphs(),
    ):
        return inductor_compile_fx(  # type: ignore[return-value]
            gm,
            list(example_inputs),
            inner_compile=donating_nothing(inner_compile),
            config_patches=patches,
        )


def inductor_settings() -> list[str]:
    """The names of Inductor's settings, those that stand for others too."""
    from torch._inductor import config

    return list(config._config)  # type: ignore[attr-defined]


def mode_options(mode: str | None) -> dict[str, object]:
    """The Inductor settings behind `torch.compile(mode=...)`."""
    return dict(torch._inductor.list_mode_options(mode)) if mode else {}


def replays(given: Mapping[str, object], mode: str | None) -> bool:
    """Whether Inductor with these settings replays CUDA graphs."""
    from torch._inductor import config

    settings = {**mode_options(mode), **given}
    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


def cpp_compiler() -> str:
    """The C++ compiler that Inductor takes. RuntimeError where it finds none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def compile_fx_inner(
    gm: GraphModule,
    inputs: Sequence[Input],
    label_of: LabelOf,
    check: Callable[[torch.fx.Graph], None] | None = None,
    **kwargs: Any,
) -> Output:
    """Inductor's lowering of one graph, graph cache included.

    Collectives and waits stay in the order of the graph, and run in the context that `label_of`
    gives their nodes; its `repr` is code that makes it anew. Where a user's own passes change the
    graph, `check` is called on what they made of it.

    Inductor names an op that it cannot lower (2.11: also one that it calls as it is) with the texts
    of its operands, each with all that it is computed from: gigabytes behind 8 blocks. Here it
    leaves the operands out.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner as inner
    from torch._inductor.exc import OperatorIssue

    patches = {"_pre_fusion_custom_pass": _collectives_pass(gm, label_of)}
    late = "post_grad_custom_post_pass"
    if check is not None and (config.post_grad_custom_pre_pass or getattr(config, late)):
        patches[late] = _graph_pass(_passes(getattr(config, late)), check, "shardc: check")
    text = staticmethod(_operator_text)
    with config.patch(patches), mock.patch.object(OperatorIssue, "operator_str", text):
        return inner(gm, inputs, **kwargs)


def inductor_error() -> type[Exception]:
    """The class of what Inductor raises where it has no code."""
    from torch._inductor.exc import InductorError

    return InductorError


def _operator_text(target: object, args: object, kwargs: object) -> str:
    return f"  target: {target}"


def op_name(target: object) -> str | None:
    """The name of an op ("mine::double") that a node calls, its overload left out (2.13)."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return str(target.name()).partition(".")[0]


def module_of_op(name: str) -> str | None:
    """The module that made an op by `torch.library.custom_op`, or "" where it was made otherwise
    (2.13).

    None for the ops of torch and of shardc.
    """
    from torch._library.custom_ops import OPDEFS

    space = name.partition("::")[0]
    if name not in OPDEFS:
        return None if space in _SPACES or space.startswith("_") else ""
    module = str(OPDEFS[name]._init_fn.__module__)
    return None if module.split(".")[0] in ("torch", "shardc") else module


_SPACES = {"aten", "prims", "prim", "c10d", "c10d_functional", "shardc", "inductor", "quantized",
           "quantized_decomposed", "profiler", "rngprims", "fsdp", "symm_mem", "torchvision",
           "torchao", "higher_order", "dtensor", "streams", "flex_lib", "bucketing"}  # fmt: skip
"""Of ops that a script has without importing anything of the user's."""


def changed_inductor_settings() -> dict[str, Any]:
    """The settings of Inductor that differ from its defaults now."""
    from torch._inductor import config

    return dict(config._get_dict(skip_default=True))  # type: ignore[attr-defined]


def compile_alone(
    gm: GraphModule,
    inputs: Sequence[Input],
    label_of: LabelOf,
    settings: Mapping[str, object],
    arguments: Mapping[str, Any],
) -> Output:
    """`compile_fx_inner` with `settings`, outside of any compile."""
    from torch._inductor import config

    with config.patch(dict(settings)):
        return compile_fx_inner(gm, inputs, label_of, **arguments)


def generated_code(output: Output) -> tuple[str, str] | None:
    """The code that Inductor made of a graph: its path, which need not exist, and its text.

    None where it made none.
    """
    from torch._inductor.codecache import get_path

    source = getattr(output, "source_code", None)
    return (get_path(output.cache_key, "py")[2], source) if source else None


JOINT_PASS = "joint_custom_post_pass"
"""The setting of Inductor under which it takes a pass over joint graphs."""


def joint_pass(apply: Callable[[GraphModule], object], key: str, given: object = None) -> object:
    """`apply` as Inductor's `joint_custom_post_pass`, after those of the user.

    Those are `given`, or what is set in Inductor's configuration. `key` enters the key of its graph
    cache, as do theirs; one without a key turns the cache off. Inductor has passes run on bodies of
    higher-order ops as well (`score_mod` of flex_attention); `apply` gets whole graphs only.
    """
    from torch._inductor import config

    def on_module(graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        if not is_body(graph.owning_module):
            apply(graph.owning_module)

    return _graph_pass(_passes(given or getattr(config, JOINT_PASS)), on_module, key)


PARTITIONER = "custom_partitioner_fn"
"""The setting of Inductor under which it takes a partitioner."""


def partitioner(
    apply: Callable[[GraphModule, GraphModule], object], key: str, given: Any = None
) -> object:
    """A partitioner for Inductor that has `apply` edit the forward and the backward.

    It cuts as `given` does, or what is set in Inductor's configuration; else as torch does. `key`
    enters the key of the graph cache. Bodies of higher-order ops are cut, too; `apply` gets whole
    graphs only.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    cut = given or getattr(config, PARTITIONER) or min_cut_partition

    class Partitioner(CustomPartitionerFn):
        def __call__(
            self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[GraphModule, GraphModule]:
            nested = is_body(gm)
            forward, backward = cut(gm, joint_inputs, **kwargs)
            if not nested:
                apply(forward, backward)
            return forward, backward

        def uuid(self) -> str | None:
            own = cut.uuid() if isinstance(cut, CustomPartitionerFn) else "min cut"
            return f"{own}, {key}" if own else None

    return Partitioner()


def before_joint_passes(
    settings: dict[str, object], apply: Callable[[GraphModule], object], key: str = "shardc"
) -> None:
    """Add a function to Inductor's `settings` that is applied to joint graphs before any pass."""
    from torch._inductor import config

    name = "joint_custom_pre_pass"

    def on_module(graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        apply(graph.owning_module)

    later = _passes(settings.get(name) or getattr(config, name))
    settings[name] = _graph_pass((), on_module, key, later)


def _passes(setting: object) -> tuple[Any, ...]:
    """The passes in a setting of Inductor: none, one, or since 2.13 several."""
    if setting is None:
        return ()
    return tuple(setting) if isinstance(setting, (list, tuple)) else (setting,)


def _graph_pass(
    given: Sequence[Any],
    apply: Callable[[torch.fx.Graph], None],
    key: str,
    later: Sequence[Any] = (),
) -> object:
    """One pass of Inductor over a graph: those of the user, around `apply`."""
    from torch._inductor import custom_graph_pass
    from torch._inductor.custom_graph_pass import CustomGraphPass

    # 2.11 has no passes that are told whether the graph is for inference.
    aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)

    def run(steps: Sequence[Any], graph: torch.fx.Graph, is_inference: bool) -> None:
        for step in steps:
            tells = aware is not CustomGraphPass and isinstance(step, aware)
            step(graph, is_inference) if tells else step(graph)

    class Chain(aware):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
            run(given, graph, is_inference)
            apply(graph)
            run(later, graph, is_inference)

        def uuid(self) -> str | None:
            users = [*given, *later]
            keys = [step.uuid() if isinstance(step, CustomGraphPass) else None for step in users]
            return f"{keys}, {key}" if all(keys) else None

    return Chain()


def order_settings() -> dict[str, object]:
    """The settings with which Inductor keeps to what shardc plans.

    It runs the passes of shardc among its own over joint graphs, and leaves collectives as they are
    and where they are: with others it would merge them or move them, by what each rank measures.
    Some are missing in some versions.
    """
    from torch._inductor import config

    wanted: dict[str, object] = {
        "use_joint_graph_passes": True,
        "reorder_for_peak_memory": False,
        "reorder_for_compute_comm_overlap": False,
        "aten_distributed_optimizations.enable_overlap_scheduling": False,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
        "dedup_reduce_scatters": False,
        "_fuse_ddp_communication": False,
        "_post_fusion_custom_pass": None,
    }
    known = config._config  # type: ignore[attr-defined]
    return {name: value for name, value in wanted.items() if name in known}


def frugal_settings() -> dict[str, object]:
    """The settings with which Inductor frees what it has no use for at once.

    With others it may keep freed memory for a later value of the same size, as long as it believes
    that the peak is elsewhere; it does not know what calls and backends of collectives hold. With
    these, kernels on CPUs also stay where the graph has them (`_keep_between_calls`).
    """
    return {"allow_buffer_reuse": False}


def _collectives_pass(gm: GraphModule, label_of: LabelOf) -> object:
    """A pass of Inductor's scheduler for the collectives and waits of `gm`.

    It keeps them in the order of the graph. Without that, a kernel fused from an early and a late
    op is placed early and pulls the waits it needs before starts that were planned earlier; and
    ranks that fuse differently, because their shapes differ, would issue collectives in different
    orders. The order is told to the scheduler as dependencies, before it fuses.

    The labels are written into the code, so they are part of the graph cache's key, and so is which
    values are stored at once: the cache does not look at marks of nodes. A pass that the user has
    there comes after: the dependencies hold for what it returns, too.
    """
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.ir import InvokeSubgraph
    from torch._inductor.utils import is_collective, is_wait

    # 2.11 has no class of its own for passes of the scheduler.
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
    labels = [
        f"{type(label).__module__}.{label!r}"  # the code imports it from there
        for label in map(label_of, gm.graph.nodes)
        if label is not None
    ]
    stored = _stored_at_once(gm)
    given = config._pre_fusion_custom_pass
    key = given.uuid() if isinstance(given, base) else None

    class KeepOrder(base):
        def __call__(self, nodes: list[Kernel]) -> list[Kernel]:
            last = None
            for node in nodes:
                is_call = isinstance(node.node, InvokeSubgraph)  # may write to what it is given
                label = None if is_call else _label_of_kernel(node.node, label_of)
                moves = label is not None or is_collective(node.node) or is_wait(node.node)
                if is_call or moves:
                    own = next(iter(node.get_buffer_names()))
                    if last is not None:
                        node.add_fake_dep(WeakDep(last, mutating_buf=own, is_fake=True))
                    last = own
                if label is not None:
                    _run_within(node.node, label)
            if not config.allow_buffer_reuse:
                _keep_between_calls(nodes)
            if nodes:
                nodes[0].scheduler.compute_ancestors()
            return nodes if given is None else given(nodes)

        def uuid(self) -> str:
            own = "shardc: collectives, waits, calls, kernels in order; nothing donated"
            own = f"{own}; stored at once {stored}; {labels}"
            return own if given is None else f"{own}; {key}"

    keep_order = KeepOrder()
    if given is not None and not key:
        # A plain function turns the graph cache off; a None key would not.
        return keep_order.__call__
    return keep_order


def _keep_between_calls(nodes: Sequence[Kernel]) -> None:
    """Keep kernels on CPUs between the calls of ops that they are between.

    Without that, one that is fused from ops far apart is placed where the first of them was, with
    the matmuls before it that the others read: all that they give is held at once. Collectives and
    waits are no such calls: kernels may be fused across them.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import is_collective, is_wait

    def follow(node: Kernel, others: Sequence[str]) -> None:
        # Where it reads them, another dependency would keep it from writing over them. As what it
        # mutates it names none that it writes: that would be another kind of dependency.
        known = {dep.name for dep in node.unmet_dependencies}
        for other in others:
            if other not in known:
                node.add_fake_dep(WeakDep(other, mutating_buf=other, is_fake=True))

    call, kernels = list[str](), list[str]()
    for node in nodes:
        device = node.get_device()
        names = list(node.get_buffer_names())[:1]
        if device is None or device.type != "cpu" or is_collective(node.node) or is_wait(node.node):
            continue
        if node.is_extern() or node.is_template():
            follow(node, [*call, *kernels])
            call, kernels = names, []
        elif _is_kernel(node):
            follow(node, call)
            kernels += names


def _is_kernel(node: Kernel) -> bool:
    """Whether code runs for a node of the scheduler; for an empty tensor it does not."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    return not isinstance(node, NopKernelSchedulerNode)


def _label_of_kernel(kernel: Kernel, label_of: LabelOf) -> object:
    """The label of the node that became a call of an op as it is; else None."""
    op = getattr(kernel, "op_overload", None)
    nodes = [] if op is None else [node for node in kernel.get_origins() if node.target is op]
    return label_of(nodes[0]) if len(nodes) == 1 else None


def _run_within(kernel: Kernel, label: object) -> None:
    """Make the Python code for a kernel enter and leave a label."""
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper:
        return
    write_call = kernel.codegen
    module, name = type(label).__module__, type(label).__name__

    def codegen(wrapper: Any) -> None:
        outermost = wrapper
        while getattr(outermost, "parent_wrapper", None) is not None:
            outermost = outermost.parent_wrapper
        variable = f"{name.lower()}_{kernel.get_name()}"
        outermost.add_import_once(f"from {module} import {name}")
        outermost.add_import_once(f"{variable} = {label!r}")
        wrapper.writeline(f"{variable}.__enter__()")
        write_call(wrapper)
        wrapper.writeline(f"{variable}.__exit__(None)")

    kernel.codegen = codegen


def keep_output_strides(body: GraphModule) -> None:
    """Give the results of a nested graph the strides they were traced with.

    Inductor notes this for all nested graphs, but before `fold_repeats` creates ours.
    """
    result = body.graph.output_node()
    values = [node.meta["val"] for node in result.args[0]]  # type: ignore[union-attr]
    result.meta["user_visible_output_idxs"] = list(range(len(values)))
    result.meta["original_output_strides"] = [value.stride() for value in values]


def store_at_once(node: torch.fx.Node) -> None:
    """Mark an op: Inductor stores its result where it is computed, and computes it in no reader.

    The mark is read by Inductor's lowering.
    """
    node.meta[_AT_ONCE] = True


def is_stored_at_once(node: torch.fx.Node) -> bool:
    """Whether a node has the mark of `store_at_once`."""
    return bool(node.meta.get(_AT_ONCE))


def _stored_at_once(gm: GraphModule) -> list[int]:
    """The places of the nodes with that mark, in `gm` and the graphs nested in it."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    nodes = itertools.chain.from_iterable(graph.nodes for graph in graphs)
    return [place for place, node in enumerate(nodes) if is_stored_at_once(node)]


_AT_ONCE = "inductor_realize_to_strides"


def takes_nested_graphs(kwargs: Mapping[str, object]) -> bool:
    """Whether `compile_fx_inner`, given these, may see calls of nested graphs.

    Its C++ wrapper has no code for them, and CUDA graphs are cut at other places.
    """
    from torch._inductor import config

    return not (config.cpp_wrapper or kwargs.get("cpp_wrapper") or kwargs.get("cudagraphs"))


def is_random_value(node: torch.fx.Node) -> bool:
    """Whether a node draws with a seed of Inductor's, the same wherever it is."""
    from torch._inductor import inductor_prims

    return node.target is inductor_prims.random


def is_random_seed(node: torch.fx.Node) -> bool:
    """Whether a node picks one of the seeds that Inductor drew for a graph."""
    from torch._inductor import inductor_prims

    return node.target is inductor_prims.lookup_seed
