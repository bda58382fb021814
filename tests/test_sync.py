"""Starting from rank 0's values, and finding out that ranks have others."""

import copy
import warnings

import accelerator
import pytest
import torch
import torch.distributed as dist
from models import (
    Stack,
    Wire,
    check_parity,
    compiled,
    full,
    is_unsharded,
    on_meta,
    seeded,
    tokens,
)
from ranks import mesh_of, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardc
from shardc import fully_shard, units_of
from shardc.runtime import compat
from shardc.runtime.checks import telling
from shardc.runtime.watch.agreement import rounds


class Buffered(nn.Module):
    """Parameters of two dtypes, frozen ones, buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.frozen = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.low = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.norm = nn.BatchNorm1d(5)
        self.norm.running_mean.normal_()
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("scale", torch.randn(()), persistent=False)
        self.register_buffer("rows", torch.randn(1, 5).expand(3, 5))
        self.also = nn.Module()
        self.also.register_buffer("mask", self.mask)
        self.skip = nn.Linear(5, 5)
        self.skip.register_buffer("own", torch.randn(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(self.frozen(x)) * self.scale + self.rows[0]


def _check_values(model, want, but=()):
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in {**dict(want.named_parameters()), **dict(want.named_buffers())}.items():
        if not name.startswith(but):
            assert not states[name].is_meta and torch.equal(full(states[name]), value), name


# -- rank 0's values -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
@on_ranks(4)
def test_all_ranks_start_from_rank_0(mesh, shape):
    rank = mesh.get_local_rank()
    names = ("replicate", "shard")[-len(shape) :]
    mesh = mesh_of("cpu", shape, mesh_dim_names=names)
    want = seeded(Buffered, 100)
    for elsewhere in ("meta", "other values"):
        _start_from_rank_0(mesh, rank, want, elsewhere)


def _start_from_rank_0(mesh, rank, want, elsewhere):
    if rank == 0 or elsewhere != "meta":
        model = seeded(Buffered, 100 + rank)
    else:
        model = on_meta(Buffered)
    if rank:
        assert model.mask.is_meta or not torch.equal(model.layers[0].weight, want.layers[0].weight)
    own = model.skip.own

    def to_empty(module):  # as FSDP1's users do it where rank 0 has loaded a checkpoint
        module.to_empty(device=torch.device("cpu"), recurse=False)

    given = {"sync_module_states": True, "param_init_fn": to_empty if rank else None}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **given)
    fully_shard(model, mesh=mesh, ignored_params=[model.skip], **given)
    _check_values(model, want, but="skip")
    assert model.also.mask is model.mask
    assert model.skip.own is own  # ignored: not sent, as FSDP1 does with parameters
    if rank:
        assert own.is_meta or not torch.equal(own, want.skip.own)
    x = torch.ones(4, 5)
    torch.testing.assert_close(model.eval()(x), want.eval()(x))


@on_ranks(2, device="sim")
def test_values_on_the_host_are_sent_from_the_device(mesh):
    """FSDP1 refuses them, as its broadcasts take a tensor where it lies."""
    want, model = seeded(Buffered), seeded(Buffered, dist.get_rank())
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    with accelerator.recording() as log:
        fully_shard(model, mesh=mesh, sync_module_states=True)
    sent = [entry for entry in log if entry.kind == "collective"]
    buckets = {b for unit in units_of(model).values() for b in unit._shardc_unit.buckets}
    buffers = {buffer for buffer in want.buffers()}
    assert len(sent) == len(buckets) + len(buffers)  # all of them over the device's backend
    states = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in {**dict(want.named_parameters()), **dict(want.named_buffers())}.items():
        assert torch.equal(full(states[name]).cpu(), value), name


@on_ranks(2)
def test_a_bucket_at_a_time_and_each_buffer_once(mesh):
    rank = mesh.get_local_rank()
    scatter, broadcast, calls = dist.scatter, dist.broadcast, []

    def note(kind, call):
        def run(tensor, *args, **kwargs):
            calls.append((kind, tensor.numel()))
            return call(tensor, *args, **kwargs)

        return run

    model = seeded(Buffered, rank) if rank == 0 else on_meta(Buffered)
    dist.scatter, dist.broadcast = note("bucket", scatter), note("buffer", broadcast)
    try:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, sync_module_states=True)
        fully_shard(model.norm, mesh=mesh, sync_module_states=True)
        before = list(calls)
        fully_shard(model, mesh=mesh, sync_module_states=True)
    finally:
        dist.scatter, dist.broadcast = scatter, broadcast
    segments = {
        id(bucket): bucket.segment
        for unit in {m._shardc_unit for m in units_of(model).values()}
        for bucket in unit.buckets
    }
    sizes = sorted(s.numel() * s.element_size() for s in segments.values())
    assert sorted(n for kind, n in calls if kind == "bucket") == sizes  # bytes; a segment each
    assert sorted(n for kind, n in before if kind == "buffer") == [8, 20, 20]  # of the norm
    own = {"mask": 5, "scale": 4, "rows": 60, "skip.own": 8}  # tied `mask` once
    assert sorted(n for kind, n in calls[len(before) :] if kind == "buffer") == sorted(own.values())


class Pair(torch.Tensor):
    """A tensor of two plain ones, as quantised buffers are."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        a, b = (
            func(*[getattr(x, part) if isinstance(x, Pair) else x for x in args], **(kwargs or {}))
            for part in ("a", "b")
        )
        return Pair(a, b)


