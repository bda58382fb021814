"""One small model in the loops of five libraries: trained, saved half-way, resumed, exported.

A loop is a function of a `Run`. It trains from step 0 and saves after `HALF` steps; or, resumed, it
makes a model with other values, loads what was saved, and trains the rest. It returns the
parameters by their names in `Words`, and a function that reads what the library has exported, on
rank 0.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs
from models import Block, Stack, seeded, tokens
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard as fsdp2

import shardc
from shardc import fully_shard

HALF, STEPS, CLIP, LR = 2, 4, 0.5, 0.01
Outcome = tuple[dict[str, Tensor], Callable[[], dict[str, Tensor]]]


class Words(Stack):
    """A language model that takes and returns what Trainer expects."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(input_ids, labels)}


@dataclass(frozen=True)
class Run:
    """How a loop runs.

    Attributes:
        options: of the backend; None: uncompiled.
        fp16: with a scaler whose first scale is too large.
        build: makes the model.
        fsdp2: the library's own sharding, where it has it on CPUs, in the place of shardc.
    """

    mesh: Any
    folder: str
    options: dict[str, Any] | None
    resumed: bool = False
    fp16: bool = False
    build: Callable[[], nn.Module] = Words
    fsdp2: bool = False

    def model(self) -> nn.Module:
        """A model; other values where they are to be loaded."""
        return seeded(self.build, int(self.resumed))

    def shard(self, model: nn.Module, mesh: Any) -> nn.Module:
        """Where the loop leaves it to the user."""
        if not self.fsdp2:
            return fully_shard(model, mesh=mesh, units="auto")
        for block in (module for module in model.modules() if isinstance(module, Block)):
            fsdp2(block, mesh=mesh)
        return fsdp2(model, mesh=mesh)

    def compiled(self, model: nn.Module) -> nn.Module:
        """Where the loop leaves it to the user."""
        if self.options is None:
            return model
        if self.fsdp2:
            return torch.compile(model, backend="aot_eager")
        return torch.compile(model, backend="shardc", options=self.options)

    @property
    def steps(self) -> range:
        """Those to train."""
        return range(HALF if self.resumed else 0, STEPS)

    def saves(self, step: int) -> bool:
        """Whether to save after this step."""
        return step + 1 == HALF and not self.resumed


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Two batches a rank, over and over."""
    seed = 10 * (step % 2) + rank
    return {"input_ids": tokens(seed), "labels": tokens(seed + 5)}


def optimizer_of(model: nn.Module, fp16: bool = False) -> torch.optim.Optimizer:
    """AdamW; SGD where rounding may change the sign of a small gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if fp16:
        return torch.optim.SGD(trained, lr=LR)
    return torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)


def plain_run(model: nn.Module, world: int, fp16: bool = False) -> dict[str, Tensor]:
    """One process: the batches of all ranks in each step, in float32. With `fp16` the first step is
    left out, as its gradients overflow."""
    optimizer = optimizer_of(model, fp16)
    for step in range(int(fp16), STEPS):
        for rank in range(world):
            (model(**batch(step, rank))["loss"] / world).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


SCALES = {"init_scale": 2.0**30, "backoff_factor": 2.0**-18, "growth_interval": 100}
"""Of a `GradScaler`: too large for float16, then 4096."""


def consolidated(folder: str, key: str, prefix: str = "") -> dict[str, Tensor]:
    """A folder of DCP as one file, read back."""
    dcp_to_torch_save(folder, f"{folder}.pt")
    state = torch.load(f"{folder}.pt", weights_only=False)[key]
    return {name.removeprefix(prefix): value for name, value in state.items()}


# -- accelerate and Trainer ------------------------------------------------------------------------


