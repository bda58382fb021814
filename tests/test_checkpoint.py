"""DCP checkpoints: at any world size, both ways with FSDP2 and with plain models.

A test saves on some rank processes and loads on others. What was saved is also written whole, by
`torch.save`, for the loading side to compare with.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import full
from ranks import on_ranks, run_on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import AdamW

from shardc import ShardTensor, fully_shard


class Parts(nn.Module):
    """Parameters that every world size cuts inside their rows; without `odd`, ones FSDP2 takes."""

    def __init__(self, seed: int, odd: bool) -> None:
        super().__init__()
        shapes = {"four": (5, 3, 7, 203), "matrix": (13, 101), "cube": (5, 7, 13), "bias": (11,)}
        if odd:
            shapes |= {"scalar": (), "none": (0, 3), "one": (1,)}
        generator = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value))
        frozen = torch.randn(7, 15, generator=generator).bfloat16()
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.register_buffer("steps", torch.tensor(seed))


def build(kind: str, mesh, seed: int, odd: bool) -> tuple[nn.Module, AdamW]:
    """A model and an optimizer that has taken two steps; W ranks take the same."""
    model = nn.Sequential(Parts(seed, odd), Parts(seed + 1, odd))
    if kind != "plain":
        shard = fully_shard if kind == "shardc" else fsdp2
        shard(model[0], mesh=mesh)
        shard(model, mesh=mesh)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01 * (seed + 1))
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1 * (seed + 1)) if p.requires_grad else None
        optimizer.step()
    return model, optimizer


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """All tensors, whole, by a flat name."""
    found = {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": whole(value).clone() for key, value in state.items()}
    return found


def save(mesh, path: str, kind: str, odd: bool) -> int:
    """Save a model and its optimizer; how many boxes this rank wrote of its most cut parameter."""
    model, optimizer = build(kind, mesh, 1, odd)
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=path)
    expected = values(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, f"{path}/expected.pt")
    return max(
        (len(p._boxes()) for p in model.parameters() if isinstance(p, ShardTensor)), default=0
    )


def load(mesh, path: str, kind: str, odd: bool) -> None:
    """Load into another model and optimizer, and compare all."""
    expected = torch.load(f"{path}/expected.pt")
    model, optimizer = build(kind, mesh, 5, odd)
    before = values(model, optimizer)
    assert before.keys() == expected.keys()
    differing = {
        name for name, value in before.items()
        if value.numel() and not name.endswith("step") and not torch.equal(value, expected[name])
    }  # fmt: skip
    assert len(differing) == sum(
        v.numel() > 0 and not k.endswith("step") for k, v in before.items()
    )
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.02
    for name, value in values(model, optimizer).items():
        assert torch.equal(value, expected[name]), name
    assert all(isinstance(p, ShardTensor) for p in model.parameters()) == (kind == "shardc")


ROUTES = [
    ("shardc", 3, "shardc", 2), ("shardc", 1, "shardc", 2), ("shardc", 3, "plain", 1),
    ("plain", 1, "shardc", 3), ("shardc", 3, "fsdp2", 2), ("fsdp2", 2, "shardc", 3),
]  # fmt: skip


@pytest.mark.parametrize(("source", "saved_on", "target", "loaded_on"), ROUTES)
def test_checkpoint(
    tmp_path: Path, source: str, saved_on: int, target: str, loaded_on: int
) -> None:
    run = {"path": str(tmp_path), "odd": "fsdp2" not in (source, target)}
    boxes = run_on_ranks(saved_on, "test_checkpoint", "save", {"kind": source, **run})
    if source == "shardc" and saved_on > 1:
        assert max(boxes) == 6, "nothing is cut inside its rows"
    run_on_ranks(loaded_on, "test_checkpoint", "load", {"kind": target, **run})


# -- what else a trainer does with state dicts ----------------------------------------------------


@on_ranks(2)
def test_state_dict_is_sharded_and_shares_memory(mesh):
    model, _ = build("shardc", mesh, 0, odd=True)
    state = model.state_dict()
    params = dict(model.named_parameters())
    for name, value in state.items():
        if name in params:
            assert type(value) is ShardTensor and not value.requires_grad
            assert value.to_local().data_ptr() == params[name].to_local().data_ptr()
    wanted = nn.Sequential(Parts(8, True), Parts(9, True)).state_dict()
    versions = [p.to_local()._version for p in params.values()]
    places = [p.to_local().data_ptr() for p in params.values()]
    model.load_state_dict(wanted)  # a plain one: every rank takes its part
    assert places == [p.to_local().data_ptr() for p in model.parameters()], "not copied in place"
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), wanted[name]), name
    assert all(p.to_local()._version > v for p, v in zip(params.values(), versions, strict=True))
    wanted["0.bias"] = torch.zeros(12)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bias"):
        model.load_state_dict(wanted)


@on_ranks(2)
def test_state_dict_functions(mesh):
    """torch.distributed.checkpoint.state_dict, which names optimizer states by parameter."""
    model, optimizer = build("shardc", mesh, 0, odd=True)
    state = get_state_dict(model, optimizer)
    assert type(state[1]["state"]["0.four"]["exp_avg"]) is ShardTensor
    other, fresh = build("shardc", mesh, 3, odd=True)
    set_state_dict(other, fresh, model_state_dict=state[0], optim_state_dict=state[1])
    for (name, value), want in zip(
        values(other, fresh).items(), values(model, optimizer).values(), strict=True
    ):
        assert torch.equal(value, want), name


def save_async(mesh, path: str) -> None:
    model, optimizer = build("shardc", mesh, 1, odd=True)
    expected = values(model, optimizer)
    group = dist.new_group(backend="gloo")
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    pending = dcp.async_save(state, checkpoint_id=path, process_group=group)
    with torch.no_grad():  # what trains on meanwhile does not change what is saved
        for p in model.parameters():
            p.zero_()
    pending.result()
    if dist.get_rank() == 0:
        torch.save(expected, f"{path}/expected.pt")


def test_async_save(tmp_path: Path) -> None:
    run_on_ranks(2, "test_checkpoint", "save_async", {"path": str(tmp_path)})
    run = {"path": str(tmp_path), "kind": "shardc", "odd": True}
    run_on_ranks(3, "test_checkpoint", "load", run)


@on_ranks(2)
def test_chunks(mesh):
    """Every element is in one chunk of one rank, whose tensor is a view of the segment."""
    model, _ = build("shardc", mesh, 0, odd=True)
    for name, p in model.named_parameters():
        seen = torch.zeros(p.shape)
        expected = p.full_tensor()
        for item in p.__create_write_items__(name, p):
            chunk = item.tensor_data.chunk
            index = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            part = p.__get_tensor_shard__(item.index)
            assert torch.equal(part, expected[index]) and part._base is not None, name
            seen[index] += 1
        dist.all_reduce(seen)
        assert torch.equal(seen, torch.ones(p.shape)), name
    with pytest.raises(ValueError, match="holds no part at offset"):
        p.__get_tensor_shard__(dcp.metadata.MetadataIndex(name, torch.Size([99, 99])))
