"""A model's state: sharded, full and local, against the unsharded model's and FSDP2's."""

import io

import accelerator
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as theirs
from fsdp2 import fsdp2
from models import Live, Stack, full, on_meta, seeded, tokens
from ranks import mesh_of, on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shardc import (
    CPUOffloadPolicy,
    OffloadPolicy,
    ShardTensor,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from shardc.runtime.unit.params import view

FULL = StateDictOptions(full_state_dict=True)
THEIR_FULL = theirs.StateDictOptions(full_state_dict=True)
ON_RANK_0 = theirs.StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = theirs.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
LOCAL = StateDictOptions(local=True)


class Everything(nn.Module):
    """Tied, frozen, scalar, empty, complex and ignored parameters, buffers and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(tied=True)
        self.scalar = nn.Parameter(torch.randn(()))
        self.square = nn.Parameter(torch.randn(9, 9))
        self.wave = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.frozen = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.plain = nn.Linear(3, 5)
        self.note = "new"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def everything(mesh, seed: int) -> nn.Module:
    model = seeded(Everything, seed)
    return fully_shard(model, mesh=mesh, units="auto", ignored_params=model.plain.parameters())


def check_equal(model: nn.Module, plain: nn.Module) -> None:
    """All of a sharded model's state is that of a plain one, and lies in its segments."""
    want = plain.state_dict()
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else full(value)
            assert torch.equal(whole, want[name]), name
        else:
            assert value == want[name]
    for name, param in model.named_parameters():
        if isinstance(param, ShardTensor):
            bucket = param._slot.bucket
            own = view(bucket, param._slot.index, bucket.segment)
            assert own.to_local().data_ptr() == param.to_local().data_ptr(), name


def check_sharded(model: nn.Module) -> None:
    held = [p.to_local().numel() for p in model.parameters() if isinstance(p, ShardTensor)]
    whole = [p.numel() for p in model.parameters() if isinstance(p, ShardTensor)]
    assert 0 < sum(held) < sum(whole)


# -- get ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_full_state_is_the_unsharded_one(mesh):
    plain, model = seeded(Everything), everything(mesh, 0)
    check_sharded(model)
    sharded = get_model_state_dict(model)
    assert isinstance(sharded["square"], ShardTensor) and list(sharded) == list(plain.state_dict())
    offloaded = get_model_state_dict(model, options=StateDictOptions(cpu_offload=True))
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, ShardTensor) else param
        if local.numel():
            mine, copied = (
                x[name].to_local() if isinstance(param, ShardTensor) else x[name]
                for x in (sharded, offloaded)
            )
            assert mine.data_ptr() == local.data_ptr() != copied.data_ptr()
            assert torch.equal(copied, local)
    state = get_model_state_dict(model, options=FULL)
    assert list(state) == list(plain.state_dict())
    for name, want in plain.state_dict().items():
        if isinstance(want, torch.Tensor):
            assert type(state[name]) is torch.Tensor and torch.equal(state[name], want), name
    assert state["stack.head.weight"] is state["stack.embed.weight"]
    assert state["norm.running_mean"].data_ptr() != model.norm.running_mean.data_ptr()
    seeded(Everything, 1).load_state_dict(state)
    torch.save(state, io.BytesIO())
    part = get_model_state_dict(
        model, submodules={model.stack.layers}, options=StateDictOptions(full_state_dict=True)
    )
    assert all(name.startswith("stack.layers.") for name in part) and len(part) == 10
    short = StateDictOptions(keep_submodule_prefixes=False)
    names = get_model_state_dict(model, submodules={model.stack.layers}, options=short)
    assert next(iter(names)) == "0.norm.weight"
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert state.keys() - trained.keys() == {"frozen"}


