"""Parts that the scripts of transformers' Trainer and of its subclasses share."""

from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from common import FOLDER, HALF, STEPS, report, whole
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback

SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.5,
    "save_strategy": "steps",
    "save_steps": HALF,
    "report_to": "none",
    "disable_tqdm": True,
    "accelerator_config": {"use_configured_state": True},
}
"""Arguments of `TrainingArguments`: everything but the sharding, and what a subclass adds."""

BY_ACCELERATE: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def declare_accelerators() -> None:
    """Declare the processes to be of another device type, as accelerate shards on accelerators."""
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU


def tokenizer(size: int = 131) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` words: letters, numbers, and tokens for padding and the end."""
    words = ["<pad>", "<end>", *map(chr, range(ord("a"), ord("z") + 1)), *map(str, range(size))]
    vocabulary = {word: place for place, word in enumerate(words[:size])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


class Start(TrainerCallback):
    """Whole parameters at the begin of training; subclasses of Trainer may change a model's values.

    Args:
        values: filled at the begin of training.
    """

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values

    def on_train_begin(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
        self.values |= whole(model)


def train_and_report(trainer: Trainer, other: Trainer) -> None:
    """Train, save, resume in another Trainer, and write the report.

    Args:
        trainer: it trains from the start, and exports its model at the end.
        other: it has a model with other values, and resumes half-way.
    """
    start: dict[str, Tensor] = {}
    trainer.add_callback(Start(start))
    trainer.train()
    trained = whole(trainer.model)
    export = FOLDER / "export"
    trainer.save_model(str(export))
    other.train(resume_from_checkpoint=str(Path(trainer.args.output_dir, f"checkpoint-{HALF}")))
    resumed = whole(other.model)
    report(
        trainer.model,
        start=start,
        trained=trained,
        resumed=resumed,
        exported=load_file(next(export.glob("*.safetensors"))),
    )
