"""Checkpoints that other libraries read or write: safetensors, `torch.save`, `torch.export`."""

import io
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import full
from ranks import on_ranks, run_on_ranks
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard as fsdp2

from shardc import ShardTensor, StateDictOptions, fully_shard, get_model_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:.*")
SHAPES = {
    "square": (10, 10), "four": (5, 3, 7, 23), "cube": (5, 7, 13), "row": (1, 101), "bias": (11,),
    "none": (0, 3), "one": (1,),
}  # fmt: skip


def parts(seed: int, with_scalar: bool = False) -> nn.Module:
    """Parameters that every world size cuts inside their rows."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    for name, shape in (SHAPES | ({"scalar": ()} if with_scalar else {})).items():
        value = torch.randn(shape, generator=generator)
        module.register_parameter(name, nn.Parameter(value))
    half = torch.randn(7, 15, generator=generator).bfloat16()
    module.register_parameter("frozen", nn.Parameter(half, requires_grad=False))
    module.register_buffer("seen", torch.randn(3, generator=generator))
    return module


def boxes(model: nn.Module) -> int:
    """Of how many boxes the most cut parameter is made on this rank."""
    return max(len(p._boxes()) for p in model.parameters() if isinstance(p, ShardTensor))


def check_holds(state: dict, seed: int, with_scalar: bool = False) -> None:
    wanted = parts(seed, with_scalar).state_dict()
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(full(state[name]), value), name


# -- the HuggingFace writer and reader of DCP ------------------------------------------------------


def save_safetensors(mesh, path: str, mapped: bool, pending: bool) -> int:
    model = fully_shard(parts(1), mesh=mesh)
    for consolidated in (False, True):
        index = {name: 1 + at % 2 for at, name in enumerate(model.state_dict())} if mapped else None
        writer = HuggingFaceStorageWriter(
            path=f"{path}/{consolidated}", save_distributed=True,
            enable_consolidation=consolidated, fqn_to_index_mapping=index,
        )  # fmt: skip
        if pending:
            group = dist.new_group(backend="gloo")
            state = model.state_dict()
            dcp.async_save(state, storage_writer=writer, process_group=group).result()
        else:
            dcp.save(model.state_dict(), storage_writer=writer)
    return boxes(model)


def load_safetensors(mesh, path: str) -> None:
    folders = [f"{path}/False", f"{path}/True", f"{path}/True/sharded"]
    for folder in folders:
        model = fully_shard(parts(2), mesh=mesh)
        with pytest.raises(AssertionError):
            check_holds(model.state_dict(), 1)
        state = model.state_dict()
        dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
        model.load_state_dict(state)
        check_holds(model.state_dict(), 1)


@pytest.mark.parametrize(("mapped", "pending", "loaded_on"), [(True, False, 2), (False, True, 1)])
def test_safetensors_of_dcp_are_exact_for_any_cut(
    tmp_path: Path, mapped: bool, pending: bool, loaded_on: int
) -> None:
    run = {"path": str(tmp_path), "mapped": mapped, "pending": pending}
    name = "test_checkpoints_of_others"
    assert max(run_on_ranks(3, name, "save_safetensors", run)) > 2, "nothing is cut inside its rows"
    run_on_ranks(loaded_on, name, "load_safetensors", {"path": str(tmp_path)})
    files = sorted(Path(tmp_path, "True").glob("model-*.safetensors"))
    assert len(files) == (2 if mapped else 1)
    check_holds({name: t for file in files for name, t in load_file(file).items()}, 1)


def save_elsewhere(mesh, path: str) -> None:
    """FSDP2's DTensors, which hold one box each, and a model whose parts are full states."""
    model = fsdp2(nn.Linear(10, 10), mesh=mesh)
    writer = HuggingFaceStorageWriter(path=f"{path}/fsdp2", save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer)
    assert len(list(Path(path, "fsdp2").iterdir())) == dist.get_world_size()
    state = nn.Linear(10, 10).state_dict()
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path=f"{path}/whole"))


def test_what_has_one_box_is_written_as_before(tmp_path: Path) -> None:
    run_on_ranks(2, "test_checkpoints_of_others", "save_safetensors", {
        "path": str(tmp_path / "first"), "mapped": False, "pending": False,
    })  # fmt: skip
    run_on_ranks(2, "test_checkpoints_of_others", "save_elsewhere", {"path": str(tmp_path)})


