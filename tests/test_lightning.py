"""shardc's strategies for Lightning's Fabric and Trainer, against plain loops."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from loops import quiet
from models import full
from ranks import on_ranks, run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardc import ShardTensor, fully_shard
from shardc.integrations.lightning import FabricStrategy, TrainerStrategy

HERE = "test_lightning"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(9), nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), Block(), Block(), nn.Linear(9, 1))


def batch(step: int, rank: int) -> Tensor:
    """Two batches a rank, over and over."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * (step % 2) + rank))


def loss_of(model: nn.Module, x: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    return (model(x) * scale - x.sum(1, keepdim=True)).square().mean()


def plain_steps(model, optimizer, steps: range, every: int = 1, bf16: bool = False) -> None:
    """What all ranks together train, in one process: `every` batches a step, clipped to 0.5."""
    for step in steps:
        for rank in range(dist.get_world_size()):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = loss_of(model, batch(step, rank), getattr(model, "scale", 1.0))
            (loss / dist.get_world_size() / every).backward()
        if (step + 1) % every == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def check_equal(model: nn.Module, plain: nn.Module) -> None:
    want, start = dict(plain.named_parameters()), dict(net().named_parameters())
    found = {name: full(p).detach() for name, p in model.named_parameters()}
    assert found.keys() == want.keys()
    for name, value in found.items():
        if name in start:
            assert not torch.allclose(want[name], start[name]), f"{name} was not trained"
        torch.testing.assert_close(value, want[name].detach(), rtol=1e-5, atol=1e-6)


# -- Fabric ----------------------------------------------------------------------------------------


def fabric_of(**options) -> Fabric:
    precision = options.pop("precision", "32-true")
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), precision=precision,
        strategy=FabricStrategy(**options),
    )  # fmt: skip
    fabric.launch()
    return fabric


def fabric_steps(fabric, model, optimizer, steps: range, every: int = 1) -> None:
    for step in steps:
        waits = (step + 1) % every != 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = loss_of(model, batch(step, fabric.global_rank))
            fabric.backward(loss / every)
        if not waits:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_fabric_trains_as_one_process(mesh):
    with quiet():
        fabric = fabric_of()
        model, plain = net(), net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        given, optimizer = fabric.setup(model, optimizer)
        assert all(isinstance(p, ShardTensor) for p in model.parameters())
        fabric_steps(fabric, given, optimizer, range(4), every=2)
        plain_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), range(4), every=2)
        check_equal(model, plain)


@on_ranks(2)
def test_fabric_in_mixed_precision_and_from_meta(mesh):
    with quiet():
        fabric = fabric_of(precision="bf16-mixed", units=Block, reshard_after_forward=False)
        with fabric.init_module(empty_init=True):
            model = net()
        assert all(p.is_meta for p in model.parameters())
        torch.manual_seed(7)
        model = fabric.setup_module(model)
        plain = net()
        plain.load_state_dict({name: full(p) for name, p in model.module.named_parameters()})
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.3))
        fabric_steps(fabric, model, optimizer, range(2))
        plain_steps(plain, torch.optim.SGD(plain.parameters(), lr=0.3), range(2), bf16=True)
        for name, value in model.module.named_parameters():
            torch.testing.assert_close(full(value), plain.get_parameter(name), rtol=1e-3, atol=1e-4)


def save_fabric(mesh, path: str) -> None:
    with quiet():
        for folder in (True, False):
            fabric = fabric_of(save_distributed_checkpoint=folder)
            model, optimizer = fabric.setup(model := net(), torch.optim.AdamW(model.parameters()))
            fabric_steps(fabric, model, optimizer, range(2))
            state = {"model": model, "optimizer": optimizer, "step": 2, "note": "kept"}
            fabric.save(f"{path}/{folder}", state)
            with pytest.raises(ValueError, match=r"one sharded model.*has 0"):
                fabric.save(f"{path}/other", {"model": net()})


def resume_fabric(mesh, path: str) -> None:
    """Loaded at any number of ranks, training goes on as if it had not stopped."""
    with quiet():
        plain = net()
        single = torch.load(f"{path}/False")
        plain.load_state_dict(single["model"])  # for everyone
        for folder in (True, False):
            fabric = fabric_of()
            model, again = fabric.setup(model := net(1), torch.optim.AdamW(model.parameters()))
            state = {"model": model, "optimizer": again, "step": 0}
            rest = fabric.load(f"{path}/{folder}", state)
            assert rest["note"] == "kept" and state["step"] == 2
            for name, value in model.module.named_parameters():
                assert torch.equal(full(value), single["model"][name]), name
                saved = single["optimizer"]["state"][name]["exp_avg"]
                assert torch.equal(full(again.state[value]["exp_avg"]), saved), name
            fabric_steps(fabric, model, again, range(2, 3))
            with pytest.raises(KeyError, match=r"no \['absent'\]"):
                fabric.load(f"{path}/{folder}", {"model": model, "absent": 1})
        torch.save(single["model"], f"{path}/raw{dist.get_rank()}")
        fabric.load_raw(f"{path}/raw{dist.get_rank()}", model)
        assert torch.equal(full(model.module[0].weight), plain[0].weight)