@on_ranks(2)
def test_tensor_subclasses_are_sent_by_their_parts(mesh):
    rank = mesh.get_local_rank()

    class WithPair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("pair", Pair(torch.full((3,), rank + 1.0), torch.zeros(3) + rank))
            self.register_buffer("placed", distribute_tensor(torch.ones(2), mesh, [Replicate()]))

    model = WithPair()
    model.placed.to_local().add_(rank)
    fully_shard(model, mesh=mesh, sync_module_states=True)
    assert model.pair.a.tolist() == [1.0] * 3 and model.pair.b.tolist() == [0.0] * 3
    assert isinstance(model.placed, DTensor) and model.placed.to_local().tolist() == [1.0, 1.0]
    bad = nn.Module()
    bad.weight = nn.Parameter(Pair(torch.ones(3), torch.ones(3)))
    with pytest.raises(NotImplementedError, match="parameter 'weight' is a Pair"):
        fully_shard(bad, mesh=mesh, sync_module_states=True)
    assert type(bad.weight.data) is Pair


@on_ranks(4)
def test_tensor_parallel_parameters_are_sent(mesh):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build(seed):
        module = seeded(lambda: nn.Linear(6, 4), seed)
        placed = distribute_tensor(module.weight.detach(), grid["tp"], [Shard(0)])
        module.weight = nn.Parameter(placed)
        return module

    want = seeded(lambda: nn.Linear(6, 4), 5)
    model = build(5 + grid["dp"].get_local_rank())
    fully_shard(model, mesh=grid["dp"], sync_module_states=True)
    _check_values(model, want)


@on_ranks(2)
def test_without_values_on_rank_0(mesh):
    rank = mesh.get_local_rank()
    for build in (on_meta, lambda: on_meta() if rank == 0 else Stack()):
        model = build()
        with pytest.raises(ValueError, match="starts from the values of rank 0"):
            fully_shard(model, mesh=mesh, sync_module_states=True)
        assert is_unsharded(model)
    model = Buffered()
    if rank == 0:
        model.mask = model.mask.to("meta")
    with pytest.raises(ValueError, match="starts from the values of rank 0"):
        fully_shard(model, mesh=mesh, sync_module_states=True)
    assert is_unsharded(model)
    with pytest.raises(
        RuntimeError, match=r"ranks disagree on the parameters.*sync_module_states=True"
    ):
        fully_shard(model, mesh=mesh, sync_module_states=rank == 1)
    assert is_unsharded(model)
    torch.manual_seed(rank)  # on meta everywhere: made by the function, equal on all ranks
    model = on_meta(lambda: nn.BatchNorm1d(3))
    calls = []

    def init(module):
        calls.append(module)
        module.reset_parameters()
        module.running_mean.fill_(rank)

    fully_shard(model, mesh=mesh, param_init_fn=init, sync_module_states=True)
    assert calls == [model] and model.running_mean.tolist() == [0.0] * 3


def _load(model, values, rank):
    """As verl does it: memory first, then what rank 0 had."""
    model = model.to("cpu") if rank == 0 else model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    shardc.set_model_state_dict(model, values if rank == 0 else {}, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@pytest.mark.parametrize("way", ["uncompiled", "in place", "wrapped"])
@on_ranks(2)
def test_values_on_rank_0_alone_wait_for_those_of_the_others(mesh, way):
    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "ab"))

    rank, plain = mesh.get_local_rank(), seeded(build)
    model = on_meta(build) if rank else seeded(build)
    values, x = model.state_dict(), torch.randn(3, 4)
    fully_shard(model, mesh=mesh, units="auto")
    if way == "in place":
        model.compile(backend="shardc", options={"executor": "eager"})
    call = compiled(model) if way == "wrapped" else model
    ways_out = "sync_module_states=True"  # also where a rank finds first that it is on meta
    on_rank = f"still on the meta device|{ways_out}" if rank else ways_out
    with pytest.raises(Exception, match=on_rank):
        call(x)
    with pytest.raises(RuntimeError, match=r"'0'.*broadcast_from_rank0.*sync_module_states=True"):
        shardc.materialize(model)
    model.to("cpu") if rank == 0 else model.to_empty(device="cpu")
    for each in (call, copy.deepcopy(model)):
        with pytest.raises(Exception, match=r"broadcast_from_rank0.*sync_module_states=True"):
            each(x)
    _load(model, values, rank)

    def batch(seed):
        return {"input": torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))}

    check_parity(plain, model, call, batch, mesh, loss_of=lambda out: out.square().sum())