@on_ranks(2)
def test_rank_0_gathers_one_parameter_at_a_time(mesh):
    model = fully_shard(seeded(Stack), mesh=mesh)
    check_sharded(model)
    sizes = [p.numel() * 4 for p in model.parameters()]
    with Live() as all_of_it:
        everywhere = get_model_state_dict(model, options=FULL)
    assert all_of_it.peak >= sum(sizes)
    # On rank 0 the host memory that has the result is counted, too.
    limit = max(sizes) + 8 + (sum(sizes) if mesh.get_rank() == 0 else 0)
    with Live(limit) as one_by_one:
        state = get_model_state_dict(model, options=ON_RANK_0)
    assert one_by_one.peak <= limit
    if mesh.get_rank() == 0:
        assert one_by_one.peak >= sum(sizes)
        assert all(torch.equal(state[name], value) for name, value in everywhere.items())
    else:
        assert state == {} and one_by_one.peak >= max(sizes)
    with Live(max(sizes) + 4096) as loading:
        set_model_state_dict(model, state, options=FROM_RANK_0)
    assert loading.peak <= max(sizes) + 4096
    assert mesh.get_rank() == 0 or loading.peak >= max(sizes)


def _places(state):
    """The device types of a state dict's tensors, of their parts where they are sharded."""
    if isinstance(state, dict):
        return set().union(*map(_places, state.values()))
    if not isinstance(state, torch.Tensor) or state.dim() == 0:
        return set()
    return {(state.to_local() if isinstance(state, ShardTensor) else state).device.type}


@on_ranks(2, device="sim")
def test_states_go_to_the_host_where_asked(mesh):
    """Full on rank 0, and sharded; where nobody asked they stay on the device."""
    model, plain = fully_shard(seeded(Stack), mesh=mesh, units="auto"), seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for options, place in (
        (None, {"sim"}),
        (FULL, {"sim"}),
        (StateDictOptions(cpu_offload=True), {"cpu"}),
        (ON_RANK_0, {"cpu"} if mesh.get_rank() == 0 else set()),
    ):
        state = get_model_state_dict(model, options=options)
        assert _places(state) == place, options
        assert _places(get_optimizer_state_dict(model, optimizer, options=options)) == place
        for name, value in state.items():
            assert torch.equal(full(value).cpu(), plain.state_dict()[name]), name
        accelerator.synchronize()  # what rank 1 sends runs there when something waits for it
    assert {p.to_local().device.type for p in model.parameters()} == {"sim"}
    assert _places(optimizer.state_dict()) == {"sim"}


@on_ranks(2)
def test_the_local_state_is_plain_and_loads_where_it_is_from(mesh):
    model, other, plain = everything(mesh, 0), everything(mesh, 1), seeded(Everything)
    state = get_model_state_dict(model, options=LOCAL)
    file = io.BytesIO()
    torch.save(state, file)
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    assert all(type(value) is torch.Tensor for value in tensors.values())
    assert sum(value.untyped_storage().nbytes() for value in tensors.values()) < 0.7 * sum(
        value.nbytes for value in plain.state_dict().values() if isinstance(value, torch.Tensor)
    )
    file.seek(0)
    read = torch.load(file)
    set_model_state_dict(other, read, options=LOCAL)
    check_equal(other, plain)
    with pytest.raises(RuntimeError, match=r"load it with StateDictOptions\(local=True\)"):
        set_model_state_dict(other, read)
    boxes = [None, None]
    dist.all_gather_object(boxes, read)
    with pytest.raises(RuntimeError, match="loads on the rank it is from only"):
        set_model_state_dict(other, boxes[1 - mesh.get_rank()], options=LOCAL)
    with pytest.raises(ValueError, match="exclude"):
        get_model_state_dict(model, options=StateDictOptions(local=True, full_state_dict=True))