def accelerator_of(**kwargs: Any) -> Accelerator:
    """An accelerator for the CPU ranks of this test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **kwargs)


def with_accelerate(run: Run) -> Outcome:
    from safetensors.torch import load_file

    from shardc.integrations.accelerate import prepare

    precision, scales = "fp16" if run.fp16 else "no", GradScalerKwargs(**SCALES)
    accelerator = accelerator_of(mixed_precision=precision, kwargs_handlers=[scales])
    model = run.model()
    model, optimizer = prepare(
        accelerator, model, optimizer_of(model, run.fp16), mesh=run.mesh,
        compile_options=run.options,
    )  # fmt: skip
    if run.resumed:
        accelerator.load_state(f"{run.folder}/half")
    for step in run.steps:
        accelerator.backward(model(**batch(step, run.mesh.get_rank()))["loss"])
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if run.saves(step):
            accelerator.save_state(f"{run.folder}/half")
    assert (accelerator.scaler is not None) == run.fp16
    assert not run.fp16 or accelerator.scaler.get_scale() == 4096
    accelerator.save_model(model, f"{run.folder}/exported")
    return dict(model.named_parameters()), lambda: load_file(
        f"{run.folder}/exported/model.safetensors"
    )


def with_trainer(run: Run) -> Outcome:
    from safetensors.torch import load_file
    from transformers import TrainingArguments

    from shardc.integrations.transformers import ShardcTrainer

    args = TrainingArguments(
        run.folder, per_device_train_batch_size=2, max_steps=STEPS, save_steps=HALF,
        learning_rate=LR, lr_scheduler_type="constant", max_grad_norm=CLIP, report_to="none",
        disable_tqdm=True, use_cpu=True, train_sampling_strategy="sequential", fp16=run.fp16,
        optim="sgd" if run.fp16 else "adamw_torch",
    )  # fmt: skip
    batches = [batch(step, rank) for step in range(2) for rank in range(run.mesh.size())]
    rows = [{key: value[row] for key, value in each.items()} for each in batches for row in (0, 1)]
    trainer = ShardcTrainer(
        run.model(), args, train_dataset=rows, sharding={"mesh": run.mesh},
        compile_options=run.options,
    )  # fmt: skip
    trainer.accelerator.scaler_handler = GradScalerKwargs(**SCALES)
    trainer.train(resume_from_checkpoint=f"{run.folder}/checkpoint-{HALF}" if run.resumed else None)
    assert not run.fp16 or trainer.accelerator.scaler.get_scale() == 4096
    trainer.save_model(f"{run.folder}/exported")
    return dict(trainer.model.named_parameters()), lambda: load_file(
        f"{run.folder}/exported/model.safetensors"
    )


# -- Lightning -------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning changes the environment and warns about small data sets."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def with_fabric(run: Run) -> Outcome:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision
    from lightning.fabric.strategies import ModelParallelStrategy

    from shardc.integrations.lightning import FabricStrategy

    scaler = torch.amp.GradScaler("cpu", **SCALES)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)] if run.fp16 else []
    strategy: Any = FabricStrategy()
    if run.fsdp2:
        strategy = ModelParallelStrategy(
            lambda model, mesh: run.shard(model, mesh["data_parallel"]), run.mesh.size(), 1
        )
    fabric = Fabric(accelerator="cpu", devices=run.mesh.size(), strategy=strategy, plugins=plugins)
    fabric.launch()
    model = run.model()
    given: Any = run.compiled(model)
    if run.fsdp2:  # its parameters are new ones
        given = fabric.setup_module(given)
        optimizer = fabric.setup_optimizers(optimizer_of(model, run.fp16))
    else:
        given, optimizer = fabric.setup(given, optimizer_of(model, run.fp16))
    state = {"model": given, "optimizer": optimizer}
    if run.resumed:
        fabric.load(f"{run.folder}/half", state)
    for step in run.steps:
        fabric.backward(given(**batch(step, fabric.global_rank))["loss"])
        fabric.clip_gradients(given, optimizer, max_norm=CLIP, error_if_nonfinite=not run.fp16)
        optimizer.step()
        optimizer.zero_grad()
        if run.saves(step):
            fabric.save(f"{run.folder}/half", state)
    assert not run.fp16 or scaler.get_scale() == 4096
    fabric.save(f"{run.folder}/ended{run.resumed}", state)
    return dict(model.named_parameters()), lambda: consolidated(
        f"{run.folder}/ended{run.resumed}", "model"
    )


def with_lightning(run: Run) -> Outcome:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    from shardc.integrations.lightning import TrainerStrategy

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model()

        def configure_model(self) -> None:
            if run.fsdp2:
                run.shard(self.net, self.device_mesh["data_parallel"])
                if run.options is not None:
                    self.net.compile(backend="aot_eager")

        def training_step(self, rows: dict[str, Tensor], index: int) -> Tensor:
            return self.net(**rows)["loss"]

        def configure_optimizers(self) -> Any:
            return optimizer_of(self, run.fp16)

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if run.saves(trainer.global_step - 1):
                trainer.save_checkpoint(f"{run.folder}/half")

    scaler = torch.amp.GradScaler("cpu", **SCALES)
    strategy: Any = TrainerStrategy(compile_options=run.options)
    if run.fsdp2:
        strategy = ModelParallelStrategy(run.mesh.size(), 1)
    trainer = Trainer(
        accelerator="cpu", devices=run.mesh.size(), max_epochs=-1, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=CLIP, use_distributed_sampler=False, callbacks=[Saves()],
        strategy=strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)] if run.fp16 else [],
    )  # fmt: skip
    task, data = Task(), [batch(step, run.mesh.get_rank()) for step in range(2)]
    loader = DataLoader(data, batch_size=None)
    trainer.fit(task, loader, ckpt_path=f"{run.folder}/half" if run.resumed else None)
    assert not run.fp16 or scaler.get_scale() == 4096
    ended = f"{run.folder}/ended{run.resumed}"
    trainer.save_checkpoint(ended)
    return dict(task.net.named_parameters()), lambda: consolidated(ended, "state_dict", "net.")


# -- PEFT ------------------------------------------------------------------------------------------


def adapted() -> nn.Module:
    """`Words` with adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules=["up", "down"], init_lora_weights=False)
    return get_peft_model(Words(), config)


