"""accelerate's loops over sharded models: equal to one process, saved, resumed, exported."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from loops import accelerator_of
from models import Stack, full, seeded, tokens
from ranks import on_ranks, run_on_ranks
from torch.utils.data import DataLoader, TensorDataset

from shardc import MixedPrecisionPolicy, ShardTensor, fully_shard
from shardc.integrations.accelerate import prepare


def loader(batch: int) -> DataLoader:
    return DataLoader(TensorDataset(tokens(0, (24, 7)), tokens(1, (24, 7))), batch_size=batch)


def plain_steps(accumulated: int, clip: float) -> tuple[Any, list[float]]:
    """One process: a model after three steps over batches of 4, and the norms of its gradients."""
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    batches, norms = iter(loader(4)), []
    for _ in range(3):
        for _ in range(accumulated):
            (model(*next(batches)) / accumulated).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        for _ in range(2):  # accelerate steps a schedule once for every process
            schedule.step()
        optimizer.zero_grad()
    return model, norms


def sharded_run(accumulated: int, mesh: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What `prepare` gives for batches of 2 on each of two ranks."""
    plugin = GradientAccumulationPlugin(accumulated)
    accelerator = accelerator_of(gradient_accumulation_plugin=plugin)
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    return accelerator, *prepare(
        accelerator, model, optimizer, loader(2), schedule, mesh=mesh, **kwargs
    )


def train(accelerator: Any, objects: Any, clip: float, batches: Any) -> list[float]:
    """accelerate's own loop; the norms."""
    model, optimizer, _, schedule = objects
    norms = []
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x, y))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return norms


def assert_equal(model: Any, plain: Any, **tolerance: Any) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, ShardTensor) and not isinstance(theirs, ShardTensor)
        torch.testing.assert_close(full(ours), theirs, msg=name, **tolerance)


@on_ranks(2)
def test_trains_as_one_process(mesh):
    accumulated = 2  # steps of one micro-batch are those of test_integrations
    accelerator, *objects = sharded_run(accumulated, mesh)
    plain, norms = plain_steps(accumulated, 0.1)
    seen = train(accelerator, objects, 0.1, list(objects[2])[: 3 * accumulated])
    assert all(norm > 0.1 for norm in norms)
    torch.testing.assert_close(seen, norms, rtol=1e-4, atol=1e-6)
    assert_equal(objects[0], plain, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_the_sum_of_micro_batches_is_reduced_once(mesh):
    accelerator, model, *_ = sharded_run(2, mesh)
    with accelerator.accumulate(model):
        accelerator.backward(model(tokens(0), tokens(1)))
        assert not accelerator.sync_gradients
    assert all(param.grad is None for param in model.parameters())  # the sum waits
    with accelerator.accumulate(model):
        accelerator.backward(model(tokens(0), tokens(1)))
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_state_dicts_and_unwrapping(mesh, tmp_path):
    accelerator, model, *_ = sharded_run(1, mesh, compile_options={"executor": "eager"})
    assert accelerator.unwrap_model(model) is model
    whole = accelerator.get_state_dict(model)
    assert (whole == {}) == (mesh.get_rank() != 0)
    for name, value in whole.items():
        assert type(value) is torch.Tensor and torch.equal(value, seeded(Stack).state_dict()[name])
    accelerator.save_model(model, tmp_path)
    dist.barrier()
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors").keys() == seeded(Stack).state_dict().keys()
    other = accelerator_of()
    assert other.get_state_dict(seeded(Stack)).keys() == whole.keys() or mesh.get_rank() != 0


def saving(mesh: Any, folder: str) -> None:
    """Two steps of three micro-batches and one micro-batch more, saved; then another step."""
    accelerator, *objects = sharded_run(3, mesh)
    batches = list(objects[2])
    train(accelerator, objects, 0.1, batches[:3])
    accelerator.save_state(folder)
    train(accelerator, objects, 0.1, batches[3:6])
    whole = accelerator.get_state_dict(objects[0])
    if mesh.get_rank() == 0:
        torch.save(whole, f"{folder}/ended.pt")


def resuming(mesh: Any, folder: str) -> None:
    """At two ranks to the last bit; at any other number the global batch stays the same."""
    world = mesh.size()
    accelerator, *objects = sharded_run(3, mesh)
    with torch.no_grad():
        for param in objects[0].parameters():
            param.add_(1)
    accelerator.load_state(folder)
    assert accelerator.step == 3
    assert len(accelerator._optimizers) == 1
    batches = list(loader(4 // world))[3 * world : 6 * world]
    train(accelerator, objects, 0.1, batches[mesh.get_rank() :: world])
    ended = torch.load(f"{folder}/ended.pt")
    for name, param in objects[0].named_parameters():
        if world == 2:
            assert torch.equal(full(param), ended[name]), name
        else:
            torch.testing.assert_close(full(param), ended[name], rtol=1e-4, atol=1e-5)


def test_resumes(tmp_path: Path) -> None:
    """The optimizer, the schedule and the count of micro-batches are those of the save."""
    run_on_ranks(2, "test_accelerate", "saving", {"folder": str(tmp_path)})
    assert (tmp_path / "shardc" / ".metadata").exists()
    assert not (tmp_path / "model.safetensors").exists()
    for world in (2, 1):
        run_on_ranks(world, "test_accelerate", "resuming", {"folder": str(tmp_path)})


@on_ranks(2)
def test_beside_a_model_that_is_not_sharded(mesh, tmp_path):
    accelerator, model, *_ = sharded_run(1, mesh)
    second = seeded(lambda: Stack(1), 3)
    prepare(accelerator, second)
    plain = accelerator.prepare_model(torch.nn.Linear(3, 3), evaluation_mode=True)
    kept = [[full(p).clone() for p in each.parameters()] for each in (model, second, plain)]
    accelerator.save_state(tmp_path)
    with torch.no_grad():
        for each in (model, second, plain):
            for param in each.parameters():
                param.add_(1)
    accelerator.wait_for_everyone()
    accelerator.load_state(tmp_path)
    for each, values in zip((model, second, plain), kept, strict=True):
        assert all(torch.equal(full(p), v) for p, v in zip(each.parameters(), values, strict=True))


@on_ranks(2)
def test_mixed_precision_is_a_policy(mesh):
    accelerator = accelerator_of(mixed_precision="bf16")
    model = prepare(accelerator, seeded(Stack), mesh=mesh)
    seen = []
    model.layers[0].up.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    loss = model(tokens(0), tokens(1))
    loss.backward()
    assert seen[0].dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    plain = fully_shard(
        seeded(Stack), mesh=mesh, units="auto",
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )  # fmt: skip
    plain(tokens(0), tokens(1)).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


@on_ranks(2)
def test_refused(mesh):
    accelerator, model = accelerator_of(), seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens(0), tokens(1)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"AdamW has stepped with the whole parameter 'embed"):
        prepare(accelerator, model, optimizer, mesh=mesh)
    with pytest.raises(TypeError, match="accelerator"):
        prepare(model, model)
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ValueError, match="shards models itself"):
        prepare(accelerator, seeded(Stack))
    assert not any(isinstance(param, ShardTensor) for param in copy.copy(model).parameters())


@on_ranks(2)
def test_a_sharded_model_in_ddp_names_the_way_out(mesh):
    accelerator = accelerator_of()
    model = fully_shard(seeded(Stack), mesh=mesh)
    with pytest.raises(RuntimeError, match=r"shardc\.integrations\.accelerate\.prepare"):
        accelerator.prepare(model)
