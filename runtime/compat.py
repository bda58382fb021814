"""Every private torch API that shardc uses, each with the torch versions it was seen in.

Nothing else in the project imports a name with a leading underscore from torch (the functional
collectives, `torch.ops._c10d_functional`, are the one documented exception). When a torch release
moves something, this file is the one to mend.
"""

import atexit
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.exc import InductorError as InductorError
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

F = TypeVar("F", bound=Callable[..., Any])


NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""A tensor subclass that only wants `__torch_dispatch__` (2.11 to 2.15)."""


def tracking_versions() -> AbstractContextManager[None]:
    """Inside `__torch_dispatch__`, give views the version of their base (2.11 to 2.15)."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def register_foreach_type(cls: type[Tensor]) -> None:
    """Let foreach optimizers and clipping take `cls` (seen in 2.11 to 2.15).

    Both lists name the exact types for which foreach is the default.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    ):
        if cls not in supported:
            supported.append(cls)


def make_wrapper(cls: type[Tensor], shape: Iterable[int], local: Tensor) -> Tensor:
    """A contiguous wrapper subclass of `shape` with the dtype and device of `local`."""
    return Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=local.dtype, device=local.device, requires_grad=False
    )


def flat_dims(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """The named dims of a mesh as one; None for no names. All ranks of `mesh` must call it."""
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def with_last_dim_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """A 1-D mesh as one of shape `(size, 1)`. All ranks of `mesh` must call it."""
    return mesh._unflatten(0, (mesh.size(), 1), ("replicate", "shard"))


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """A mesh of the dims of sub-meshes of one mesh, in the order given."""
    return DeviceMesh._concatenate(list(meshes))


def local_of(tensor: DTensor) -> Tensor:
    """This rank's value of a DTensor, without gradient (stubs give `detach` a plain type)."""
    return cast(DTensor, tensor.detach()).to_local()


def storage_id(tensor: Tensor) -> int | None:
    """What is equal for tensors that share a storage; None where there is none (2.11 to 2.15).

    Of a DTensor, the storage of its local value.
    """
    if isinstance(tensor, DTensor):
        tensor = local_of(tensor)
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return None
    return tensor.untyped_storage()._cdata


def is_in_use(param: Tensor) -> bool:
    """Whether `torch.utils.swap_tensors` would refuse `param`: an autograd graph holds it."""
    return param._use_count() > 2  # type: ignore[attr-defined]


def swap_tensors(param: Tensor, new: Tensor) -> None:
    """`torch.utils.swap_tensors`, also where weak references to `param` exist (2.11 to 2.15).

    Torch refuses those, because they would lead to another tensor. Dynamo's guards have some on
    every parameter that it saw, and a sharded one stays the parameter that they mean.
    """
    if not weakref.getweakrefs(param) or type(param) is not type(new):
        torch.utils.swap_tensors(param, new)
        return
    if is_in_use(param):
        raise RuntimeError("a sharded parameter cannot be moved: an autograd graph holds it")
    param.__dict__, new.__dict__ = new.__dict__, param.__dict__
    torch._C._swap_tensor_impl(param, new)


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which functional collectives find a process group (2.11 to 2.15)."""
    return group.group_name


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name.

    Raises:
        RuntimeError: it is gone, or was never made.
    """
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise RuntimeError(
            f"process group '{name}', over which the model is sharded, does not exist: call "
            "torch.distributed.init_process_group before fully_shard and keep the group until the "
            "last step"
        ) from error


