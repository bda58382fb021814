"""A ShardTensor where code expects a DTensor: types, placements, conversions, gradients, saving."""

import copy
import io
import pickle
import tempfile
import warnings
from functools import partial

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import full, seeded
from operations import Fused
from ranks import mesh_of, on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardc import FlatShard, ShardTensor, describe, fully_shard, hybrid_mesh


class Heads(nn.Module):
    """Two linear layers, the second read also beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 5), nn.Linear(5, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


# -- what it says of itself ------------------------------------------------------------------------


@on_ranks(2)
def test_a_part_is_whole_rows_unless_these_would_need_more_padding(mesh):
    plain = seeded(lambda: nn.ModuleDict({"even": nn.Linear(16, 9), "odd": nn.Linear(331, 7)}))
    model = copy.deepcopy(plain)
    for module in model.values():
        fully_shard(module, mesh=mesh)
    even, odd = model["even"].weight, model["odd"].weight
    for p, row in ((even, 16), (odd, 0), (model["even"].bias, 0)):
        (placement,) = p.placements
        assert placement.row == pickle.loads(pickle.dumps(placement)).row == row
        assert ("rows of 16" in str(placement)) == (row == 16)
        assert p.to_local().shape == p._local_tensor.shape == p.detach().to_local().shape
        assert p.to_local().dim() == (2 if row else 1)
    assert (len(even._boxes()), len(odd._boxes())) == (1, 2)
    start, stop = (end // 16 for end in even._shard_spec.interval())
    assert 0 < stop - start < 9 and torch.equal(even.to_local(), plain["even"].weight[start:stop])
    (even.to_local() * 2).sum().backward()
    assert torch.equal(even.grad.to_local(), torch.full((stop - start, 16), 2.0))
    again = DTensor.from_local(
        even.to_local(), mesh, even.placements, shape=even.shape, stride=even.stride()
    )
    assert torch.equal(again.full_tensor(), plain["even"].weight)
    assert "cut inside rows" not in describe(model["even"])
    assert "cut inside rows" in describe(model) and describe(model).endswith(": odd.weight.")


@on_ranks(2, 3)
def test_it_passes_as_a_dtensor(mesh):
    plain = seeded(Heads)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    for name, p in model.named_parameters():
        assert type(p) is ShardTensor and isinstance(p, DTensor) and isinstance(p, nn.Parameter)
        assert isinstance(p.detach(), DTensor) and not isinstance(p.detach(), nn.Parameter)
        assert p.device_mesh == mesh
        (flat,) = p.placements
        assert type(flat) is FlatShard and (flat.is_shard(), flat.is_partial()) == (False, False)
        parts = [torch.empty(0)] * mesh.size()
        dist.all_gather_object(parts, p._local_tensor.detach())
        whole = dict(plain.named_parameters())[name]
        assert torch.equal(torch.cat(parts), whole if flat.row else whole.flatten())
        ranks: list = [None] * mesh.size()
        dist.all_gather_object(ranks, pickle.dumps((flat.offset, flat.segment, flat.numel)))
        assert len(set(ranks)) == 1
        assert p._spec.placements == p.placements and p._spec.tensor_meta.shape == p.shape
        assert hash(p._spec) == hash(p.detach()._spec) and p._spec == p.detach()._spec
        with pytest.raises(RuntimeError, match="local part of a sharded parameter is a view"):
            p._local_tensor = torch.zeros(3)
        storage = p.detach().untyped_storage()
        assert storage.data_ptr() == p._local_tensor.untyped_storage().data_ptr()


def _hybrid(mesh):
    model = fully_shard(Heads(), mesh=mesh_of("cpu", (2, 2), mesh_dim_names=("copies", "parts")))
    return model, [("copies", Replicate()), ("parts", FlatShard)]


def _tensor_parallel(mesh):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"body": ColwiseParallel(), "head": RowwiseParallel()}
    model = fully_shard(parallelize_module(Heads(), grid["tensor"], plan), mesh=grid["data"])
    return model, [("data", FlatShard), ("tensor", Shard(1))]


@pytest.mark.parametrize("build", [_hybrid, _tensor_parallel])
@on_ranks(4)
def test_placements_of_several_dims(mesh, build):
    torch.manual_seed(0)
    model, want = build(mesh)
    weight = model.head.weight
    assert weight.device_mesh.mesh_dim_names == tuple(name for name, _ in want)
    for placement, (_, kind) in zip(weight.placements, want, strict=True):
        assert type(placement) is kind if isinstance(kind, type) else placement == kind
    whole = weight.detach().full_tensor()
    again = distribute_tensor(whole + 1, weight.device_mesh, weight.placements)
    assert type(again) is ShardTensor and again._shard_spec == weight._shard_spec
    assert torch.equal(again.full_tensor(), whole + 1)
    cut = weight.detach().redistribute(placements=[Shard(0), Replicate()])
    assert type(cut) is DTensor and torch.equal(cut.full_tensor(), whole)


def _even(mesh):
    return fully_shard(nn.Linear(8, 8), mesh=mesh), []


@pytest.mark.parametrize("build", [_even, _hybrid, _tensor_parallel])
@on_ranks(4)
def test_torch_tells_the_place_of_a_part(mesh, build):
    """`compute_local_shape_and_global_offset` would take a FlatShard for a replicated dim."""
    model, _ = build(mesh)
    told = 0
    for p in model.parameters():
        args = (p.shape, p.device_mesh, p.placements)
        (flat,) = (each for each in p.placements if isinstance(each, FlatShard))
        sizes, offsets = compute_local_shape_and_global_offset(*args)
        if p.dim() > 1 and not flat.row:  # `DTensor.from_local` takes the whole tensor then
            assert (sizes, offsets) == (p.shape, (0,) * p.dim())
            continue
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        assert sizes == p._local_tensor.shape
        assert torch.equal(p.detach().full_tensor()[box], p._local_tensor)
        told += sizes != p.shape
    assert told
    assert compute_local_shape_and_global_offset((8, 3), mesh, [Shard(0)])[0] == (2, 3)


@on_ranks(4)
def test_meshes_that_are_not_dims_of_one(mesh):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data = DeviceMesh.from_group(grid.get_group("data"), "cpu")
    plan = {"body": ColwiseParallel(), "head": RowwiseParallel()}
    model = fully_shard(parallelize_module(Heads(), grid["tensor"], plan), mesh=data)
    weight = model.head.weight
    assert not hasattr(weight, "device_mesh")
    with pytest.raises(AttributeError, match="not dims of one mesh: take both from one"):
        weight.redistribute(placements=[Replicate(), Replicate()])
    assert weight.full_tensor().shape == weight.shape


# -- conversions -----------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_conversions(mesh):
    plain = seeded(Heads)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        want = q.detach()
        source = want + 1 if mesh.get_local_rank() == 0 else torch.zeros_like(want)
        made = distribute_tensor(source, p.device_mesh, p.placements)
        assert type(made) is ShardTensor and torch.equal(made.full_tensor(), want + 1)  # rank 0's
        own = distribute_tensor(want + 2, p.device_mesh, p.placements, src_data_rank=None)
        assert torch.equal(own.full_tensor(), want + 2)
        assert distribute_tensor(own, p.device_mesh, p.placements) is own
        twice = DTensor.from_local(
            p._local_tensor * 2, mesh, p.placements, shape=p.shape, stride=p.stride()
        )
        assert type(twice) is ShardTensor and torch.equal(twice.full_tensor(), want * 2)
        twice = DTensor.from_local(p.to_local() * 2, mesh, p.placements)
        assert type(twice) is ShardTensor and torch.equal(twice.full_tensor(), want * 2)
        whole = DTensor.from_local(want, mesh, p.placements, shape=p.shape, stride=p.stride())
        assert torch.equal(whole.full_tensor(), want)
        for placements in ([Shard(0)], [Shard(-1)], [Replicate()]):
            placed = p.detach().redistribute(placements=placements)
            assert type(placed) is DTensor and torch.equal(placed.full_tensor(), want)
            back = distribute_tensor(placed.full_tensor(), mesh, p.placements)
            assert torch.equal(back.full_tensor(), want)
        assert p.redistribute(placements=p.placements) is p
        with torch.no_grad():
            p.copy_(made)
        assert torch.equal(full(p), want + 1)


@on_ranks(2)
def test_conversions_that_are_refused(mesh):
    p = fully_shard(Heads(), mesh=mesh).head.weight.detach()
    whole, other = p.full_tensor(), mesh_of("cpu", (2,), mesh_dim_names=("other",))
    local, at, shape = p._local_tensor, p.placements, p.shape
    make, cut = DTensor.from_local, distribute_tensor
    for error, match, call in [
        (ValueError, "needs shape= and", lambda: make(local, mesh, [FlatShard(at[0].spec)])),
        (ValueError, "this rank holds", lambda: make(whole[:, :2], mesh, at)),
        (ValueError, "this rank holds", lambda: make(whole[:, :2], mesh, at, shape=shape)),
        (ValueError, "is contiguous", lambda: make(local, mesh, at, shape=shape, stride=(1, 7))),
        (ValueError, "places a tensor of 35 elements", lambda: cut(whole[:2], mesh, at)),
        (ValueError, "is a placement of", lambda: cut(whole, other, at)),
        (NotImplementedError, "cannot be brought to", lambda: p.redistribute(other, [Replicate()])),
        (RuntimeError, "placements is needed", lambda: p.redistribute()),
        (NotImplementedError, "Leave grad_pl", lambda: p.to_local(grad_placements=[Replicate()])),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            call()
    assert torch.equal(p.full_tensor(), whole)


@on_ranks(2)
def test_arithmetic_with_dtensors(mesh):
    plain = seeded(Heads)
    p = fully_shard(copy.deepcopy(plain), mesh=mesh).head.weight.detach()
    want = plain.head.weight.detach()
    placed = distribute_tensor(want * 3, mesh, [Shard(0)])
    for call in (
        lambda a, b: a + b,
        lambda a, b: a.clone().copy_(b),
        lambda a, b: torch._foreach_add([a], [b])[0],
    ):
        torch.testing.assert_close(_whole(call(p, placed)), call(want, want * 3))
        at = p.redistribute(placements=placed.placements)
        torch.testing.assert_close(_whole(call(placed, at)), call(want * 3, want))
    for call in (lambda: placed + p, lambda: placed.copy_(p), lambda: torch.equal(placed, p)):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):  # torch's words
            call()
    assert torch.equal(p, distribute_tensor(want, mesh, [Shard(0)]))
    assert not torch.equal(p, placed)


@on_ranks(2)
def test_isinstance_in_traced_code(mesh):
    model = fully_shard(Heads(), mesh=mesh)
    model(torch.ones(2, 6)).sum().backward()

    def share(grads):
        parts = [g.to_local() if isinstance(g, DTensor) else g * 100 for g in grads]
        return sum(part.square().sum() for part in parts)

    grads = [p.grad for p in model.parameters()]
    traced = torch.compile(share, backend="aot_eager", fullgraph=True)(grads)
    torch.testing.assert_close(traced, share(grads))


# -- code that was written for DTensors ------------------------------------------------------------


@on_ranks(2)
def test_a_total_norm_is_like_a_tensor(mesh):
    plain = seeded(Heads)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    for each in (plain, model):
        each(torch.ones(2, 6)).square().sum().backward()
    want = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(total.full_tensor(), want)
    assert not isinstance(total, DTensor) and type(total.full_tensor()) is Tensor
    assert f"{total:.3f}" == f"{want:.3f}" and repr(total) == repr(total.full_tensor())
    assert type(pickle.loads(pickle.dumps(total))) is Tensor
    assert type(copy.deepcopy(total)) is Tensor
    assert not hasattr(total, "to_local")  # a share of it would be added up


@on_ranks(4)
def test_state_that_was_pickled_lies_where_it_lay(mesh):
    mesh = hybrid_mesh(2)
    model = fully_shard(seeded(Heads), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    held = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    optimizer.load_state_dict(torch.load(file))
    for parameter, value in zip(model.parameters(), held, strict=True):
        read = optimizer.state[parameter]["momentum_buffer"]
        assert read is not value and isinstance(read, DTensor)
        assert read.device_mesh is mesh and read.placements == value.placements
        assert torch.equal(read.full_tensor(), value.full_tensor())
    dcp.save(optimizer.state_dict(), checkpoint_id=tempfile.mkdtemp())


@pytest.mark.parametrize(
    ("placement", "assign"),
    [(None, True), (Shard(0), True), (Replicate(), True), (Replicate(), False)],
    ids=str,
)
@on_ranks(2)
def test_load_state_dict_of_dtensors(mesh, placement, assign):
    """Each value is distributed as what it goes to, or in a way of torch."""
    plain = seeded(Heads)
    with torch.device("meta" if assign else "cpu"):
        model = fully_shard(Heads(), mesh=mesh)
    values = {}
    for name, p in model.state_dict().items():
        placements = [placement] if placement else p.placements
        value = distribute_tensor(plain.state_dict()[name].clone(), p.device_mesh, placements)
        values[name] = nn.Parameter(value)
    model.load_state_dict(values, assign=assign)
    x = torch.ones(2, 6)
    torch.testing.assert_close(model(x), plain(x))
    plain(x).sum().backward()
    model(x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(p) is ShardTensor and torch.equal(full(p), q.detach())
        torch.testing.assert_close(full(p.grad), q.grad)


@pytest.mark.parametrize("placement", [None, Shard(0)], ids=str)
@on_ranks(2)
def test_an_assigned_parameter_is_frozen_or_not_and_has_its_own_gradient(mesh, placement):
    models = seeded(Heads), fully_shard(seeded(Heads), mesh=mesh)
    x = torch.ones(2, 6)
    for model in models:
        model(x).sum().backward()
        value = model.head.weight.detach() * 2
        if model is models[1] and placement is not None:
            value = distribute_tensor(full(value), mesh, [placement])
        model.head.weight = nn.Parameter(value, requires_grad=False)
        assert model.head.weight.grad is None and not model.head.weight.requires_grad
        model(x).sum().backward()
    for p, q in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(full(p), q)
        assert p.requires_grad == q.requires_grad
        torch.testing.assert_close(None if p.grad is None else full(p.grad), q.grad)


@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(2)
def test_state_dicts_of_torch(mesh, broadcast):
    """`torch.distributed.checkpoint.state_dict` by itself: whole values, and back."""
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    models = [fully_shard(seeded(Heads, seed), mesh=mesh) for seed in (0, 1)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
    x = torch.ones(2, 6)
    for model, optimizer in zip(models, optimizers, strict=True):
        model(x).square().sum().backward()
        optimizer.step()
    saved = get_model_state_dict(models[0], options=StateDictOptions(full_state_dict=True))
    state = get_optimizer_state_dict(
        models[0], optimizers[0], options=StateDictOptions(full_state_dict=True)
    )
    assert all(type(value) is Tensor for value in saved.values())
    assert all(
        not isinstance(value, DTensor)
        for values in state["state"].values()
        for value in values.values()
    )
    if broadcast and mesh.get_local_rank() > 0:
        saved, state = {}, {}
    assert not torch.equal(full(models[0].head.weight), full(models[1].head.weight))
    set_model_state_dict(models[1], saved, options=whole)
    state = copy.deepcopy(state)  # it shares its steps with the optimizer
    set_optimizer_state_dict(models[1], optimizers[1], state, options=whole)
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert type(q) is ShardTensor and torch.equal(full(p), full(q))


# -- gradients outside of a forward ----------------------------------------------------------------


def _whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


BESIDE = {
    "autograd.Function": lambda m, x: Fused.apply(x[:, :5], m.head.weight),
    "squares": lambda m, x: sum(p.square().sum() for p in m.parameters()),
    "norms": lambda m, x: sum(p.norm() for p in m.parameters()),
    "a total norm": lambda m, x: nn.utils.get_total_norm(list(m.parameters())),
    "norms of rows": lambda m, x: m.head.weight.norm(dim=1).sum(),
    "spread, extremum": lambda m, x: m.head.weight.std() + m.head.weight.amax(),
    "mean along a dim": lambda m, x: m.head.weight.mean(dim=0).square().sum(),
    "matmul": lambda m, x: (x[:, :5] @ m.head.weight.t()).square().mean(),
    "matmul of a function": lambda m, x: (x[:, :5] @ m.head.weight.square().t()).square().mean(),
    "matmul and norm": lambda m, x: (
        (x[:, :5] @ m.head.weight.t()).square().mean() + x.mean() * m.head.weight.norm()
    ),
    "autograd.Function and squares": lambda m, x: (
        Fused.apply(x[:, :5], m.head.weight) + x.mean() * m.head.weight.square().sum()
    ),
    "the full tensor": lambda m, x: (_whole(m.head.weight) * x.mean()).square().sum(),
}


@pytest.mark.parametrize("executor", ["uncompiled", "eager"])
@on_ranks(2)
def test_values_read_beside_the_forward(mesh, executor):
    """A loss that takes parameters outside of a forward, times something of each rank's batch."""
    plain = seeded(Heads)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    if executor != "uncompiled":
        model.compile(backend="shardc", options={"executor": executor})
    batches = [torch.full((4, 6), 1.0 + rank) + torch.arange(6) for rank in range(mesh.size())]

    def gradients(module, x, beside):
        module.zero_grad()
        (module(x).square().mean() + x.mean() * beside(module, x)).backward()
        return [full(p.grad) for p in module.parameters()]

    for name, beside in BESIDE.items():
        want = [gradients(plain, x, beside) for x in batches]
        assert not torch.allclose(want[0][-1], want[1][-1])
        got = gradients(model, batches[mesh.get_local_rank()], beside)
        for found, *each in zip(got, *want, strict=True):
            tell = partial("{}: {}".format, name)
            torch.testing.assert_close(found, torch.stack(each).mean(0), msg=tell)


