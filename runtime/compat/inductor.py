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
"""A graph compiled by Inductor; each version of torch has another class for it."""

Input = torch.Tensor | int | torch.SymInt | None
"""An example input of a trace."""

Kernel: TypeAlias = Any
"""A node of Inductor's own graph."""


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Input],
    inner_compile: Callable[..., Output],
    patches: dict[str, object],
    cache: Guest | None = None,
) -> Compiled:
    """Compile a graph by Inductor; `inner_compile` lowers each partitioned graph.

    The backward is compiled together with its forward, on all ranks alike. AOT autograd's cache
    works through `cache`; without a guest it is off. A backward does not write into tensors that
    the forward saved: with `retain_graph=True` the next backward reads them.
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
    """The names of Inductor's settings, settings that are aliases of others included."""
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
    """Lower one graph by Inductor, graph cache included.

    Collectives and waits stay in the order of the graph. Each runs in the context that `label_of`
    gives its node; the context's `repr` is code that makes it anew. Where a user's own passes
    change the graph, `check` is called on the result of these passes.

    Inductor names an op that it cannot lower (2.11: also an op that it calls unchanged) with the
    texts of its operands. Each text repeats all inputs of the operand: gigabytes behind 8 blocks.
    Here the operands are left out.
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
    """The class of the errors that Inductor raises where it cannot compile."""
    from torch._inductor.exc import InductorError

    return InductorError


def _operator_text(target: object, args: object, kwargs: object) -> str:
    return f"  target: {target}"


def op_name(target: object) -> str | None:
    """The name of an op ("mine::double") that a node calls, without its overload (2.13)."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return str(target.name()).partition(".")[0]


def module_of_op(name: str) -> str | None:
    """The module that made an op by `torch.library.custom_op`, "" for ops made otherwise (2.13).

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
"""Namespaces of the ops that a script has without an import of the user's code."""


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
    """Call `compile_fx_inner` with `settings`, outside of any compile."""
    from torch._inductor import config

    with config.patch(dict(settings)):
        return compile_fx_inner(gm, inputs, label_of, **arguments)


def generated_code(output: Output) -> tuple[str, str] | None:
    """The path and the text of the code that Inductor made of a graph; the file need not exist.

    None where Inductor made no code.
    """
    from torch._inductor.codecache import get_path

    source = getattr(output, "source_code", None)
    return (get_path(output.cache_key, "py")[2], source) if source else None


JOINT_PASS = "joint_custom_post_pass"
"""The name of Inductor's setting for a pass over joint graphs."""


def joint_pass(apply: Callable[[GraphModule], object], key: str, given: object = None) -> object:
    """A pass for Inductor's `joint_custom_post_pass`: the user's passes, then `apply`.

    The user's passes are `given`, or the passes set in Inductor's configuration. `key` and the keys
    of the user's passes enter the key of Inductor's graph cache; a pass without a key turns the
    cache off. Inductor runs passes on bodies of higher-order ops as well (`score_mod` of
    flex_attention); `apply` gets whole graphs only.
    """
    from torch._inductor import config

    def on_module(graph: torch.fx.Graph) -> None:
        assert graph.owning_module is not None
        if not is_body(graph.owning_module):
            apply(graph.owning_module)

    return _graph_pass(_passes(given or getattr(config, JOINT_PASS)), on_module, key)


PARTITIONER = "custom_partitioner_fn"
"""The name of Inductor's setting for a partitioner."""