def make_fake_groups(groups: Mapping[str, tuple[int, int]]) -> None:
    """Groups without peers, given as (rank, size), under the names that graphs know (2.11 to 2.15).

    For a process that has no group yet.
    """
    from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers its backend)

    if not groups:
        return
    own = max(rank for rank, _ in groups.values())
    world = own + max(size for _, size in groups.values())
    dist.init_process_group("fake", rank=own, world_size=world, store=dist.HashStore())
    made = {
        name: dist.new_group(list(range(own - rank, own - rank + size)))
        for name, (rank, size) in groups.items()
    }
    _unregister_all_process_groups()
    for name, group in made.items():
        _register_process_group(name, group)  # type: ignore[arg-type]


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store over which the group met (2.11 to 2.15)."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_process_group_store(group)


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's collectives wait before they fail (2.11 to 2.15)."""
    from torch.distributed import constants

    try:
        backend = group._get_backend(device)
    except RuntimeError:  # a group of another device
        backend = group._get_backend(torch.device("cuda"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout or constants.default_pg_timeout


def flight_record(group: dist.ProcessGroup) -> str | None:
    """The file with the last collectives of this process; None where there is none (2.11 to 2.15).

    NCCL's watchdog writes it when a collective times out. Gloo's is written here, if the user said
    where to.
    """
    asked = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    )
    size = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    if size == "0":
        return None
    backend = dist.get_backend(group)
    if backend == "nccl":
        default = Path.home() / ".cache" / "torch" / "comm_lib_trace_rank_"
        return f"{asked or default}{dist.get_rank()}"
    if backend != "gloo" or not asked:
        return None
    path = Path(f"{asked}{dist.get_rank()}")
    try:
        c10d: Any = torch._C._distributed_c10d  # the stubs lack it
        path.write_bytes(c10d._dump_fr_trace(includeStackTraces=False))
    except OSError as error:
        return f"{path} (which could not be written: {error})"
    return str(path)


def high_priority_options(group: dist.ProcessGroup) -> Any:
    """Options for a group like `group` on a high-priority stream; None where there is none."""
    if dist.get_backend(group) != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def group_allocates(name: str, device: torch.device) -> bool:
    """Whether the group has an allocator of its own for a device (2.11 to 2.15)."""
    try:
        return resolve_group(name)._get_backend(device).supports_tensor_alloc(device)
    except RuntimeError:  # no backend for such devices
        return False


def allocate_from_group(
    numel: int, dtype: torch.dtype, device: torch.device, name: str
) -> Tensor:
    """A tensor, `(numel,)`, from the group's own allocator (2.11 to 2.15)."""
    backend = resolve_group(name)._get_backend(device)
    return backend.allocate_tensor(numel, dtype=dtype, device=device)


def use_symmetric_memory(backend: str, name: str) -> None:
    """Let `allocate_symmetric` take from `backend`; every rank of the group calls it (2.11 to 2.15).

    The barrier makes the communicator, which must exist before the first `rendezvous`.
    """
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    dist.barrier(group=resolve_group(name))


def allocate_symmetric(numel: int, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """A tensor, `(numel,)`, of symmetric memory that the group has met over (2.11 to 2.15)."""
    from torch.distributed import _symmetric_memory

    with torch.cuda.use_mem_pool(_symmetric_memory.get_mem_pool(device)):
        tensor = torch.empty(numel, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(tensor, group=name)
    return tensor


def mean_op(name: str) -> str:
    """The reduction that leaves the least to divide: "avg" where the backend has it, else "sum"."""
    return "avg" if dist.get_backend(resolve_group(name)) == "nccl" else "sum"


def is_fake_group(group: dist.ProcessGroup) -> bool:
    """Whether the group has no peers: torch's fake one, or one that says it is `emulated`."""
    return dist.get_backend(group) == "fake" or getattr(group, "emulated", False)


def join_fake_group(world_size: int) -> None:
    """Be rank 0 of a process group without peers (2.11 to 2.15)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def has_real_group() -> bool:
    """Whether this process has joined a process group with peers."""
    return dist.is_initialized() and not is_fake_group(_default_group())


def _default_group() -> dist.ProcessGroup:
    group = dist.distributed_c10d.GroupMember.WORLD
    assert group is not None
    return group


def let_backend_threads_finish() -> None:
    """At exit, let gloo's threads drop the tensors of the last collective (2.13).

    They take the GIL for it, up to one switch interval (5 ms) after the wait has returned; an
    interpreter that finalizes in that time ends them, which aborts the process ("terminate called
    without an active exception").
    """
    atexit.register(time.sleep, 4 * sys.getswitchinterval())


def is_replicated(module: nn.Module) -> bool:
    """Whether DDP or `torch.distributed._composable.replicate` owns `module` (2.11 to 2.15)."""
    from torch.distributed._composable.contract import _get_registry

    names = _get_registry(module) or {}
    return isinstance(module, nn.parallel.DistributedDataParallel) or "replicate" in names


def annotate(facts: dict[str, Any]) -> AbstractContextManager[None]:
    """Put `facts` under `meta["custom"]` of the nodes traced meanwhile (2.11 to 2.15)."""
    return torch.fx.traceback.annotate(facts)


def grad_hooks(param: Tensor) -> Iterable[Callable[[Tensor], Tensor | None]]:
    """The hooks that `param.register_hook` collected (2.11 to 2.15)."""
    return list((param._backward_hooks or {}).values())


def post_accumulate_hooks(param: Tensor) -> Iterable[Callable[[Tensor], None]]:
    """The hooks that `register_post_accumulate_grad_hook` collected (2.11 to 2.15)."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def after_zero_grad(call: Callable[[Iterable[Tensor]], None]) -> None:
    """Call with their parameters after any optimizer's or module's `zero_grad` (2.11 to 2.15).

    There is no hook for it; the two methods are wrapped.
    """

    def wrapped(method: Callable[..., None], params: Callable[[Any], Iterable[Tensor]]) -> Any:
        @functools.wraps(method)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            method(self, *args, **kwargs)
            call(params(self))

        return zero_grad

    def held_by(optimizer: Any) -> Iterable[Tensor]:
        return (param for group in optimizer.param_groups for param in group["params"])

    optimizer: Any = torch.optim.Optimizer
    module: Any = nn.Module
    optimizer.zero_grad = wrapped(optimizer.zero_grad, held_by)
    module.zero_grad = wrapped(module.zero_grad, nn.Module.parameters)


is_profiled = torch.autograd._profiler_enabled
"""Whether a profiler runs on this thread (2.11 to 2.15)."""


def when_backward_ends(call: Callable[[], None]) -> None:
    """From within a backward, have `call` called when all of it is done (2.11 to 2.15)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def leave_gradient_dtype(param: Tensor) -> None:
    """Let `param.grad` have another dtype than `param` (2.11 to 2.15)."""
    param.grad_dtype = None


@contextmanager
def without_parameters(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Hide some of a module's parameters from its own methods for a while (2.11 to 2.15)."""
    hidden, parameters = set(names), module._parameters
    module.__dict__["_parameters"] = {n: p for n, p in parameters.items() if n not in hidden}
    try:
        yield
    finally:
        parameters.update(module._parameters)
        module.__dict__["_parameters"] = parameters


def backward_number() -> int:
    """A number of the backward that autograd runs on this thread; -1 if none (2.11 to 2.15)."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return backward_number() != -1


def top_saved_tensors_hooks() -> Any:
    """The innermost saved-tensor hooks, (pack, unpack); None if there are none (2.11 to 2.15)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saved_tensors_hooks_allowed() -> bool:
    """False inside `torch.func` transforms, which refuse such hooks (2.11 to 2.15)."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def is_checkpoint_hook(pack: Callable[[Tensor], Any]) -> bool:
    """Whether a pack hook is that of `torch.utils.checkpoint`, which recomputes (2.11 to 2.15)."""
    return pack.__module__ == "torch.utils.checkpoint"


def dtensor_parts(tensor: Tensor) -> tuple[Tensor, Any] | None:
    """The local value and the spec of a DTensor; None for other tensors (2.11 to 2.15)."""
    return (tensor._local_tensor, tensor._spec) if isinstance(tensor, DTensor) else None


def make_dtensor(local: Tensor, spec: Any) -> Tensor:
    """A DTensor of a local value and a spec (2.11 to 2.15)."""
    return DTensor(local, spec, requires_grad=False)


def copy_dynamo_graph(gm: GraphModule) -> GraphModule:
    """A copy that passes as Dynamo's, whose own graph must keep its inputs (2.11 to 2.15)."""
    copied = GraphModule(gm, torch.fx.Graph(), type(gm).__name__)
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    copied.graph.graph_copy(gm.graph, nodes)
    result = gm.graph.output_node()
    copied.graph.output(torch.fx.node.map_arg(result.args[0], nodes.__getitem__))
    copied.graph.output_node().meta = dict(result.meta)
    for node, twin in nodes.items():
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    copied.meta = gm.meta
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(copied, name, getattr(gm, name))
    return copied


def make_input_without_source(placeholder: torch.fx.Node, like: torch.fx.Node) -> None:
    """Have a new placeholder pass as one of Dynamo's, with the value of `like` (2.11 to 2.15)."""
    placeholder.meta.update(
        {key: like.meta[key] for key in ("example_value", "stack_trace") if key in like.meta}
    )
    placeholder._dynamo_source = None


def rnn_weight_references(module: nn.Module) -> list[Any]:
    """The weak references that `nn.LSTM` and friends keep to their weights (2.11 to 2.15)."""
    return list(module._flat_weight_refs) if isinstance(module, nn.RNNBase) else []


def forget_recomputed_weights(module: nn.Module) -> None:
    """Drop the weight that the old `weight_norm` and `spectral_norm` keep (2.11 to 2.15).

    It is derived from parameters, which it keeps in use, and is set anew before each forward.
    """
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (SpectralNorm, WeightNorm)):
            vars(module).pop(hook.name, None)


def forget_rnn_weights(module: nn.Module) -> None:
    """Drop what `nn.LSTM` and friends cache of their weights (2.11 to 2.15)."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = []
        module._flat_weight_refs = []


def rnn_properties() -> dict[str, property]:
    """Read the cached weights of `nn.LSTM` and friends through their attributes (2.11 to 2.15)."""

    def weights(rnn: Any) -> list[Any]:
        return [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    def references(rnn: Any) -> list[None]:
        return [None] * len(rnn._flat_weights_names)

    def ignore(rnn: Any, value: Any) -> None: ...

    return {
        "_flat_weights": property(weights, ignore),
        "_flat_weight_refs": property(references, ignore),
    }


def real_input(placeholder: torch.fx.Node) -> Tensor | None:
    """The tensor for which Dynamo made a placeholder, while a backend compiles (2.11 to 2.15)."""
    argument = placeholder.meta.get("grapharg")
    value = None if argument is None else argument.example
    return value if isinstance(value, Tensor) else None


def is_cut_by_break(gm: GraphModule) -> bool:
    """Whether Dynamo ended the graph at a graph break (2.11 to 2.15)."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def outside_function_transforms() -> AbstractContextManager[Any]:
    """Inside, `vmap`, `grad` and their like around the caller do not apply (2.11 to 2.15)."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def region_nodes() -> tuple[set[Any], set[Any]]:
    """What opens and closes a function transform in a Dynamo graph (2.11 to 2.15)."""
    from torch._C import _functorch
    from torch._functorch import predispatch

    kinds = ("_vmap", "_grad", "_jvp")
    opens = {getattr(_functorch, f"{kind}_increment_nesting") for kind in kinds}
    closes = {getattr(_functorch, f"{kind}_decrement_nesting") for kind in kinds}
    opens.add(predispatch._vmap_increment_nesting)
    closes.add(predispatch._vmap_decrement_nesting)
    return opens, closes


SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""What `torch.no_grad()` leaves in a Dynamo graph (2.11 to 2.15)."""


def inline_only(fn: F) -> F:
    """Let Dynamo inline `fn` into a caller it traces, never compile it by itself (2.11 to 2.15).

    What an eager frame calls stays eager then, instead of becoming a small graph of its own.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)
    return fn


def in_own_frame(call: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, within a frame that Dynamo traces where it skips that of `forward` (2.11 to 2.15).

    It skips torch's own modules; `torch.compile(module)` does the same for them.
    """
    from torch._dynamo import external_utils, trace_rules

    return external_utils.wrap_inline(call) if trace_rules.check(forward) else call


# -- sizes and costs -----------------------------------------------------------------------------


def size_expr(size: Any) -> Any:
    """A size as a number, or as the sympy expression behind a SymInt (2.11 to 2.15)."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_number else expr
    return size


def symbol_values(size: Any) -> dict[Any, int]:
    """The values of all symbols of the trace that a SymInt comes from (2.11 to 2.15)."""
    if not isinstance(size, torch.SymInt):
        return {}
    env = size.node.shape_env
    known = getattr(env, "backed_var_to_val", None) or getattr(env, "var_to_val", {})
    return {symbol: int(value) for symbol, value in known.items()}


def flop_formulas() -> dict[Any, Callable[..., Any]]:
    """What torch knows of FLOPs, by op, with the CPU's attention added (2.11 to 2.15)."""
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
            aten._scaled_dot_product_flash_attention
        ],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }


# -- the compiler --------------------------------------------------------------------------------


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """Inductor, with `inner_compile` lowering each partitioned graph (2.11 to 2.15).

    `patches` hold until the backward graph is compiled, which may be after this returns. AOT
    autograd's own cache is off: a hit would skip the passes. Donated buffers are off: a backward
    writes into them, and with `retain_graph=True` the next one would read what it wrote.
    """
    from torch._inductor.compile_fx import compile_fx as inductor_compile_fx

    with _functorch_config().patch(enable_autograd_cache=False, donated_buffer=False):
        return inductor_compile_fx(  # type: ignore[return-value]
            gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches
        )


def mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor settings behind `torch.compile(mode=...)` (2.11 to 2.15)."""
    return dict(torch._inductor.list_mode_options(mode)) if mode else {}


def cpp_compiler() -> str:
    """The C++ compiler that Inductor takes (2.11 to 2.15). RuntimeError where it finds none."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    return get_cpp_compiler()


def compile_fx_inner(
    gm: GraphModule,
    inputs: Sequence[Any],
    label_of: Callable[[torch.fx.Node], Any],
    **kwargs: Any,
) -> Any:
    """Inductor's lowering of one graph, graph cache included (2.11 to 2.15).

    Collectives and waits stay in the order of the graph, and run in the context that `label_of`
    gives their nodes; its `repr` is code that makes it anew.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner as inner

    with config.patch(_pre_fusion_custom_pass=_collectives_pass(gm, label_of)):
        return inner(gm, inputs, **kwargs)


def changed_inductor_settings() -> dict[str, Any]:
    """The settings of Inductor that differ from its defaults now (2.11 to 2.15)."""
    from torch._inductor import config

    return dict(config._get_dict(skip_default=True))  # type: ignore[attr-defined]


def compile_alone(
    gm: GraphModule,
    inputs: Sequence[Any],
    label_of: Callable[[torch.fx.Node], Any],
    settings: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Any:
    """`compile_fx_inner` with `settings`, outside of any compile (2.11 to 2.15)."""
    from torch._inductor import config

    with config.patch(dict(settings)):
        return compile_fx_inner(gm, inputs, label_of, **arguments)


def op_arguments(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call of an op, by name; none for what is no op (2.11 to 2.15)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def wrap_compiled(output: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Put `wrap` around what a graph that Inductor compiled calls (2.11 to 2.15).

    A graph without any call, which only passes inputs on, comes back as a plain function.
    """
    if not hasattr(output, "current_callable"):
        return output
    output.current_callable = wrap(output.current_callable)
    return output


def generated_code(output: Any) -> tuple[str, str] | None:
    """What Inductor made of a graph: the path of the code, which need not exist, and its text.

    None where it made none. (2.11 to 2.15)
    """
    from torch._inductor.codecache import get_path

    source = getattr(output, "source_code", None)
    return (get_path(output.cache_key, "py")[2], source) if source else None


def compile_id() -> tuple[int, int] | None:
    """Of what Dynamo compiles now: the number of the frame, how often it was compiled before.

    None outside of a compile. (2.11 to 2.15)
    """
    from torch._guards import CompileContext

    known = CompileContext.current_compile_id()
    if known is None or known.frame_id is None or known.frame_compile_id is None:
        return None
    return known.frame_id, known.frame_compile_id


def is_traced() -> bool:
    """Whether torch's structured trace is on, `TORCH_TRACE` (2.11 to 2.15).

    Its handler takes itself away at the first record if it is not.
    """
    from torch._logging import _internal

    return bool(_internal.trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Add a text to torch's structured trace, if that is on (2.11 to 2.15)."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


JOINT_PASS = "joint_custom_post_pass"
"""The setting of Inductor under which it takes a pass over joint graphs (2.11 to 2.15)."""


def joint_pass(apply: Callable[[GraphModule], GraphModule], key: str) -> Any:
    """`apply` as Inductor's `joint_custom_post_pass`; `key` enters its graph cache's key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class JointPass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            assert graph.owning_module is not None
            apply(graph.owning_module)

        def uuid(self) -> str:
            return key

    return JointPass()


def _collectives_pass(gm: GraphModule, label_of: Callable[[torch.fx.Node], Any]) -> Any:
    """A pass of Inductor's scheduler for the collectives and waits of `gm` (2.11 to 2.15).

    It keeps them in the order of the graph. Without that, a kernel fused from an early and a late
    op is placed early and pulls the waits it needs before starts that were planned earlier; and
    ranks that fuse differently, because their shapes differ, would issue collectives in different
    orders. The order is told to the scheduler as dependencies, before it fuses.

    The labels are written into the code, so they are part of the graph cache's key.
    """
    from torch._inductor import custom_graph_pass
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.ir import InvokeSubgraph
    from torch._inductor.utils import is_collective, is_wait

    # 2.11 has no class of its own for passes of the scheduler.
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
    labels = [repr(label) for label in map(label_of, gm.graph.nodes) if label is not None]

    class KeepOrder(base):
        def __call__(self, nodes: list[Any]) -> list[Any]:
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
            if nodes:
                nodes[0].scheduler.compute_ancestors()
            return nodes

        def uuid(self) -> str:
            return f"shardc: collectives, waits, calls in order; no donated buffers; {labels}"

    return KeepOrder()


def _label_of_kernel(kernel: Any, label_of: Callable[[torch.fx.Node], Any]) -> Any:
    """The label of the node that became a call of an op as it is; else None (2.11 to 2.15)."""
    op = getattr(kernel, "op_overload", None)
    nodes = [] if op is None else [node for node in kernel.get_origins() if node.target is op]
    return label_of(nodes[0]) if len(nodes) == 1 else None


def _run_within(kernel: Any, label: Any) -> None:
    """Have the Python code for a kernel enter and leave a label (2.11 to 2.15)."""
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
    """Have Inductor give what a nested graph returns the strides it was traced with (2.11 to 2.15).

    Inductor notes this for all nested graphs, but before those are made that shardc makes.
    """
    result = body.graph.output_node()
    values = [node.meta["val"] for node in result.args[0]]  # type: ignore[union-attr]
    result.meta["user_visible_output_idxs"] = list(range(len(values)))
    result.meta["original_output_strides"] = [value.stride() for value in values]


def takes_nested_graphs(kwargs: dict[str, Any]) -> bool:
    """Whether `compile_fx_inner`, given these, may see calls of nested graphs (2.11 to 2.15).

    Its C++ wrapper has no code for them, and CUDA graphs are cut at other places.
    """
    from torch._inductor import config

    return not (config.cpp_wrapper or kwargs.get("cpp_wrapper") or kwargs.get("cudagraphs"))


def is_random_seed(node: torch.fx.Node) -> bool:
    """Whether a node picks one of the seeds that Inductor drew for a graph (2.11 to 2.15)."""
    from torch._inductor import inductor_prims

    return node.target is inductor_prims.lookup_seed


def compile_aot(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """AOT autograd with our compilers and no decompositions (2.11 to 2.15)."""
    from torch._dynamo.backends.common import aot_autograd

    with _functorch_config().patch(enable_autograd_cache=False, donated_buffer=False):
        return aot_autograd(
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=forward,
            partition_fn=partition,
            decompositions={},
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


def min_cut_partition(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Cut a joint graph in two, saving as little as possible (2.11 to 2.15)."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, *args, **kwargs)


def _functorch_config() -> Any:
    import torch._functorch.config

    return torch._functorch.config


@contextmanager
def fake_tensors() -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, tensors have shapes only; gives what makes one like another (2.11 to 2.15)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield lambda tensor: torch.empty_like(tensor, device="cpu")


def compiling_backward_at_once() -> AbstractContextManager[Any]:
    """Inside, AOT autograd compiles a backward with its forward (2.11 to 2.15)."""
    return _functorch_config().patch(force_non_lazy_backward_lowering=True)


def forget_compiled() -> None:
    """Have Dynamo forget what it compiled, and what it counted (2.11 to 2.15)."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


def graph_break_reasons() -> list[str]:
    """Why Dynamo broke graphs, once a break (2.11 to 2.15)."""
    from torch._dynamo.utils import counters

    return [str(reason) for reason, times in counters["graph_break"].items() for _ in range(times)]


# -- state dicts ----------------------------------------------------------------------------------


def rewrites_loaded_state(module: nn.Module) -> bool:
    """Whether a module's own code may rename or convert what `load_state_dict` gives it.

    Looks at hooks and overrides by the private names they have in 2.11 to 2.15; those of torch's
    activation wrappers only add their prefix, those of its layers only read older versions.
    """
    if not type(module)._load_from_state_dict.__module__.startswith("torch."):
        return True
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    known = "torch.distributed.algorithms."
    return not all(getattr(hook, "__module__", "").startswith(known) for hook in hooks)