@pytest.mark.parametrize(
    ("placements", "factor"), [(None, 1.5), ([Replicate()], None), ("sum", 3.0)]
)
@on_ranks(2)
def test_gradients_of_a_full_tensor(mesh, placements, factor):
    p = fully_shard(Heads(), mesh=mesh).head.weight
    given = [Partial()] if placements == "sum" else placements
    (p.full_tensor(grad_placements=given) * (1.0 + mesh.get_local_rank())).sum().backward()
    own = 1.0 + mesh.get_local_rank()
    part = p.grad.to_local()
    assert torch.equal(part, torch.full_like(part, own if factor is None else factor))
    p.grad = None
    (p.to_local() * own).sum().backward()
    assert torch.equal(p.grad.to_local(), torch.full_like(part, own))


# -- sharded modules as FSDP2's --------------------------------------------------------------------


@on_ranks(2)
def test_sharded_modules_pass_as_fsdp_modules(mesh):
    model = nn.Sequential(Heads(), nn.GELU(), nn.Linear(7, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert [isinstance(m, FSDPModule) for m in model.modules()] == [True, True, *[False] * 4]
    assert type(model[:2]) is nn.Sequential and isinstance(model[:2][0], FSDPModule)
    copied = copy.deepcopy(model)
    for m in (model, copied):
        state = m._get_fsdp_state()
        assert len(state._state_ctx.all_states) == 2
        assert torch.distributed.fsdp.fully_shard.state(m)._units(False) == [m._shardc_unit]
        with pytest.raises(AttributeError, match=r"'fsdp_params' is a private name.*units_of"):
            state._fsdp_param_group.fsdp_params  # noqa: B018
    before = type(model).double
    assert before is nn.Module.double
    assert next(model.double().parameters()).dtype == torch.float64


@pytest.mark.parametrize("executor", ["uncompiled", "eager"])
@on_ranks(2)
def test_sync_that_changes_between_a_forward_and_its_backward(mesh, executor):
    """As torch's pipeline stages set it: gradients are a mean, now or when they are reduced."""
    plain = seeded(Heads)
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    if executor != "uncompiled":
        model.compile(backend="shardc", options={"executor": executor})
    x = torch.ones(2, 6)
    plain(x).square().sum().backward()
    loss = model(x).square().sum()
    model.set_requires_gradient_sync(False)
    loss.backward()
    model.set_requires_gradient_sync(True)
    for state in model._get_fsdp_state()._state_ctx.all_states:
        state._fsdp_param_group.post_backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), q.grad)