# -- set ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["full", "rank 0", "sharded", "dtensors", "another layout"])
@on_ranks(2)
def test_load(mesh, way):
    plain, model = seeded(Everything), everything(mesh, 1)
    plain.note = "old"
    with pytest.raises(AssertionError):
        check_equal(model, plain)
    if way == "full":
        given = plain.state_dict()
        report = set_model_state_dict(model, given, options=FULL)
        assert given.keys() == plain.state_dict().keys(), "the dict is the caller's"
    elif way == "rank 0":
        given = plain.state_dict() if mesh.get_rank() == 0 else {}
        report = set_model_state_dict(model, given, options=FROM_RANK_0)
    else:
        source = seeded(Everything)
        source.note = "old"
        if way == "dtensors":
            for layer in source.stack.layers:
                torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        elif way == "sharded":
            source = everything(mesh, 0)
            source.note = "old"
        else:
            fully_shard(source, mesh=mesh)
        given = source.state_dict()
        kind = DTensor if way == "dtensors" else ShardTensor
        assert any(isinstance(value, kind) for value in given.values())
        report = set_model_state_dict(model, given)
    assert report.missing_keys == report.unexpected_keys == []
    check_equal(model, plain)
    assert model.note == "old"


@on_ranks(2)
def test_torch_takes_what_we_give(mesh):
    """Into FSDP2 by the full state, with torch's own function; and back by its sharded one."""
    ours, peer = fully_shard(seeded(Stack), mesh=mesh), fsdp2(seeded(Stack, 1), mesh)
    plain = seeded(Stack)
    assert not torch.equal(peer.head.weight.full_tensor(), plain.head.weight)
    theirs.set_model_state_dict(peer, get_model_state_dict(ours, options=FULL), options=THEIR_FULL)
    check_equal(peer, plain)
    again = fully_shard(seeded(Stack, 2), mesh=mesh)
    set_model_state_dict(again, theirs.get_model_state_dict(peer))
    check_equal(again, plain)


@on_ranks(2)
def test_partial_dicts_and_renamed_keys(mesh):
    plain, model, before = seeded(Stack), seeded(Stack, 1), seeded(Stack, 1)
    fully_shard(model, mesh=mesh)
    given = {"head.weight": plain.head.weight.detach(), "lm_head.weight": torch.ones(3)}
    for options in (
        theirs.StateDictOptions(strict=False),
        theirs.StateDictOptions(strict=False, full_state_dict=True, broadcast_from_rank0=True),
    ):
        with torch.no_grad():
            model.head.weight.zero_()
        report = set_model_state_dict(model, given, options=options)
        assert report.unexpected_keys == ["lm_head.weight"]
        assert "embed.weight" in report.missing_keys
        assert "head.weight" not in report.missing_keys
        assert torch.equal(full(model.head.weight), plain.head.weight)
        assert torch.equal(full(model.embed.weight), before.embed.weight)

    def rename(module, state, prefix, *_):
        for name in list(state):
            state[name.replace("blocks.", "layers.")] = state.pop(name)

    model.register_load_state_dict_pre_hook(rename)
    old = {name.replace("layers.", "blocks."): v for name, v in plain.state_dict().items()}
    set_model_state_dict(model, old, options=FROM_RANK_0)
    check_equal(model, plain)


