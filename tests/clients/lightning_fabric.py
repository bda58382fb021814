"""Lightning's Fabric with `ModelParallelStrategy`, which shards by a function of the user."""

import subprocess
import sys

import torch
import torch.distributed as dist
from common import FOLDER, HALF, STEPS, WAYS, llama, report, rows, whole
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    if "compiled" in WAYS:
        model.compile(backend="shardc", options={"executor": "eager"})
    return model


def train(fabric: Fabric, resumed: bool) -> nn.Module:
    """The trained model, as Fabric wraps it."""
    model = fabric.setup_module(llama(seed=int(resumed)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resumed:
        fabric.load(FOLDER / "half", state)
    for step, batch in enumerate(fabric.setup_dataloaders(DataLoader(rows(), batch_size=2))):
        if step < state["step"]:
            continue
        fabric.backward(model(**batch).loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
        if step + 1 == HALF and not resumed:
            fabric.save(FOLDER / "half", state)
        if step + 1 == STEPS:
            break
    if not resumed:
        fabric.save(FOLDER / "end", {"model": model})
    return model


def export() -> dict[str, Tensor]:
    """The last checkpoint, made one file by Lightning's command."""
    command = [sys.executable, "-m", "lightning.fabric.utilities.consolidate_checkpoint"]
    if dist.get_rank() == 0:
        subprocess.run([*command, str(FOLDER / "end"), "--output_file", str(FOLDER / "end.ckpt")])
    dist.barrier()
    return torch.load(FOLDER / "end.ckpt")["model"]


fabric = Fabric(accelerator="cpu", devices=2, strategy=ModelParallelStrategy(shard))
fabric.launch()
start = whole(llama())
trained = train(fabric, resumed=False)
report(
    trained,
    start=start,
    trained=whole(trained.module),
    resumed=whole(train(fabric, resumed=True).module),
    exported=export(),
)