# -- no way to save a part as the whole ------------------------------------------------------------


REFUSED = [
    (lambda p: safetensors.torch.save({"p": p}), "full_state_dict=True"),
    (lambda p: safetensors.torch.save({"p": p.cpu().clone()}), "full_state_dict=True"),
    (lambda p: p.numpy(), "full_tensor"),
    (lambda p: numpy.asarray(p.cpu()), "full_tensor"),
    (lambda p: p.tolist(), "full_tensor"),
    (lambda p: p.storage(), "full_tensor"),
    (torch.from_dlpack, "full_tensor"),
    (torch.multiprocessing.reductions.reduce_tensor, "full_tensor"),
]


@on_ranks(2)
def test_a_part_is_not_given_out_as_the_whole(mesh):
    """Alone in its bucket and with others, a parameter's value and a copy of it."""
    for model in (nn.Linear(6, 4, bias=False), Heads()):
        weight = next(fully_shard(model, mesh=mesh).parameters())
        for call, way_out in REFUSED:
            words = rf"of which one rank holds only a part.*{way_out}"
            for value in (weight.detach(), weight.detach().clone()):
                with pytest.raises(RuntimeError, match=words):
                    call(value)


PICKLED = {
    "torch.save": lambda model, state: torch.save(model.state_dict(), io.BytesIO()),
    "torch.save of optimizer state": lambda model, state: torch.save(state, io.BytesIO()),
    "pickle": lambda model, state: pickle.dumps(model.state_dict()),
    "torch.save of the whole": lambda model, state: torch.save(
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), io.BytesIO()
    ),
    "DCP": lambda model, state: dcp.save(state, checkpoint_id=tempfile.mkdtemp()),
}


@on_ranks(1, 2)
def test_a_part_that_is_pickled_is_told(mesh):
    model = fully_shard(seeded(Heads), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    for way, save in PICKLED.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save(model, optimizer.state_dict()["state"])
        told = [str(each.message) for each in caught if "was pickled" in str(each.message)]
        is_part = way not in ("torch.save of the whole", "DCP")
        assert bool(told) == (is_part and mesh.size() > 1 and mesh.get_local_rank() == 0), way
        for text in told:
            assert f"from {__file__}" in text or f"at {__file__}" in text
            assert "has the part of rank 0 of 2 alone" in text and "full_state_dict=True" in text


@on_ranks(2)
def test_a_parameter_made_of_a_statistic_is_an_ordinary_one(mesh):
    weight = fully_shard(Heads(), mesh=mesh).head.weight
    for value in (weight.norm(dim=1), weight.sum()):
        made = nn.Parameter(value, requires_grad=True)
        assert type(made) is nn.Parameter and made.requires_grad and made.is_leaf
        assert torch.equal(made.detach(), torch.as_tensor(value).detach())