@on_ranks(2)
def test_what_does_not_fit_is_named_on_all_ranks_before_anything_changes(mesh):
    model, before, other = everything(mesh, 0), seeded(Everything), seeded(Everything, 1)
    rank = mesh.get_rank()
    wrong = {
        r"size mismatch for 'square': it has shape \(9, 9\), got \(9,\)": {"square": torch.ones(9)},
        r"dtype mismatch for 'square': it is torch.float32, got torch.int64": {
            "square": torch.ones(9, 9, dtype=torch.int64)
        },
        "'square' must be a tensor, got float": {"square": 1.0},
        "unknown: 'extra'": {"extra": torch.ones(3)},
        "missing: 'square'": {"square": None},
    }
    for message, change in wrong.items():
        bad = {k: v for k, v in {**other.state_dict(), **change}.items() if v is not None}
        for options in (FULL, FROM_RANK_0):
            with pytest.raises(RuntimeError, match=message):
                set_model_state_dict(model, bad, options=options)
        check_equal(model, before)
        mine = bad if rank == 0 else other.state_dict()  # only rank 0 has a problem
        with pytest.raises(RuntimeError, match=message):
            set_model_state_dict(model, mine)
        check_equal(model, before)
    with pytest.raises(RuntimeError, match="the dict is empty; if rank 0 has it, use"):
        set_model_state_dict(model, other.state_dict() if rank == 0 else {})
    with pytest.raises(ValueError, match="sends full tensors"):
        set_model_state_dict(model, model.state_dict(), options=FROM_RANK_0)
    with pytest.raises(ValueError, match="needs full_state_dict=True"):
        set_model_state_dict(model, {}, options=theirs.StateDictOptions(broadcast_from_rank0=True))
    empty = fully_shard(on_meta(), mesh=mesh)
    with pytest.raises(RuntimeError, match=r"'embed.weight' is on the meta device.*to_empty"):
        set_model_state_dict(empty, seeded(Stack).state_dict())


@pytest.mark.parametrize(("pieces", "offload"), [(False, False), (True, True)])
@on_ranks(2, device="sim")
def test_assign_to_a_model_on_meta(mesh, offload, pieces):
    """As files of a checkpoint are loaded: all at once, or name by name with `strict=False`."""
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    model = fully_shard(on_meta(), mesh=mesh, units="auto", offload_policy=policy)
    plain = seeded(Stack, 1)
    state = plain.state_dict()
    with pytest.raises(RuntimeError, match="on the meta device"):
        model(tokens(0))
    devices = {"cpu"} if offload else {"sim"}
    for piece in [{name: value} for name, value in state.items()] if pieces else [state]:
        model.load_state_dict(piece, assign=True, strict=not pieces)
    assert {p._slot.bucket.segment.device.type for p in model.parameters()} == devices
    for name, param in model.named_parameters():
        assert torch.equal(full(param).cpu(), state[name]), name
    assert torch.equal(model(tokens(0)).cpu(), plain(tokens(0)))


@on_ranks(2)
def test_what_was_not_assigned_on_meta_is_nan(mesh):
    model = fully_shard(on_meta(), mesh=mesh)
    value = seeded(Stack, 1).state_dict()["embed.weight"]
    model.load_state_dict({"embed.weight": value}, assign=True, strict=False)
    for name, param in model.named_parameters():
        whole = full(param)
        assert torch.equal(whole, value) if name == "embed.weight" else whole.isnan().all(), name
    other = on_meta(lambda: fully_shard(Stack(), mesh=mesh))
    other.load_state_dict(fully_shard(seeded(Stack, 1), mesh=mesh).state_dict(), assign=True)
    check_equal(other, seeded(Stack, 1))


@on_ranks(2)
def test_names_without_wrappers(mesh):
    plain, model = seeded(Stack), seeded(Stack, 1)
    for index, layer in enumerate(model.layers):
        model.layers[index] = fully_shard(checkpoint_wrapper(layer), mesh=mesh)
    wrapped = torch.compile(fully_shard(model, mesh=mesh), backend="shardc")
    raw = {name for name, _ in wrapped.named_parameters()}
    assert any("_orig_mod" in name for name in raw)
    assert any("_checkpoint_wrapped_module" in name for name in raw)
    for options in (None, FULL, LOCAL):
        state = get_model_state_dict(wrapped, options=options)
        assert [name for name in state if name != "_shardc_local"] == list(plain.state_dict())
    set_model_state_dict(wrapped, plain.state_dict())
    assert torch.equal(full(model.head.weight), plain.head.weight)
    set_model_state_dict(wrapped, seeded(Stack, 2).state_dict(), options=FROM_RANK_0)
    assert not torch.equal(full(model.head.weight), plain.head.weight)
    with pytest.raises(RuntimeError, match=r"missing: 'embed\.weight'"):
        set_model_state_dict(wrapped, {"head.weight": plain.head.weight})


