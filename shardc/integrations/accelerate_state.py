"""The state of accelerate's sharded models: whole on rank 0, or in a folder of DCP.

`get_state_dict`, `save_state` and `load_state` of an accelerator would read whole state dicts on
every rank. `StateOfModels` replaces these methods on one accelerator, not on the class.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from shardc.runtime.tensor.shard_tensor import ShardTensor
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


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The whole model on the host of rank 0, `{}` on other ranks; every rank must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def save_sharded(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: StateDictOptions | None = None,
    **more: Any,
) -> None:
    """Write each rank's part of a model and of its optimizers into `folder`."""
    state = {"model": get_model_state_dict(model, options=options), **more}
    if optimizers:
        state["optimizer"] = get_optimizer_state_dict(model, optimizers)
    dcp.save(state, checkpoint_id=Path(folder, FOLDER))


def load_sharded_model(
    folder: str | os.PathLike[str], model: nn.Module, options: StateDictOptions | None = None
) -> None:
    """Load a model from the folder that `save_sharded` wrote, at any number of ranks."""
    state = {"model": get_model_state_dict(model, options=options)}
    dcp.load(state, checkpoint_id=Path(folder, FOLDER))
    set_model_state_dict(model, state["model"], options=options)


def load_sharded_optimizers(
    folder: str | os.PathLike[str], model: nn.Module, optimizers: Sequence[Optimizer]
) -> None:
    """Load optimizers from the folder that `save_sharded` wrote, at any number of ranks."""
    state = {"optimizer": get_optimizer_state_dict(model, optimizers)}
    dcp.load(state, checkpoint_id=Path(folder, FOLDER))
    set_optimizer_state_dict(model, optimizers, state["optimizer"])


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer without accelerate's wrapper."""
    wrapped = isinstance(optimizer, AcceleratedOptimizer)
    inner: Optimizer = optimizer.optimizer if wrapped else optimizer
    return inner


@dataclass
class StateOfModels:
    """Stand-ins for three methods of an accelerator that has sharded models."""

    accelerator: Accelerator
    plain_get: Callable[..., Any]
    plain_save: Callable[..., Any]
    plain_load: Callable[..., Any]
    saving: bool = False
    step: int | None = None
    optimizers: list[Optimizer] = field(default_factory=list)

    @classmethod
    def take_over(cls, accelerator: Accelerator) -> None:
        """Replace the three methods of this accelerator, once."""
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
        """The whole state of a sharded model on the host of rank 0, `{}` on other ranks."""
        if not units_of(model):
            return self.plain_get(model, unwrap=unwrap)
        return {} if self.saving else whole_state(model)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as accelerate does, but sharded models and their optimizers in a folder of DCP."""
        with self._own_optimizers_aside():
            return self.plain_save(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load as accelerate does; sharded models and optimizers load at any number of ranks."""
        with self._own_optimizers_aside():
            self.plain_load(*args, **kwargs)
        if self.step is not None:
            self.accelerator.step = self.step

    @contextmanager
    def _own_optimizers_aside(self) -> Iterator[None]:
        """Hide the optimizers of sharded models from accelerate inside."""
        everything = self.accelerator._optimizers
        self.optimizers = [plain_optimizer(each) for each in everything if _is_sharded(each)]
        self.accelerator._optimizers = [each for each in everything if not _is_sharded(each)]
        self.saving, self.step = True, None
        try:
            yield
        finally:
            self.accelerator._optimizers, self.saving = everything, False

    def _write(self, models: list[Any], weights: list[Any], folder: str) -> None:
        sharded = self._take_sharded(models, weights)
        if sharded is not None:
            save_sharded(folder, sharded, self.optimizers, step=self.accelerator.step)

    def _read(self, models: list[Any], folder: str) -> None:
        sharded = self._take_sharded(models, models)
        if sharded is not None:
            load_sharded_model(folder, sharded)
            if self.optimizers:
                load_sharded_optimizers(folder, sharded, self.optimizers)
            state = {"step": 0}  # also of ranks without a file of their own
            dcp.load(state, checkpoint_id=Path(folder, FOLDER))
            self.step = state["step"]

    def _take_sharded(self, models: list[Any], entries: list[Any]) -> nn.Module | None:
        """The sharded models as one module; their entries are removed from `entries`."""
        found = [(index, each) for index, each in enumerate(models) if units_of(each)]
        for index, _ in reversed(found):
            del entries[index]
        if not found:
            return None
        return found[0][1] if len(found) == 1 else nn.ModuleList([each for _, each in found])


def _is_sharded(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(isinstance(param, ShardTensor) for group in groups for param in group["params"])