def partitioner(
    apply: Callable[[GraphModule, GraphModule], object], key: str, given: Any = None
) -> object:
    """A partitioner for Inductor; `apply` edits the forward and the backward.

    The partitioner cuts as `given` does, else as the setting in Inductor's configuration, else as
    torch does. `key` enters the key of the graph cache. It cuts bodies of higher-order ops, too;
    `apply` gets whole graphs only.
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

        def __reduce__(self) -> tuple[type[str], tuple[str]]:
            """The key of AOT autograd's cache pickles Inductor's settings."""
            if (text := self.uuid()) is None:
                raise TypeError("a graph of a partitioner without a uuid is not kept")
            return str, (text,)

    return Partitioner()


def before_joint_passes(
    settings: dict[str, object], apply: Callable[[GraphModule], object], key: str = "shardc"
) -> None:
    """Add `apply` to Inductor's `settings`: it runs on joint graphs before any pass."""
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
    """One pass of Inductor over a graph: the passes `given`, `apply`, the passes `later`."""
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
    """The settings with which Inductor keeps to the plan of shardc.

    Inductor runs the passes of shardc among its own passes over joint graphs, and neither merges
    nor moves collectives. With other settings it would merge or move them, by measurements of each
    rank. Some versions lack some of the settings.
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
    """The settings with which Inductor frees a value at once after its last use.

    With other settings it may keep freed memory for a later value of the same size, as long as it
    believes that the peak is elsewhere. It does not know the memory that calls and backends of
    collectives hold. With these settings, kernels on CPUs also keep their place in the graph
    (`_keep_between_calls`).
    """
    return {"allow_buffer_reuse": False}


def _collectives_pass(gm: GraphModule, label_of: LabelOf) -> object:
    """A pass of Inductor's scheduler that keeps the collectives and waits of `gm` in order.

    Without the pass, a kernel fused from an early and a late op is placed early, and pulls the
    waits that it needs before starts that were planned earlier. Ranks that fuse differently,
    because their shapes differ, would issue collectives in different orders. The pass tells the
    scheduler the order as dependencies, before the scheduler fuses.

    The code contains the labels, so they are part of the graph cache's key. The places of values
    that are stored at once are part of the key, too: the cache does not look at marks of nodes. A
    pass of the user's comes after: the dependencies hold for its result, too.
    """
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.ir import InvokeSubgraph
    from torch._inductor.utils import is_collective, is_wait

    # 2.11 has no class of its own for passes of the scheduler.
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
    labels = [
        f"{type(label).__module__}.{label!r}"  # the code imports the class there
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
                is_call = isinstance(node.node, InvokeSubgraph)  # may write to its inputs
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
    """Keep each kernel on CPUs between the two calls of ops around it.

    Otherwise a kernel fused from ops far apart is placed where its first op was. The matmuls that
    its other ops read then run before it, and all their results are held at once. Collectives and
    waits are no such calls: kernels may be fused across them.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.utils import is_collective, is_wait

    def follow(node: Kernel, others: Sequence[str]) -> None:
        # A node depends on the buffers that it reads; another dependency would keep it from writing
        # over them. `mutating_buf` names no buffer that the node writes: that would be another kind
        # of dependency.
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
        elif not isinstance(node, NopKernelSchedulerNode):  # no code runs for an empty tensor
            follow(node, call)
            kernels += names


def _label_of_kernel(kernel: Kernel, label_of: LabelOf) -> object:
    """The label of the node that a kernel calls as an op unchanged; else None."""
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
    """Give the results of a nested graph the strides of their trace.

    Inductor notes the strides of all nested graphs, but before `fold_repeats` creates ours.
    """
    result = body.graph.output_node()
    values = [node.meta["val"] for node in result.args[0]]  # type: ignore[union-attr]
    result.meta["user_visible_output_idxs"] = list(range(len(values)))
    result.meta["original_output_strides"] = [value.stride() for value in values]


def store_at_once(node: torch.fx.Node) -> None:
    """Mark an op: Inductor stores its result at once, and computes it in no reader.

    Inductor's lowering reads the mark.
    """
    node.meta[_AT_ONCE] = True


def is_stored_at_once(node: torch.fx.Node) -> bool:
    """Whether a node has the mark of `store_at_once`."""
    return bool(node.meta.get(_AT_ONCE))


def _stored_at_once(gm: GraphModule) -> list[int]:
    """The places of the nodes with the mark of `store_at_once`, in `gm` and its nested graphs."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, GraphModule))
    nodes = itertools.chain.from_iterable(graph.nodes for graph in graphs)
    return [place for place, node in enumerate(nodes) if is_stored_at_once(node)]


_AT_ONCE = "inductor_realize_to_strides"

KEPT_OUTPUTS = "user_visible_output_idxs"
"""The key in the meta of an output node for the outputs that keep their strides, by number."""


def takes_nested_graphs(kwargs: Mapping[str, object]) -> bool:
    """Whether `compile_fx_inner` with `kwargs` may see calls of nested graphs.

    Inductor's C++ wrapper has no code for such calls, and CUDA graphs are cut at other places.
    """
    from torch._inductor import config

    return not (config.cpp_wrapper or kwargs.get("cpp_wrapper") or kwargs.get("cudagraphs"))


def is_random_value(node: torch.fx.Node) -> bool:
    """Whether a node draws with a seed of Inductor's; its value does not depend on its place."""
    from torch._inductor import inductor_prims

    return node.target is inductor_prims.random


def is_random_seed(node: torch.fx.Node) -> bool:
    """Whether a node picks one of the seeds that Inductor drew for a graph."""
    from torch._inductor import inductor_prims

    return node.target is inductor_prims.lookup_seed