@on_ranks(2)
def test_what_is_gathered_follows_a_load(mesh):
    """FSDP2 reshards before it loads; here what is gathered is gathered again."""
    plain, model = seeded(Stack, 1), fully_shard(seeded(Stack), mesh=mesh, units="auto")
    x = tokens(0)
    before = model(x)
    model.unshard()
    assert all(isinstance(value, ShardTensor) for value in model.state_dict().values())
    state = get_model_state_dict(model, options=FULL)
    assert torch.equal(state["head.weight"], seeded(Stack).head.weight)
    set_model_state_dict(model, plain.state_dict())
    torch.testing.assert_close(model(x), plain(x))
    assert not torch.allclose(before, plain(x))
    model.unshard()
    model.load_state_dict(seeded(Stack).state_dict())
    torch.testing.assert_close(model(x), before)


# -- other grids ----------------------------------------------------------------------------------


def on_the_whole_mesh(name, module, mesh):
    """All parameters are DTensors on (dp, tp), the head's cut along tp."""
    for key, param in list(module.named_parameters(recurse=False)):
        placements = [Replicate(), Shard(0) if name == "head" else Replicate()]
        module.register_parameter(
            key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
        )


HAS_DIMS = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="new in torch 2.12"
)


@pytest.mark.parametrize(
    "kind", ["copies", "tensor parallel", pytest.param("whole mesh", marks=HAS_DIMS)]
)
@on_ranks(4)
def test_grids(mesh, kind):
    """On (replicate, shard), (dp, tp) and with `dp_mesh_dims`: rank 0 has all, and gives all."""
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = seeded(Stack), seeded(Stack, 1)
    if kind == "copies":
        fully_shard(model, mesh=grid, units="auto")
    elif kind == "whole mesh":
        distribute_module(model, grid, on_the_whole_mesh)
        dims = torch.distributed.fsdp.DataParallelMeshDims(shard="dp")
        fully_shard(model, mesh=grid, dp_mesh_dims=dims)
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers[:1]:
            layer.up = nn.Linear(18, 38)
            layer.down = nn.Linear(38, 18)
            parallelize_module(layer, grid["tp"], plan)
        for layer in plain.layers[:1]:
            layer.up, layer.down = nn.Linear(18, 38), nn.Linear(38, 18)
        ignored = list(model.layers[1].up.parameters())
        fully_shard(model, mesh=grid["dp"], ignored_params=ignored)
    check_sharded(model)
    given = plain.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=FROM_RANK_0)
    want = [plain.state_dict()]
    dist.broadcast_object_list(want)
    state = get_model_state_dict(model, options=ON_RANK_0)
    assert state.keys() == (want[0].keys() if dist.get_rank() == 0 else set())
    everywhere = get_model_state_dict(model, options=FULL)
    for name, value in want[0].items():
        assert torch.equal(everywhere[name], value), name
        assert dist.get_rank() or torch.equal(state[name], value), name
    set_model_state_dict(model, {k: 2 * v for k, v in want[0].items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    saved = get_optimizer_state_dict(model, optimizer, options=FULL)
    for name, entries in saved["state"].items():
        entries["exp_avg"] = 3 * want[0][name]
        entries["step"] += 1
    given = saved if dist.get_rank() == 0 else {}
    set_optimizer_state_dict(model, optimizer, given, options=FROM_RANK_0)
    again = get_optimizer_state_dict(model, optimizer, options=ON_RANK_0)
    assert again.keys() == (saved.keys() if dist.get_rank() == 0 else set())
    for name, entries in again.get("state", {}).items():
        assert torch.equal(entries["exp_avg"], 3 * want[0][name]), name
    doubled = get_model_state_dict(model, options=FULL)
    assert torch.equal(doubled["head.weight"], 2 * want[0]["head.weight"])