def save_refused(mesh, path: str) -> None:
    model = fully_shard(parts(1, with_scalar=True), mesh=mesh)
    for match, options in (
        ("is sharded.*Pass save_distributed=True", {}),
        (
            "'scalar' has no dims.*writes 0",
            {"save_distributed": True, "enable_consolidation": True},
        ),
    ):
        with pytest.raises(CheckpointException, match=match):
            writer = HuggingFaceStorageWriter(path=path, **options)
            dcp.save(model.state_dict(), storage_writer=writer)
    writer = HuggingFaceStorageWriter(path=f"{path}/apart", save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer)
    state = fully_shard(parts(2, with_scalar=True), mesh=mesh).state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(f"{path}/apart"))
    check_holds(state, 1, with_scalar=True)


def test_what_the_writer_would_lose_is_refused(tmp_path: Path) -> None:
    run_on_ranks(2, "test_checkpoints_of_others", "save_refused", {"path": str(tmp_path)})


# -- torch.save by rank ----------------------------------------------------------------------------


def trained(mesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(parts(seed), mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.full_like(param, 0.1)
    optimizer.step()
    return model, optimizer


@on_ranks(2)
def test_what_torch_saves_by_rank_loads_on_it(mesh):
    model, optimizer = trained(mesh, 1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, file)
    wanted = [full(v) for v in model.state_dict().values()]
    states = [full(s["exp_avg"]) for s in optimizer.state_dict()["state"].values()]
    other, again = trained(mesh, 2)
    assert not torch.equal(full(other.square), wanted[0])
    file.seek(0)
    loaded = torch.load(file)  # weights_only
    other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["opt"])
    for value, want in zip(other.state_dict().values(), wanted, strict=True):
        assert torch.equal(full(value), want)
    for state, want in zip(again.state_dict()["state"].values(), states, strict=True):
        assert torch.equal(full(state["exp_avg"]), want)
    again.step()


@on_ranks(2)
def test_a_part_without_its_group_is_written_but_not_gathered(mesh):
    model, _ = trained(mesh, 1)
    rebuild, (local, shape, place) = model.four.detach().__reduce_ex__(2)
    lost = rebuild(local.clone(), shape, (*place[:5], "a group of another job", *place[6:]))
    with torch.no_grad():
        model.four.zero_()
        model.four.copy_(lost)
    assert torch.equal(model.four.to_local(), local) and local.any()
    with pytest.raises(RuntimeError, match=r"rank . of 2.*torch\.distributed\.checkpoint"):
        lost.full_tensor()
    other = rebuild(local.clone(), shape, (*place[:3], 1 - place[3], 2, "", *place[6:]))
    with pytest.raises(RuntimeError, match=r"(?s)rank . of 2.*torch\.distributed\.checkpoint"):
        model.load_state_dict({**model.state_dict(), "four": other})


# -- safetensors' own functions, a single file of all, exports -------------------------------------


@on_ranks(2)
def test_safetensors_alone_say_the_way(mesh):
    model = fully_shard(parts(1), mesh=mesh)
    folder = tempfile.mkdtemp()
    save_file(parts(2).state_dict(), f"{folder}/whole.safetensors")
    for call in (
        lambda: save_model(model, f"{folder}/model.safetensors"),
        lambda: save_file(model.state_dict(), f"{folder}/model.safetensors"),
        lambda: load_model(model, f"{folder}/whole.safetensors"),
    ):
        with pytest.raises(RuntimeError, match=r"HuggingFaceStorageWriter.*load_file.*load_state"):
            call()
    check_holds(model.state_dict(), 1)
    model.load_state_dict(load_file(f"{folder}/whole.safetensors"))
    check_holds(model.state_dict(), 2)


def save_shards(mesh, path: str) -> None:
    dcp.save({"model": fully_shard(parts(1), mesh=mesh).state_dict()}, checkpoint_id=path)


def test_a_single_file_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    name, sharded, single = "test_checkpoints_of_others", f"{tmp_path}/dcp", f"{tmp_path}/all.pt"
    run_on_ranks(3, name, "save_shards", {"path": sharded})
    dcp_to_torch_save(sharded, single)
    check_holds(torch.load(single)["model"], 1)


@on_ranks(2)
def test_an_export_says_the_way(mesh):
    """Of a model whose root is plain, too; the unsharded copy that the message asks for exports."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=mesh)
    for root in (model, fully_shard(model, mesh=mesh)):
        with pytest.raises(NotImplementedError, match=r"torch\.export.*get_model_state_dict"):
            torch.export.export(root, (torch.ones(3, 4),))
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    state = get_model_state_dict(model, options=options)
    copied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    copied.load_state_dict(state)
    exported = torch.export.export(copied, (torch.ones(3, 4),)).module()
    assert torch.equal(exported(torch.ones(3, 4)), model(torch.ones(3, 4)))
