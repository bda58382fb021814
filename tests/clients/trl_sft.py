"""TRL's SFTTrainer, which shards by accelerate.

It would train in bf16, where a compiled step of FSDP2 is as far from its uncompiled step as bf16
rounds. So it trains in float32.
"""

from common import FOLDER, WAYS, llama, rows
from datasets import Dataset
from trainers import BY_ACCELERATE, SETTINGS, declare_accelerators, tokenizer, train_and_report
from trl import SFTConfig, SFTTrainer


def trainer(name: str, seed: int) -> SFTTrainer:
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    model = llama(seed)
    if "compiled" in WAYS:
        model.compile(backend="shardc", options={"executor": "eager"})
    return SFTTrainer(
        model,
        SFTConfig(str(FOLDER / name), bf16=False, **SETTINGS, **BY_ACCELERATE),
        train_dataset=data,
        processing_class=tokenizer(),
    )


declare_accelerators()
train_and_report(trainer("run", seed=0), trainer("other", seed=1))