def with_peft(run: Run) -> Outcome:
    from peft import PeftModel

    states: Any = torch_states if run.fsdp2 else shardc

    model = seeded(adapted, int(run.resumed))
    if run.resumed:
        model.base_model.load_state_dict(seeded(adapted).base_model.state_dict())  # as pretrained
        for name, param in model.named_parameters():
            if "lora" in name:
                param.data.add_(1)
    run.shard(model, run.mesh)
    call, optimizer = run.compiled(model), optimizer_of(model)
    trained = states.StateDictOptions(ignore_frozen_params=True, strict=False)

    def state() -> dict[str, Any]:
        model_state, optimizer_state = states.get_state_dict(model, optimizer, options=trained)
        return {"model": model_state, "optimizer": optimizer_state}

    if run.resumed:
        loaded = state()
        dcp.load(loaded, checkpoint_id=f"{run.folder}/half")
        states.set_state_dict(
            model, optimizer, model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"], options=trained,
        )  # fmt: skip
    for step in run.steps:
        call(**batch(step, run.mesh.get_rank()))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if run.saves(step):
            dcp.save(state(), checkpoint_id=f"{run.folder}/half")
    whole = states.get_model_state_dict(
        model, options=states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if dist.get_rank() == 0:
        model.save_pretrained(f"{run.folder}/exported", state_dict=whole)

    def exported() -> dict[str, Tensor]:
        base = seeded(adapted).unload()
        return dict(PeftModel.from_pretrained(base, f"{run.folder}/exported").named_parameters())

    return dict(model.named_parameters()), exported


LOOPS: dict[str, Callable[[Run], Outcome]] = {
    "Trainer": with_trainer,
    "accelerate": with_accelerate,
    "Fabric": with_fabric,
    "Lightning": with_lightning,
    "PEFT": with_peft,
}
