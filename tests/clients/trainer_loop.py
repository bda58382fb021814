"""transformers' Trainer with `fsdp` and version 2, which shards by accelerate.

`torch_compile_backend` takes accelerate's own list of backends only, so the model is compiled
before Trainer has it.
"""

from common import FOLDER, WAYS, llama, rows
from trainers import BY_ACCELERATE, SETTINGS, declare_accelerators, train_and_report
from transformers import Trainer, TrainingArguments


def trainer(name: str, seed: int) -> Trainer:
    args = TrainingArguments(str(FOLDER / name), **SETTINGS, **BY_ACCELERATE)
    model = llama(seed)
    if "compiled" in WAYS:
        model.compile(backend="shardc", options={"executor": "eager"})
    return Trainer(model, args, train_dataset=rows())


declare_accelerators()
train_and_report(trainer("run", seed=0), trainer("other", seed=1))
