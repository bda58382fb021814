"""OLMo-core's `TransformerTrainModule` with FSDP, and its `Checkpointer`.

Its `Trainer` wants a data pipeline on disk: a mock takes the metrics that the module records.
"""

import subprocess
import sys
from unittest.mock import MagicMock

import olmo_core.distributed.parallel
import torch
import torch.distributed as dist
from common import FOLDER, HALF, STEPS, report, rows, whole
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, OptimGroupOverride
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module.transformer import (
    TransformerDataParallelConfig,
    TransformerDataParallelWrappingStrategy,
    TransformerTrainModule,
    TransformerTrainModuleConfig,
)
from torch import Tensor

SAVED, EXPORT = FOLDER / "last" / "model_and_optim", FOLDER / "export"
UNSHARD = f"""
from olmo_core.distributed.checkpoint import unshard_checkpoint
unshard_checkpoint({str(SAVED)!r}, {str(EXPORT)!r}, optim=False)
"""


def build(seed: int) -> TransformerTrainModule:
    """A train module: blocks in parts (`fine_grained`), prefetch, embeddings without decay."""
    model = TransformerConfig.llama_like(
        d_model=32, vocab_size=131, n_layers=2, n_heads=4, n_kv_heads=2,
        hidden_size_multiple_of=16, init_seed=seed,
    ).build(init_device="meta")  # fmt: skip
    config = TransformerTrainModuleConfig(
        rank_microbatch_size=18,
        max_sequence_length=9,
        optim=AdamWConfig(
            lr=0.01,
            group_overrides=[OptimGroupOverride(["embeddings.weight"], {"weight_decay": 0.0})],
        ),
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp,
            wrapping_strategy=TransformerDataParallelWrappingStrategy.fine_grained,
            prefetch_factor=1,
        ),
        max_grad_norm=0.5,
    )
    module = config.build(model, device=torch.device("cpu"))
    module._attach_trainer(MagicMock())
    return module


def train(module: TransformerTrainModule, resumed: bool) -> dict[str, Tensor]:
    """The parameters after training."""
    checkpointer = Checkpointer(work_dir=FOLDER / "work")
    if resumed:
        checkpointer.load(str(FOLDER / "half"), module, load_trainer_state=False)
    for step in range(HALF if resumed else 0, STEPS):
        mine = rows(32)[8 * step + 4 * dist.get_rank() :][:4]
        module.zero_grads()
        module.train_batch({"input_ids": torch.stack([row["input_ids"] for row in mine])})
        module.optim_step()
        if step + 1 == HALF and not resumed:
            checkpointer.save(str(FOLDER / "half"), module, {})
    if not resumed:
        checkpointer.save(str(SAVED.parent), module, {})
    return whole(module.model)


dist.init_process_group("gloo")
module = build(seed=1)
start = whole(module.model)
trained = train(module, resumed=False)
if dist.get_rank() == 0:
    subprocess.run([sys.executable, "-c", UNSHARD], check=True)  # it refuses processes with a group
dist.barrier()
exported = torch.load(EXPORT / "model.pt", weights_only=True)
olmo_core.distributed.parallel._WORLD_MESH = None  # one a process, else
resumed = train(build(seed=2), resumed=True)
report(module.model, start=start, trained=trained, resumed=resumed, exported=exported)
