"""TRL's GRPOTrainer, which shards by accelerate and generates with the sharded model.

It trains in bf16, its default. Blocks are compiled, because each length of a generated text would
be a graph of the whole model. (And traced as a whole, transformers' Llama keeps a mask of attention
that it leaves out otherwise. In bf16 the attention then has other gradients, unsharded, too.)
"""

import torch
from accelerate import PartialState
from common import FOLDER, WAYS, llama
from datasets import Dataset
from trainers import BY_ACCELERATE, SETTINGS, declare_accelerators, tokenizer, train_and_report
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **kwargs: object) -> list[float]:
    """More for early letters of the alphabet."""
    return [-sum(map(ord, text)) / 100 for text in completions]


def trainer(name: str) -> GRPOTrainer:
    """A Trainer that loads its model, and the reference for `beta`, from a folder."""
    args = GRPOConfig(
        str(FOLDER / name), num_generations=4, max_completion_length=5, beta=0.1,
        **SETTINGS, **BY_ACCELERATE,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": text} for text in ["a b c", "d e f", "g h", "i j"] * 4])
    path, words = str(FOLDER / "start"), tokenizer()
    made = GRPOTrainer(path, reward, args, train_dataset=data, processing_class=words)
    if "compiled" in WAYS:
        for block in made.model.model.layers:
            block.compile(backend="shardc", options={"executor": "eager"})
    return made


declare_accelerators()
if PartialState().is_main_process:
    llama().save_pretrained(FOLDER / "start")
PartialState().wait_for_everyone()
other = trainer("other")
with torch.no_grad():
    for param in other.model.parameters():  # the reference must be that of the first run
        param.mul_(2)
train_and_report(trainer("run"), other)
