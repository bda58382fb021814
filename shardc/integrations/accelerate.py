"""accelerate: `prepare` in the place of `accelerator.prepare`, for models that shardc shards.

accelerate wraps a model in DDP unless the model is marked as prepared. So `prepare` shards the
models first and marks them; accelerate prepares the rest. `accumulate`, `no_sync`, `backward`,
`clip_grad_norm_` and `unwrap_model` then work as they are: a sharded model has `no_sync`, and its
gradients have one norm on all ranks.

Three methods would read whole state dicts on every rank: `get_state_dict`, `save_state` and
`load_state`. `prepare` replaces these methods on its accelerator: see `accelerate_state`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shardc.integrations.accelerate_state import StateOfModels
from shardc.runtime import compat
from shardc.runtime.checks.arguments import check_value
from shardc.runtime.checks.words import plural
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.unit.precision import MixedPrecisionPolicy
from shardc.sharding.mesh import data_parallel_mesh
from shardc.sharding.shard import fully_shard
from shardc.sharding.units import units_of

_PARAM_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    compile: bool | None = None,
    compile_options: Mapping[str, Any] | None = None,
    **sharding: Any,
) -> Any:
    """Shard the models among `objects`; accelerate prepares the other objects.

    Optimizers may be made before or after the call; they keep their parameters. A sharded model
    stays as it is.

    Args:
        accelerator: of several processes, without a plugin for FSDP or DeepSpeed.
        objects: models, optimizers, data loaders and schedulers, as for `accelerator.prepare`.
        compile: whether to call `model.compile(backend="shardc")`; None: call it if the accelerator
            has a dynamo backend.
        compile_options: options of the backend; with them the model is compiled.
        sharding: arguments of `fully_shard`. `units` is "auto" and `mp_policy` follows the
            accelerator's `mixed_precision` (gathers in that, reductions in float32), unless given.

    Returns:
        The objects in their order; the object itself if there is only one.

    Raises:
        ValueError: the accelerator shards models itself, the mesh does not have all its processes,
            or an optimizer has state of whole parameters; also the errors of `fully_shard`.
    """
    check_value("prepare: accelerator", accelerator, Accelerator)
    _check_plugins(accelerator)
    models = [each for each in objects if isinstance(each, nn.Module)]
    for model in models:
        _check_ranks(accelerator, model, **sharding)
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    _check_optimizers(models, optimizers)
    for model in models:
        shard(accelerator, model, compile=compile, compile_options=compile_options, **sharding)
    return accelerator.prepare(*objects)


def shard(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    compile: bool | None = None,
    compile_options: Mapping[str, Any] | None = None,
    **sharding: Any,
) -> None:
    """Shard one model, and mark it as prepared for the accelerator."""
    _check_plugins(accelerator)
    _check_ranks(accelerator, model, **sharding)
    _scale_losses(accelerator)
    if not units_of(model):
        precision = _precision_of(accelerator)
        fully_shard(model, **{"units": "auto", "mp_policy": precision, **sharding})
    plugin = accelerator.state.dynamo_plugin
    if compile is None:
        compile = compile_options is not None or plugin.backend != DynamoBackend.NO
    if compile and not getattr(model, "_is_accelerate_prepared", False):
        _compile(model, plugin, compile_options)
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    StateOfModels.take_over(accelerator)


def _check_plugins(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"prepare: the accelerator shards models itself ({kind.value}): make it without that "
            "plugin, and launch without `use_fsdp` or `use_deepspeed` in its configuration"
        )


def _check_ranks(
    accelerator: Accelerator,
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    dp_mesh_dims: Any = None,
    **_: Any,
) -> None:
    """Raise ValueError unless all processes of the accelerator shard the model."""
    units = units_of(model)
    if units:
        size = max(module._shardc_unit.mesh.size() for module in units.values())
    else:
        size = data_parallel_mesh(mesh, dp_mesh_dims).size()
    if size != accelerator.num_processes:
        raise ValueError(
            f"prepare: the mesh shards the model over {size} of "
            f"{plural(accelerator.num_processes, 'process', 'processes')}, and accelerate "
            "hands each process a batch of its own: ranks that hold parts of one matmul or one "
            "sequence would get different ones. Shard over all processes (copies: a mesh "
            "(replicate, shard)); with tensor parallelism write the loop, or take "
            "tensor_parallel_size of shardc.integrations.lightning"
        )


def _scale_losses(accelerator: Accelerator) -> None:
    """Give the accelerator a scaler for float16 on the CPU, where accelerate makes none."""
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        handler = accelerator.scaler_handler
        settings = handler.to_kwargs() if handler is not None else {}
        accelerator.scaler = torch.amp.GradScaler(accelerator.device.type, **settings)
        accelerator.native_amp = True  # clipping then unscales


def _precision_of(accelerator: Accelerator) -> MixedPrecisionPolicy:
    precision = accelerator.mixed_precision
    if precision not in _PARAM_DTYPES:
        raise ValueError(
            f"mixed_precision='{precision}' of the accelerator is none of "
            f"{', '.join(_PARAM_DTYPES)}: give prepare an mp_policy"
        )
    dtype = _PARAM_DTYPES[precision]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)


def _check_optimizers(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError for an optimizer that cannot follow its parameters into shards."""
    whole = {
        param: name
        for model in models
        for name, param in model.named_parameters()
        if not isinstance(param, ShardTensor)
    }
    for optimizer in optimizers:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            name = whole.get(param)
            if name is None:
                continue
            if compat.is_dtensor(param):
                raise ValueError(
                    f"parameter '{name}' is a DTensor, and sharding makes a new object of "
                    "it: call fully_shard, make the optimizer, then prepare"
                )
            if any(isinstance(value, Tensor) for value in optimizer.state.get(param, {}).values()):
                raise ValueError(
                    f"the {type(optimizer).__name__} has stepped with the whole parameter "
                    f"'{name}': prepare it before its first step"
                )


def _compile(model: nn.Module, plugin: Any, options: Mapping[str, Any] | None) -> None:
    if plugin.backend not in (DynamoBackend.NO, DynamoBackend.INDUCTOR):
        raise ValueError(
            f"the dynamo backend is '{plugin.backend.value.lower()}', and a sharded model is "
            "compiled by shardc: leave it 'inductor', which shardc lowers with"
        )
    asked: dict[str, Any] = {"dynamic": plugin.dynamic, "fullgraph": bool(plugin.fullgraph)}
    options = {**(plugin.options or {}), **(options or {})}
    if options:
        asked["options"] = options
    elif plugin.mode != "default":
        asked["mode"] = plugin.mode
    model.compile(backend="shardc", **asked)