def test_fabric_resumes(tmp_path: Path) -> None:
    run_on_ranks(2, HERE, "save_fabric", {"path": str(tmp_path)})
    for world in (2, 1):
        run_on_ranks(world, HERE, "resume_fabric", {"path": str(tmp_path)})


# -- Trainer ---------------------------------------------------------------------------------------


class Task(LightningModule):
    """`meta`: built on meta in `configure_model`; `own`: a parameter beside the network."""

    def __init__(self, seed: int = 0, meta: bool = False, own: bool = False) -> None:
        super().__init__()
        self.meta = meta
        if own:
            self.scale = nn.Parameter(torch.tensor(1.5))
        if not meta:
            self.net = net(seed)

    def configure_model(self) -> None:
        if self.meta and not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = net()
            torch.manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        loss = loss_of(self, x, getattr(self, "scale", 1.0))
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def validation_step(self, x: Tensor, index: int) -> None:
        self.log("validation", loss_of(self, x).detach(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(task: Task, batches: range, ckpt_path: str | None = None, every: int = 1, **options):
    trainer = Trainer(
        accelerator="cpu", devices=dist.get_world_size(), max_epochs=-1, logger=False,
        max_steps=batches.stop // every, enable_checkpointing=False, enable_progress_bar=False,
        gradient_clip_val=0.5, accumulate_grad_batches=every, use_distributed_sampler=False,
        num_sanity_val_steps=0, precision=options.pop("precision", "32-true"),
        strategy=TrainerStrategy(**options),
    )  # fmt: skip
    data = [batch(step, dist.get_rank()) for step in range(2)]
    loaders = (DataLoader(data, batch_size=None) for _ in range(2))
    trainer.fit(task, *loaders, ckpt_path=ckpt_path)
    return trainer


@on_ranks(2)
def test_trainer_trains_as_one_process(mesh):
    """With a parameter of the LightningModule's own; without one: see test_integrations."""
    with quiet():
        task, plain = Task(own=True), net()
        plain.scale = nn.Parameter(torch.tensor(1.5))
        trainer = fit(task, range(4), every=2)
        assert all(isinstance(p, ShardTensor) for p in task.parameters())
        assert trainer.global_step == 2 and "validation" in trainer.callback_metrics
        plain_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), range(4), every=2)
        check_equal(task.net, nn.Sequential(*plain))
        torch.testing.assert_close(full(task.scale).detach(), plain.scale.detach())
        assert plain.scale != 1.5


def save_trainer(mesh, path: str) -> None:
    with quiet():
        for folder in (True, False):
            task = Task(meta=folder)  # their values differ, as meta ones come from another seed
            trainer = fit(task, range(2), save_distributed_checkpoint=folder)
            trainer.save_checkpoint(f"{path}/{folder}")
            ended = {name: full(p).detach().clone() for name, p in task.named_parameters()}
            trainer = fit(Task(1), range(4), f"{path}/{folder}")
            values = {n: full(p).detach() for n, p in trainer.lightning_module.named_parameters()}
            if dist.get_rank() == 0:
                torch.save((ended, values), f"{path}/ended_{folder}")


def resume_trainer(mesh, path: str) -> None:
    with quiet():
        for folder in (True, False):
            ended, values = torch.load(f"{path}/ended_{folder}")
            task = Task(1)
            trainer = fit(task, range(2), f"{path}/{folder}")  # nothing is left to do
            assert trainer.global_step == 2
            for name, param in task.named_parameters():
                assert torch.equal(full(param), ended[name]), name
            again = Task(1, meta=True)
            assert fit(again, range(4), f"{path}/{folder}").global_step == 4
            for name, param in again.named_parameters():
                assert not torch.equal(values[name], ended[name])
                if dist.get_world_size() == 2:
                    assert torch.equal(full(param), values[name]), name


def test_trainer_resumes(tmp_path: Path) -> None:
    run_on_ranks(2, HERE, "save_trainer", {"path": str(tmp_path)})
    for world in (2, 1):
        run_on_ranks(world, HERE, "resume_trainer", {"path": str(tmp_path)})
    state = torch.load(tmp_path / "False", weights_only=False)["state_dict"]
    Task().load_state_dict(state)  # the single file is everyone's


@on_ranks(2)
def test_a_model_may_be_sharded_by_its_own_rules(mesh):
    with quiet():
        seen = []

        def shard(model: nn.Module, device_mesh) -> None:
            seen.append(device_mesh.mesh_dim_names)
            for part in model.net if isinstance(model, Task) else model:
                fully_shard(part, mesh=device_mesh["data_parallel"])

        task, plain = Task(), net()
        fit(task, range(2), shard_fn=shard)
        plain_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.05), range(2))
        check_equal(task.net, plain)
        fabric_of(shard_fn=shard).setup_module(net())
        assert seen == [("data_parallel", "tensor_parallel")] * 2
