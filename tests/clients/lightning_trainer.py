"""Lightning's Trainer with `ModelParallelStrategy`; the module shards itself by FSDP2."""

import lightning
import torch
from common import FOLDER, HALF, STEPS, WAYS, llama, report, rows, whole
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


class Language(lightning.LightningModule):
    """A language model, sharded block by block."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = llama(seed)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        if "compiled" in WAYS:
            self.model.compile(backend="shardc", options={"executor": "eager"})

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        data = rows(2 * 2 * HALF)  # a resumed epoch would begin at its first batch
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(seed: int, name: str, resumed: str | None = None) -> Language:
    """A module that a Trainer has trained; its checkpoints are whole files."""
    half = ModelCheckpoint(FOLDER / name, "{step}", every_n_train_steps=HALF, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(save_distributed_checkpoint=False),
        max_steps=STEPS,
        gradient_clip_val=0.5,
        callbacks=[half],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Language(seed)
    trainer.fit(module, ckpt_path=resumed)
    return module


start = whole(Language(seed=0))
trained = train(0, "run")
resumed = train(1, "other", resumed=str(FOLDER / "run" / f"step={HALF}.ckpt"))
report(
    trained,
    start=start,
    trained=whole(trained),
    resumed=whole(resumed),
    exported=torch.load(FOLDER / "run" / f"step={STEPS}.ckpt")["state_dict"],
)