# -- the same values on all ranks ------------------------------------------------------------------


@on_ranks(3)
def test_differing_values_are_named(mesh):
    rank = mesh.get_local_rank()
    model = seeded(Buffered, 3)
    shardc.check_same_values(model)
    shardc.check_same_values(model, mesh)
    shardc.check_same_values(on_meta(), mesh)
    grid = mesh_of("cpu", (3, 1))
    for name, change in (
        ("parameter 'low'", lambda model: model.low.data[1].add_(1)),
        ("parameter 'complex'", lambda model: model.complex.data[1].add_(1)),
        ("buffer 'mask'", lambda model: model.mask.logical_not_()),
    ):
        if rank == 1:
            change(model)
        for over in (None, mesh, grid):
            with pytest.raises(RuntimeError, match=rf"{name}.*rank\(s\) \[0, 2\].*rank\(s\) \[1\]"):
                shardc.check_same_values(model, over)
        model = seeded(Buffered, 3)
    with pytest.raises(RuntimeError, match=r"'low' differs .*\d more.*\[2\]: \[3\].*on meta"):
        shardc.check_same_values(on_meta(Buffered) if rank == 2 else model)
    fully_shard(model.layers[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"on rank 0 parameter 'layers.0.weight' is sharded"):
        shardc.check_same_values(model)


def _warnings_of(step):
    """Those of all ranks of a job that has been told nothing before."""
    telling._warned.clear()
    if dist.get_rank() == 0:
        compat.group_store(dist.group.WORLD).delete_key("shardc/told/first values")
    dist.barrier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            step()
    own = [str(w.message) for w in told if "patchwork" in str(w.message)]
    assert all(w.filename == __file__ for w in told if str(w.message) in own)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return [text for texts in ranks for text in texts]


_AFTERWARDS = {
    "nothing": lambda model: None,
    "move": lambda model: model.to("cpu").double().float(),
    "copy": copy.deepcopy,
    "load": lambda model: model.load_state_dict(seeded(Stack).state_dict()),
    "assign": lambda model: model.load_state_dict(seeded(Stack).state_dict(), assign=True),
    "write": lambda model: [nn.init.constant_(p, 0.1) for p in model.parameters()],
}


@pytest.mark.parametrize(
    ("afterwards", "way"),
    [*((afterwards, "uncompiled") for afterwards in _AFTERWARDS),
     ("nothing", "compiled"), ("load", "compiled")],
)  # fmt: skip
@on_ranks(2)
def test_ranks_that_were_seeded_differently_are_told_once(mesh, afterwards, way):
    model = seeded(Stack, mesh.get_local_rank())
    nn.init.ones_(model.embed.weight)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    made = _AFTERWARDS[afterwards](model)
    model = made if afterwards == "copy" else model
    call = compiled(model) if way == "compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        call(tokens(1), tokens(2)).backward()
        optimizer.step()

    told = _warnings_of(step)
    if afterwards in ("load", "assign", "write"):
        assert not told
    else:
        (text,) = told
        # A copy's units are made from the outermost in.
        first = "'head.weight' of Stack" if afterwards == "copy" else "'up.weight' of layers.0"
        assert first in text and "sync_module_states=True" in text


@on_ranks(4)
def test_what_ranks_may_begin_with_is_not_told(mesh):
    rank = mesh.get_local_rank()
    grid = mesh_of("cpu", (2, 2))
    for build, over, sync in (
        (lambda: seeded(Stack), mesh, False),
        (lambda: seeded(Stack, rank), mesh, True),
        (lambda: seeded(Stack, rank // 2), grid, False),  # a copy of the model of its own seed
        (lambda: seeded(Buffered), mesh, False),
    ):
        model = fully_shard(build(), mesh=over, units="auto", sync_module_states=sync)
        assert not any(unit._shardc_unit.differs for unit in units_of(model).values())
    model = fully_shard(seeded(Stack, rank), mesh=grid, units="auto")
    assert all(unit._shardc_unit.differs for unit in units_of(model).values())


@on_ranks(2)
def test_first_values_cost_no_message(mesh):
    model = seeded(Stack, mesh.get_local_rank())
    before = rounds(mesh.get_group())
    with Wire() as wire:
        fully_shard(model, mesh=mesh, units="auto")
    assert rounds(mesh.get_group()) == before + 1 and not wire.sent
