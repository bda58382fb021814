"""torchao's optimizers with quantised state on sharded parameters: as unsharded."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import full, mean_over_ranks, seeded
from ranks import mesh_of, on_ranks, run_on_ranks
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit

from shardc import ShardTensor, fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
from shardc.runtime.tensor.quantised_state import BlockState

KINDS = {"8bit": AdamW8bit, "4bit": AdamW4bit, "fp8": AdamWFp8}
BLOCKS = {"8bit": 256, "4bit": 128, "fp8": 256}
ERRORS = {"8bit": 0.01, "4bit": 0.15, "fp8": 0.04}
"""At most half of the largest step of the map of values, as a share of a block's largest."""
LR = 1e-2


def model():
    """Parameters of which some are large enough, and one is cut inside of a block."""
    return seeded(lambda: nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 64)))


def set_gradients(sharded, plain, number, mesh):
    """The same to both, of the plain model."""
    draw = torch.Generator().manual_seed(10 * number + mesh.get_local_rank())
    plain.zero_grad()
    plain(torch.randn(16, 64, generator=draw)).square().mean().backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        p.grad = mean_over_ranks(p.grad, mesh)
        q.grad = torch.zeros_like(q).copy_(p.grad)


def distance(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max((full(p) - full(q)).abs().max().item() for p, q in pairs)


def in_cut_blocks(param, block):
    """Which elements are in a block of which two ranks have a part each."""
    spec = param._shard_spec
    edges = {edge for rank in range(spec.world_size) for edge in spec.interval(rank)}
    cut = {edge // block for edge in edges if edge % block and edge < spec.numel}
    return torch.tensor([index // block in cut for index in range(spec.numel)]).view(param.shape)


@pytest.mark.parametrize(("kind", "world"), [("8bit", 2), ("8bit", 3), ("4bit", 3), ("fp8", 3)])
def test_as_unsharded(kind, world):
    run_on_ranks(world, __name__, "as_unsharded", {"kind": kind})


def as_unsharded(mesh, kind):
    make, plain, exact = KINDS[kind], model(), model()
    ours = fully_shard(model(), mesh=mesh)
    with torch.compiler.set_stance("force_eager"):
        mine, theirs = make(ours.parameters(), lr=LR), make(plain.parameters(), lr=LR)
        reference = torch.optim.AdamW(exact.parameters(), lr=LR)
        for number in range(5):
            set_gradients(ours, plain, number, mesh)
            for p, q in zip(exact.parameters(), plain.parameters(), strict=True):
                p.grad = q.grad.clone()
            for optimizer in (mine, theirs, reference):
                optimizer.step()
    apart = distance(plain, exact)
    assert apart > 1e-3, "quantised states make no difference"
    share = 0.0
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        cut = in_cut_blocks(p, BLOCKS[kind]) & (p.numel() >= 4096)
        off = (full(p) - q.detach()).abs()
        assert not off[~cut].any(), "blocks that one rank has are those of the unsharded run"
        assert off.max() <= 2 * apart, "blocks of two ranks have a scale each"
        share = max(share, cut.float().mean().item())
        for state in (mine.state[p]["exp_avg"], mine.state[p]["exp_avg_sq"]):
            local = state.to_local()
            assert isinstance(local, BlockState) == (p.numel() >= 4096 and local.numel() > 0)
            if isinstance(local, BlockState):
                held = sum(getattr(local._inner, name).nbytes for name in ("codes", "scale"))
                assert held <= (local.numel() + 2 * BLOCKS[kind]) * (1 + 4 / BLOCKS[kind])
    assert share < 0.1 and (share > 0) == (mesh.size() == 3)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torchao cannot be traced there")
@on_ranks(2)
def test_compiled_step(mesh):
    plain, ours = (seeded(lambda: nn.Linear(64, 80, bias=False)) for _ in range(2))
    fully_shard(ours, mesh=mesh)
    mine, theirs = AdamW8bit(ours.parameters(), lr=LR), AdamW8bit(plain.parameters(), lr=LR)
    for number in range(2):
        plain.weight.grad = seeded(lambda: torch.randn(80, 64), number)
        ours.weight.grad = torch.zeros_like(ours.weight).copy_(plain.weight.grad)
        mine.step()
        with torch.compiler.set_stance("force_eager"):
            theirs.step()
    assert (plain.weight - seeded(lambda: nn.Linear(64, 80, bias=False)).weight).abs().max() > LR
    torch.testing.assert_close(full(ours.weight), plain.weight.detach(), rtol=0, atol=1e-2 * LR)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_at_another_world_size(kind, tmp_path):
    run_on_ranks(4, __name__, "to_another_world_size", {"kind": kind, "path": str(tmp_path)})


def to_another_world_size(mesh, kind, path):
    ours = fully_shard(model(), mesh=mesh)
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    other = fully_shard(seeded(model, 5), mesh=grid)
    with torch.compiler.set_stance("force_eager"):
        mine, theirs = (KINDS[kind](m.parameters(), lr=LR) for m in (ours, other))
        for number in range(2):
            set_gradients(ours, model(), number, mesh)
            mine.step()
        saved = get_optimizer_state_dict(ours, mine)
        dcp.save({"model": ours.state_dict(), "optim": saved}, checkpoint_id=path)
        into = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, theirs)}
        dcp.load(into, checkpoint_id=path)
        other.load_state_dict(into["model"])
        set_optimizer_state_dict(other, theirs, into["optim"])
        assert distance(ours, other) == 0
        for p, (name, wanted) in zip(other.parameters(), saved["state"].items(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                state, want = theirs.state[p][key], full(wanted[key])
                large = p.numel() >= 4096 and state.to_local().numel() > 0
                assert isinstance(state.to_local(), BlockState) == large, name
                assert type(wanted[key].to_local()) is torch.Tensor and want.any()
                found = full(ShardTensor(state._local + 0, state.shape, state._shard_spec))
                assert (found - want).abs().max() <= ERRORS[kind] * want.abs().max(), name
            assert theirs.state[p]["step"] == 2
        set_gradients(other, model(), 3, mesh)
        theirs.step()
    assert distance(ours, other) > LR / 10


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_resumes_to_the_last_bit(mesh, kind):
    ours, other = (fully_shard(seeded(model, seed), mesh=mesh) for seed in (0, 5))
    with torch.compiler.set_stance("force_eager"):
        mine, theirs = (KINDS[kind](m.parameters(), lr=LR) for m in (ours, other))
        for number in range(3):
            set_gradients(ours, model(), number, mesh)
            mine.step()
        saved = get_optimizer_state_dict(ours, mine)
        other.load_state_dict(ours.state_dict())
        set_optimizer_state_dict(other, theirs, saved)
        for number in range(3, 5):
            for m, optimizer in ((ours, mine), (other, theirs)):
                set_gradients(m, model(), number, mesh)
                optimizer.step()
    assert distance(ours, other) == 0 and distance(ours, fully_shard(model(), mesh=mesh)) > LR


@on_ranks(2)
def test_loaded_before_a_step(mesh):
    """What torch's own `load_state_dict` leaves unquantised is quantised at the first step."""
    ours = fully_shard(model(), mesh=mesh)
    with torch.compiler.set_stance("force_eager"):
        first, second = (AdamW8bit(ours.parameters(), lr=LR) for _ in range(2))
        set_gradients(ours, model(), 0, mesh)
        first.step()
        second.load_state_dict(first.state_dict())
        second.step()
    (weight,) = (p for p in (ours[0].weight, ours[2].weight) if p.to_local().numel())
    assert isinstance(second.state[weight]["exp_avg"].to_local(), BlockState)
    assert second.state[weight]["step"] == 2


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
@pytest.mark.parametrize("signed", [True, False])
def test_a_state_is_restored_to_its_codes(kind, signed):
    """Also where the largest value of a block is negative, which torchao's map does not reach."""
    make = {"8bit": OptimState8bit, "4bit": OptimState4bit}[kind].zeros
    torch.manual_seed(0)
    for front, count in ((0, 128 * 400), (40, 128 * 400 - 90)):
        values = torch.randn(count) * torch.randn(count).exp()
        values = values if signed else values.abs()
        first, again, twice = (
            BlockState(make((128 * 400,), signed, 128), front, count) for _ in range(3)
        )
        first.quantise(values)
        again.copy_(first.dequantised())
        again.restore(first.dequantised())
        assert torch.equal(again.dequantised(), first.dequantised())
        assert torch.equal(again._inner.codes, first._inner.codes)
        twice.quantise(first.dequantised())
        assert torch.equal(twice.dequantised(), first.dequantised()) == (not signed)
