"""accelerate: `prepare` in the place of `accelerator.prepare`, for models that shardc shards.

accelerate wraps a model in DDP unless the model is marked as prepared. So `prepare` shards the
models first and marks them; accelerate prepares the rest. `accumulate`, `no_sync`, `backward`,
`clip_grad_norm_` and `unwrap_model` then work as they are: a sharded model has `no_sync`, and its
gradients have one norm on all ranks.

Three methods would read whole state dicts on every rank: `get_state_dict`, `save_state` and
`load_state`. `prepare` replaces them on the accelerator that it is given, not on the class.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardc.runtime.checks.arguments import check_value
from shardc.runtime.eager.precision import MixedPrecisionPolicy
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.sharding.shard import fully_shard
from shardc.sharding.units import units_of
from shardc.state.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FOLDER = "shardc"
"""The folder of a checkpoint that holds sharded models and their optimizers."""

_PARAM_DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    compile: bool | None = None,
    compile_options: Mapping[str, Any] | None = None,
    **sharding: Any,
) -> Any:
    """Shard the models among `objects`, and have accelerate prepare the others.

    Optimizers may be made before or after; they keep their parameters. A model that is sharded
    already stays as it is.

    Args:
        accelerator: of several processes, without a plugin for FSDP or DeepSpeed.
        objects: models, optimizers, data loaders and schedulers, as for `accelerator.prepare`.
        compile: whether `model.compile(backend="shardc")` is called; None: if the accelerator has
            a dynamo backend.
        compile_options: options of the backend; with them the model is compiled.
        sharding: arguments of `fully_shard`. `units` is "auto" and `mp_policy` follows the
            accelerator's `mixed_precision` (gathers in it, reductions in float32), unless given.

    Returns:
        The objects in their order; the object itself if it is one.

    Raises:
        ValueError: an accelerator that shards by itself, or an optimizer that has state of whole
            parameters; and what `fully_shard` raises.
    """
    check_value("prepare: accelerator", accelerator, Accelerator)
    _check_plugins(accelerator)
    models = [each for each in objects if isinstance(each, nn.Module)]
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
    """Shard one model so that the accelerator takes it for prepared."""
    _check_plugins(accelerator)
    if not units_of(model):
        precision = _precision_of(accelerator)
        fully_shard(model, **{"units": "auto", "mp_policy": precision, **sharding})
    plugin = accelerator.state.dynamo_plugin
    if compile is None:
        compile = compile_options is not None or plugin.backend != DynamoBackend.NO
    if compile and not getattr(model, "_is_accelerate_prepared", False):
        _compile(model, plugin, compile_options)
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    _StateOfModels.take_over(accelerator)


def _check_plugins(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"prepare: the accelerator shards models itself ({kind.value}): make it without that "
            "plugin, and launch without `use_fsdp` or `use_deepspeed` in its configuration"
        )


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
    """Raise for optimizers that would not follow their parameters into shards."""
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
            if isinstance(param, DTensor):
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


# -- state ---------------------------------------------------------------------------------------


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The whole model on the host of rank 0, `{}` on the others; every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def save_sharded(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: StateDictOptions | None = None,
    **more: Any,
) -> None:
    """Write each rank's part of a model, and of its optimizers, into `folder`."""
    state = {"model": get_model_state_dict(model, options=options), **more}
    if optimizers:
        state["optimizer"] = get_optimizer_state_dict(model, optimizers)
    dcp.save(state, checkpoint_id=Path(folder, FOLDER))


def load_sharded_model(
    folder: str | os.PathLike[str], model: nn.Module, options: StateDictOptions | None = None
) -> None:
    """Read into a model what `save_sharded` wrote, at any number of ranks."""
    state = {"model": get_model_state_dict(model, options=options)}
    dcp.load(state, checkpoint_id=Path(folder, FOLDER))
    set_model_state_dict(model, state["model"], options=options)


def load_sharded_optimizers(
    folder: str | os.PathLike[str], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Read into optimizers what `save_sharded` wrote, at any number of ranks."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizers)}
    dcp.load(state, checkpoint_id=Path(folder, FOLDER))
    set_optimizer_state_dict(model, optimizers, state["optimizer"])


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer without accelerate's wrapper."""
    wrapped = isinstance(optimizer, AcceleratedOptimizer)
    inner: Optimizer = optimizer.optimizer if wrapped else optimizer
    return inner


@dataclass
class _StateOfModels:
    """What stands in for three methods of an accelerator that has sharded models."""

    accelerator: Accelerator
    plain_get: Callable[..., Any]
    plain_save: Callable[..., Any]
    plain_load: Callable[..., Any]
    saving: bool = False
    step: int | None = None
    optimizers: list[Any] = field(default_factory=list)

    @classmethod
    def take_over(cls, accelerator: Accelerator) -> None:
        """Replace the methods of this accelerator, once."""
        if isinstance(getattr(accelerator.save_state, "__self__", None), cls):
            return
        self = cls(
            accelerator, accelerator.get_state_dict, accelerator.save_state, accelerator.load_state
        )
        accelerator.get_state_dict = self.get_state_dict
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state
        accelerator.register_save_state_pre_hook(self._write)
        accelerator.register_load_state_pre_hook(self._read)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state on the host of rank 0 for a sharded model, `{}` on the others."""
        if not units_of(model):
            return self.plain_get(model, unwrap=unwrap)
        return {} if self.saving else whole_state(model)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As the accelerator's; sharded models and their optimizers go into a folder of DCP."""
        with self._own_optimizers_aside():
            return self.plain_save(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As the accelerator's; sharded models and optimizers load at any number of ranks."""
        with self._own_optimizers_aside():
            self.plain_load(*args, **kwargs)
        if self.step is not None:
            self.accelerator.step = self.step

    @contextmanager
    def _own_optimizers_aside(self) -> Iterator[None]:
        """Within, accelerate sees only the optimizers of models that are not sharded."""
        everything = self.accelerator._optimizers
        self.optimizers = [each for each in everything if _is_sharded(each)]
        self.accelerator._optimizers = [each for each in everything if not _is_sharded(each)]
        self.saving, self.step = True, None
        try:
            yield
        finally:
            self.accelerator._optimizers, self.saving = everything, False

    def _write(self, models: list[Any], weights: list[Any], folder: str) -> None:
        sharded = self._take_sharded(models, weights)
        if sharded is not None:
            optimizers = [plain_optimizer(each) for each in self.optimizers]
            save_sharded(folder, sharded, optimizers, step=self.accelerator.step)

    def _read(self, models: list[Any], folder: str) -> None:
        sharded = self._take_sharded(models, models)
        if sharded is not None:
            load_sharded_model(folder, sharded)
            if self.optimizers:
                optimizers = [plain_optimizer(each) for each in self.optimizers]
                load_sharded_optimizers(folder, sharded, optimizers)
            state = {"step": 0}  # that of ranks without a file of their own, too
            dcp.load(state, checkpoint_id=Path(folder, FOLDER))
            self.step = state["step"]

    def _take_sharded(self, models: list[Any], entries: list[Any]) -> nn.Module | None:
        """The sharded models as one module; their entries are taken out of the list."""
        found = [(index, each) for index, each in enumerate(models) if units_of(each)]
        for index, _ in reversed(found):
            del entries[index]
        if not found:
            return None
        return found[0][1] if len(found) == 1 else nn.ModuleList([each for _, each in found])


def _is_sharded(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(isinstance(param, ShardTensor) for group in groups for param in group["params"])
