"""transformers: a Trainer that shards its model.

Trainer places and wraps the model in methods that subclasses override, and leaves the rest to
accelerate. `ShardcTrainerMixin` overrides these methods. It shards the model where Trainer would
wrap the model in DDP: after Trainer has changed the model (activation checkpointing, liger
kernels), and before Trainer makes the optimizer. Everything else of Trainer runs as it is.

A checkpoint has the whole model, which rank 0 writes for `from_pretrained`. The checkpoint's folder
`shardc` has each rank's part of the model and the optimizer. Training resumes from these parts, at
any number of ranks. Training resumes from the checkpoint of an unsharded Trainer, too.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from shardc.integrations.accelerate import shard
from shardc.integrations.accelerate_state import (
    FOLDER,
    load_sharded_model,
    load_sharded_optimizers,
    plain_optimizer,
    save_sharded,
    whole_state,
)
from shardc.optim.whole_tensor import WholeTensorOptimizer
from shardc.sharding.materialize import materialize
from shardc.state.pretrained import load_pretrained
from shardc.state.ranks import ModelRanks
from shardc.state.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_optimizer_state_dict,
)
from shardc.state.values import full_values

_Base: Any = object  # the Trainer that the mixin is mixed into

_WHOLE = ("adafactor",)
"""Optimizers of Trainer (`optim=`) that need whole matrices."""


class ShardcTrainerMixin(_Base):
    """A mixin for a Trainer, which shards the model of the Trainer.

    `class Mine(ShardcTrainerMixin, SFTTrainer): pass`. `TrainingArguments` keep their meaning for
    precision (`bf16`), activation checkpointing, accumulation, clipping and compiling
    (`torch_compile`). A sharded model stays as it is; a model on meta is sharded, then initialised.

    Args:
        args: arguments of the Trainer.
        sharding: arguments of `fully_shard`; `units` is "auto" and `mp_policy` follows `bf16` and
            `fp16`, unless given.
        compile_options: options of the backend "shardc"; with them the model is compiled.
        whole_checkpoints: whether checkpoints also have the whole model for `from_pretrained`.
        kwargs: arguments of the Trainer, by name.
    """

    def __init__(
        self,
        *args: Any,
        sharding: Mapping[str, Any] | None = None,
        compile_options: Mapping[str, Any] | None = None,
        whole_checkpoints: bool = True,
        **kwargs: Any,
    ) -> None:
        self._sharding = dict(sharding or {})
        self._compile_options = compile_options
        self._whole_checkpoints = whole_checkpoints
        self._saves_checkpoint = False
        super().__init__(*args, **kwargs)

    # -- sharding ----------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `fully_shard` moves each rank's part only."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Shard the model in place, once."""
        shard(self.accelerator, model, compile_options=self._compile_options, **self._sharding)
        if any(param.is_meta for param in model.parameters()):
            with torch.random.fork_rng():
                torch.manual_seed(self.args.seed)  # the same seed on every rank
                _initialise(model)
        return model

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        self._wrap_model(self.model)
        if resume_from_checkpoint is not None:
            self._read_model(resume_from_checkpoint)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Choose the optimizer as Trainer does; give it whole matrices if it needs them."""
        made, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return (_given_whole(made) if args.optim in _WHOLE else made), kwargs

    # -- saving ------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._saves_checkpoint = not (self._whole_checkpoints or self.args.save_only_model)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saves_checkpoint = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model for `from_pretrained` from rank 0; every rank must call it."""
        if self._saves_checkpoint:
            os.makedirs(output_dir or self.args.output_dir, exist_ok=True)
        else:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, _exported(self.model) if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = plain_optimizer(self.optimizer)
        save_sharded(output_dir, self.model, [optimizer], _model_options(self.model))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    # -- loading -----------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a whole model; without `model` do nothing: `_prepare_for_training` loads later."""
        if model is None:
            return
        names = ("model.safetensors", "model.safetensors.index.json")
        if any(Path(resume_from_checkpoint, name).is_file() for name in names):
            keys = load_pretrained(model, resume_from_checkpoint, strict=False)
            self._issue_warnings_after_load(keys)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self._read_model(self.state.best_model_checkpoint)

    def _read_model(self, folder: str) -> None:
        if Path(folder, FOLDER).is_dir():
            load_sharded_model(folder, self.model, _model_options(self.model))
        else:
            self._load_from_checkpoint(folder, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, SCHEDULER_NAME).is_file():
            return
        optimizer, whole = plain_optimizer(self.optimizer), Path(checkpoint, OPTIMIZER_NAME)
        if Path(checkpoint, FOLDER).is_dir():
            load_sharded_optimizers(checkpoint, self.model, [optimizer])
        elif whole.is_file():
            state = torch.load(whole, map_location="cpu", weights_only=True)
            set_optimizer_state_dict(self.model, optimizer, state)
        schedule = torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)


class ShardcTrainer(ShardcTrainerMixin, Trainer):
    """`transformers.Trainer` for a model that is sharded: see `ShardcTrainerMixin`."""


def _model_options(model: nn.Module) -> StateDictOptions:
    """Options for the checkpoint of a model; a model with adapters has trained parameters only."""
    adapters = hasattr(model, "peft_config")
    return StateDictOptions(ignore_frozen_params=adapters, strict=not adapters)


def _exported(model: nn.Module) -> dict[str, Any]:
    """The entries that `save_pretrained` writes, whole on the host of rank 0; only the adapters, if
    the model has some."""
    adapters: Any = getattr(model, "peft_config", None)
    if adapters is None:
        return whole_state(model)
    from peft import get_peft_model_state_dict

    state = get_model_state_dict(model)
    kept = {
        id(value)
        for adapter in adapters
        for value in get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter
        ).values()
    }
    chosen = {name: value for name, value in state.items() if id(value) in kept}
    return full_values(chosen, ModelRanks.of(model), offload=True)


def _given_whole(make: type[Optimizer]) -> type[Optimizer]:
    """Make the class of an optimizer on whole matrices: Trainer tells classes from factories."""

    class WholeTensors(WholeTensorOptimizer):
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(make, params, **settings)

    return WholeTensors


def _initialise(model: nn.Module) -> None:
    """Initialise a sharded model on meta by `init_weights`, or else each module by itself.

    With `init_weights`, `materialize` only allocates memory.
    """
    own = getattr(model, "init_weights", None)
    materialize(model, init_fn=None if own is None else lambda module: None)
    if own is not None:
        own()
