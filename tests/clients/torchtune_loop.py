"""torchtune's recipe `full_finetune_distributed`, from a config; an epoch has two steps.

Its figures of memory and its emptying of the cache fail on CPUs: they are left out. It imports
`torchao.dtypes.nf4tensor`, so that it needs torchao below 0.15.
"""

import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtune.training
from common import FOLDER, HALF, STEPS, WAYS, report, rows, whole
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import Dataset
from torchtune.models.llama3 import llama3

SIZES = {
    "vocab_size": 131, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32,
    "max_seq_len": 32, "intermediate_dim": 48,
}  # fmt: skip
BASE, OUTPUT = FOLDER / f"base{os.environ['RANK']}", FOLDER / "output"
MODEL = "model-00001-of-00001.bin"
RECIPE = runpy.run_path(
    str(Path(torchtune.__file__).parents[1] / "recipes" / "full_finetune_distributed.py")
)["FullFinetuneRecipeDistributed"]
torchtune.training.get_memory_stats = lambda device: {}
torchtune.training.cleanup_before_training = lambda: None
torchtune.training.log_memory_stats = lambda stats: None
os.environ["TORCH_COMPILE_BACKEND"] = "shardc"
IN_BACKWARD = "in_backward" in WAYS
"""Whether each parameter has an optimizer of its own, which a hook steps in the backward."""


class Tokenizer:
    """Stands for a tokenizer's file: the recipe asks for the padding alone."""

    pad_id = 0


class Rows(Dataset[dict[str, list[int]]]):
    """Tokenized rows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.rows = [row["input_ids"].tolist() for row in rows()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self.rows[index], "labels": self.rows[index]}


def config(resumed: bool) -> Any:
    """The config of a run; also users of the command `tune` write one."""
    return OmegaConf.create(
        {
            "output_dir": str(OUTPUT),
            "tokenizer": {"_component_": "__main__.Tokenizer"},
            "dataset": {"_component_": "__main__.Rows"},
            "seed": 7,
            "shuffle": True,
            "model": {"_component_": "torchtune.models.llama3.llama3", **SIZES},
            "checkpointer": {
                "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
                "checkpoint_dir": str(BASE),
                "checkpoint_files": [f"epoch_0/{MODEL}" if resumed else MODEL],
                "recipe_checkpoint": None,
                "output_dir": str(OUTPUT),
                "model_type": "LLAMA3",
            },
            "resume_from_checkpoint": resumed,
            "batch_size": 2,
            "epochs": STEPS // HALF,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "max_steps_per_epoch": HALF,
            "gradient_accumulation_steps": 1 if IN_BACKWARD else 2,
            "clip_grad_norm": None if IN_BACKWARD else 0.5,
            "optimizer_in_bwd": IN_BACKWARD,
            "lr_scheduler": {
                "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                "num_warmup_steps": 1,
            },
            "compile": "compiled" in WAYS,
            "device": "cpu",
            "dtype": "fp32",
            "enable_activation_checkpointing": True,
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(FOLDER / "logs"),
            },
        }
    )


def train(resumed: bool) -> Any:
    """The recipe after its training."""
    settings = config(resumed)
    recipe = RECIPE(settings)
    recipe.setup(settings)
    recipe.train()
    return recipe


def exported() -> dict[str, Tensor]:
    """The last epoch's model, on rank 0; its folder goes, as though the run had ended before it."""
    folder = OUTPUT / f"epoch_{STEPS // HALF - 1}"
    values: dict[str, Tensor] = torch.load(folder / MODEL, weights_only=True)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return values


torch.manual_seed(0)
base = llama3(**SIZES)
start = whole(base)
BASE.mkdir()
torch.save(base.state_dict(), BASE / MODEL)
trained = train(resumed=False)
values, export = whole(trained._model), exported()
RECIPE.setup.__globals__["init_process_group"] = lambda backend: None  # the first run's stays
resumed = train(resumed=True)._model
report(resumed, start=start, trained=values, resumed=whole(resumed), exported=export)
