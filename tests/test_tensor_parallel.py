"""Tensor parallelism: DTensor parameters sharded over the data axis, against FSDP2 and plain.

The grid is (dp, tp) = (2, 2). Ranks of one tp group get the same batch.
"""

import copy
import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from fsdp2 import check_against_fsdp2, fsdp2, sharded, whole
from models import (
    Wire,
    check_gradients,
    check_parity,
    compiled,
    full,
    laid_out_for_gpus,
    mean_over_ranks,
    seeded,
    tokens,
)
from ranks import mesh_of, on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import fsdp
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from shardc import ShardTensor, fully_shard, strict


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Embedding, blocks, head; sizes that tp divides, unless told otherwise."""

    def __init__(self, hidden=20, vocab=32, blocks=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, 12)
        self.layers = nn.ModuleList(Block(12, hidden) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, vocab, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class OneBlock(Tiny):
    def __init__(self):
        super().__init__(blocks=1)


class Uneven(Tiny):
    """Embedding and head cannot be halved."""

    def __init__(self):
        super().__init__(vocab=31)


class Odd(Tiny):
    """Nor can the hidden sizes: torch's tensor parallelism has no forward for it."""

    def __init__(self):
        super().__init__(hidden=19, vocab=31)


def grid_of(*shape, names=("dp", "tp")):
    return mesh_of("cpu", shape or (2, 2), mesh_dim_names=names)


def sequence_parallel(model, tp):
    """Every parameter is a DTensor: sharded by columns, by rows, by vocabulary, or replicated."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    plan |= {
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(model, tp, plan)


def linears_parallel(model, tp):
    """DTensors and plain parameters in one unit."""
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    return parallelize_module(model, tp, plan)


def make(grid, build=Tiny, parallel=sequence_parallel, shard=sharded, seed=0, **kwargs):
    return shard(parallel(seeded(build, seed), grid["tp"]), grid["dp"], **kwargs)


def batch(seed, vocab=31):
    size = (2, 6)
    return {"tokens": tokens(seed, size, vocab), "targets": tokens(seed + 50, size, vocab)}


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(4)
def test_values_that_a_functional_call_is_given_are_trained(mesh, way):
    grid = grid_of()
    plain, model = seeded(OneBlock), make(grid, OneBlock)
    if way == "eager":
        model.compile(backend="shardc", options={"executor": "eager"})
    outs, values = [], []
    for each in (plain, model):
        given = {k: (v.detach() * 1.5).requires_grad_() for k, v in each.named_parameters()}
        data = batch(grid["dp"].get_local_rank())
        outs.append(torch.func.functional_call(each, given, (), data))
        outs[-1].backward()
        values.append(given)
    torch.testing.assert_close(outs[1], outs[0])
    for name, value in values[0].items():
        want = mean_over_ranks(value.grad, grid["dp"])
        assert not torch.equal(value.grad, want)
        torch.testing.assert_close(full(values[1][name].grad), want, msg=name)


@pytest.mark.parametrize(
    "executor, build, parallel",
    [
        ("inductor", OneBlock, sequence_parallel),
        ("uncompiled", Tiny, linears_parallel),
        ("uncompiled", Uneven, sequence_parallel),
    ],
)
@on_ranks(4)
def test_it_trains_as_without(mesh, executor, build, parallel):
    grid = grid_of()
    model = make(grid, build, parallel)
    held = sum(p.to_local().numel() for p in model.parameters())
    assert held < sum(p.numel() for p in model.parameters()) / 2, "not cut in both ways"
    step = model if executor == "uncompiled" else compiled(model, executor, fullgraph=True)
    check_parity(seeded(build), model, step, batch, grid["dp"])


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@pytest.mark.parametrize("parallel", [linears_parallel, sequence_parallel])
@on_ranks(4)
def test_vectors_that_lie_in_another_unit_than_their_matrices(mesh, way, parallel):
    """A GPU's layout: the outermost unit shards biases of modules that an inner one has sharded."""
    grid = grid_of()
    with laid_out_for_gpus():
        model = parallel(seeded(Tiny), grid["tp"])
        fully_shard(model, mesh=grid["dp"], units="auto")
    block = model.layers[0]
    weight, bias = (each._slot.bucket for each in (block.up.weight, block.up.bias))
    assert weight.owner is not bias.owner
    step = model if way == "uncompiled" else compiled(model, way, fullgraph=True)
    check_parity(seeded(Tiny), model, step, batch, grid["dp"])


class Summed(Block):
    """Its input is the same on all ranks, or a rank's part of a sum."""

    def __init__(self, mesh, placement):
        super().__init__(12, 20)
        self.mesh, self.placement = mesh, placement

    def forward(self, x):
        placed = DTensor.from_local(x, self.mesh, [self.placement], run_check=False)
        return super().forward(placed.redistribute(self.mesh, [Replicate()]).to_local())


@on_ranks(2)
def test_blocks_that_differ_in_placements_alone(mesh):
    """They are not one body."""

    def build(alike=False):
        placements = [Replicate() if alike or index % 2 else Partial() for index in range(6)]
        return nn.Sequential(*(Summed(mesh, each) for each in placements))

    models = [fully_shard(seeded(build), mesh=mesh, units=Summed) for _ in range(2)]
    alike, x = seeded(lambda: build(alike=True)), torch.ones(3, 12)
    losses = [call(x).sum() for call in (models[0], compiled(models[1]), alike)]
    assert not torch.equal(losses[0], losses[2])
    torch.testing.assert_close(losses[1], losses[0])
    losses[0].backward()
    losses[1].backward()
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), full(theirs.grad))


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@on_ranks(2)
def test_a_graph_with_a_mesh_inside_a_checkpoint_is_not_kept(mesh):
    """The key of a graph does not tell the meshes of ranks apart; also what is inside counts."""
    grid = grid_of(1, 2)
    model = seeded(lambda: nn.Sequential(Checkpointed(12, 20)))
    parallelize_module(model, grid["tp"], {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    counters.clear()
    compiled(model, "inductor")(torch.ones(3, 12)).sum().backward()
    found = counters["aot_autograd"]
    assert (found["autograd_cache_bypass"], found["autograd_cache_saved"]) == (1, 0)


@on_ranks(4)
def test_it_is_fsdp2_compiled(mesh):
    """The first gradients have the same bits; clipping sums its norm in another order."""
    grid = grid_of()
    theirs, ours = make(grid, shard=fsdp2), make(grid)
    norms, first = {theirs: [], ours: []}, {}

    def step(model, call, number):
        call(**batch(10 * number + grid["dp"].get_local_rank())).backward()
        first.setdefault(model, [whole(p.grad).clone() for p in model.parameters()])
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        norms[model].append(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    check_against_fsdp2(
        theirs, ours, compiled(ours, fullgraph=True), step, steps=3, tolerance=1e-5,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )  # fmt: skip
    assert all(map(torch.equal, first[ours], first[theirs]))
    assert min(norms[theirs]) > 0.3, "nothing was clipped"
    torch.testing.assert_close(norms[ours], norms[theirs])


@on_ranks(4)
def test_what_stays_gathered_is_not_gathered_again(mesh):
    grid, counts = grid_of(), {}
    for reshard in (True, False):
        model = make(grid, reshard_after_forward=reshard)
        model(**batch(0)).backward()
        loss = model(**batch(0))
        with Wire() as wire:
            loss.backward()
        counts[reshard] = Counter(message.kind for message in wire.sent)
    assert counts[True] - counts[False] == {"all_gather": 3}  # the others are of tensor parallelism
    assert not counts[False] - counts[True]


@on_ranks(4)
def test_mixed_precision_and_accumulation(mesh):
    """Uncompiled, as FSDP2 does it: equal bits, and near them over several micro-batches, where
    FSDP2 sums what is partial over tp last and we with each micro-batch."""
    grid = grid_of()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = make(grid, shard=fsdp2, mp_policy=policy)
    ours = make(grid, mp_policy=policy)
    for micro_batches, tolerance in ((1, 0), (2, 1e-2)):
        losses = {theirs: [], ours: []}
        for model, seen in losses.items():
            for index in range(micro_batches):
                model.set_requires_gradient_sync(index == micro_batches - 1)
                seen.append(model(**batch(20 * index + grid["dp"].get_local_rank())))
                seen[-1].backward()
        assert losses[theirs] == losses[ours]
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(
                whole(q.grad), whole(p.grad), rtol=tolerance, atol=tolerance / 10
            )
            p.grad = q.grad = None


@on_ranks(4)
def test_modules_read_the_dtensor_they_had(mesh):
    grid = grid_of()
    before = sequence_parallel(seeded(Tiny), grid["tp"])
    model = make(grid)
    seen = {}

    def note(name):
        return lambda module, args: seen.update({name: module.weight})

    for name in ("embed", "norm", "layers.0.up", "layers.1.down"):
        model.get_submodule(name).register_forward_pre_hook(note(name))
    loss = model(**batch(0))
    for name, weight in seen.items():
        want = before.get_submodule(name).weight
        assert isinstance(weight, DTensor) and weight.requires_grad
        assert weight.placements == want.placements and weight.device_mesh == want.device_mesh
        assert weight.shape == want.shape and weight.stride() == want.stride()
        assert torch.equal(weight.to_local(), want.to_local())
    loss.backward()
    for p in model.parameters():
        assert isinstance(p.grad, ShardTensor) and p.grad._shard_spec == p._shard_spec
    up = model.layers[0].up.weight
    assert isinstance(up, ShardTensor) and up.shape == (20, 12)
    assert "of the local value [10, 12]" in repr(up) and "Shard(dim=0)" in repr(up)


@on_ranks(4)
def test_norms_and_non_finite_values(mesh):
    grid = grid_of()
    plain, model = seeded(Tiny), make(grid, parallel=linears_parallel)
    values = batch(grid["dp"].get_local_rank())
    plain(**values).backward()
    model(**values).backward()
    for p in plain.parameters():
        p.grad = mean_over_ranks(p.grad, grid["dp"])
    for order in (2.0, 1.0, float("inf")):
        want = nn.utils.get_total_norm([p.grad for p in plain.parameters()], order)
        got = nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
        torch.testing.assert_close(got, want)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.grad.norm(order), p.grad.norm(order))
    bad = model.layers[0].down.weight.grad  # cut by columns: global column 19 is on tp rank 1 only
    value = full(bad)
    value[0, 19] = float("nan")
    bad.copy_(value)
    holders = bad.to_local().isnan().any().int()
    dist.all_reduce(holders)
    assert holders == 1, "only one rank should hold it"
    assert bad.isnan().any(), "every rank should know"
    found, scale = torch.zeros(()), torch.ones(())
    torch._amp_foreach_non_finite_check_and_unscale_([bad], found, scale)
    assert found == 1
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]).isnan()


@on_ranks(4)
def test_initialisers_give_what_they_give_unsharded(mesh):
    grid = grid_of()
    with torch.device("meta"):
        model = sequence_parallel(Tiny(), grid["tp"])
    model = sharded(model, grid["dp"]).to_empty(device="cpu")
    plain = Tiny()
    for each in (plain, model):
        torch.manual_seed(3)
        for module in each.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        with torch.no_grad():
            nn.init.orthogonal_(each.head.weight)
            nn.init.eye_(each.layers[0].up.weight)
            each.layers[1].up.bias.copy_(torch.arange(20.0))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(q), p)


@on_ranks(4)
def test_checkpoints_go_to_any_layout(mesh, tmp_path):
    """(dp, tp) -> 1-D, unsharded and another grid; and back from 1-D."""
    grid = grid_of()

    def trained(model, seed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1 * (seed + 1))
        optimizer.step()
        return model, optimizer

    kinds = {
        "grid": lambda seed: make(grid, Odd, linears_parallel, seed=seed),
        "all placed": lambda seed: make(grid, Odd, seed=seed),
        "other grid": lambda seed: make(grid_of(1, 4), Odd, seed=seed),
        "1-D": lambda seed: sharded(seeded(Odd, seed), mesh),
        "plain": lambda seed: seeded(Odd, seed),
    }

    def state(model, optimizer):
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    def values(model, optimizer):
        found = [full(p) for p in model.parameters()]
        for entry in optimizer.state_dict()["state"].values():
            found += [full(entry["exp_avg"]), full(entry["exp_avg_sq"])]
        return found

    for source, targets in (
        ("grid", ("1-D", "plain", "all placed")),
        ("all placed", ("1-D", "plain", "other grid")),
        ("1-D", ("grid", "all placed")),
    ):
        saved = trained(kinds[source](1), 1)
        path = tmp_path / source
        dcp.save(state(*saved), checkpoint_id=path)
        for target in targets:
            loaded = trained(kinds[target](2), 2)
            assert not torch.equal(values(*loaded)[0], values(*saved)[0])
            found = state(*loaded)
            dcp.load(found, checkpoint_id=path)
            loaded[0].load_state_dict(found["model"])
            loaded[1].load_state_dict(found["optim"])
            for a, b in zip(values(*saved), values(*loaded), strict=True):
                assert torch.equal(a, b), (source, target)


@on_ranks(4)
def test_full_and_placed_values_load(mesh):
    grid = grid_of()
    model, plain = make(grid), seeded(Tiny, 1)
    model.load_state_dict(plain.state_dict())
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(q), p)
    placed = sequence_parallel(seeded(Tiny, 2), grid["tp"])
    model.load_state_dict(placed.state_dict())
    for p, q in zip(placed.parameters(), model.parameters(), strict=True):
        assert torch.equal(full(q), p.full_tensor())
    again = copy.deepcopy(model.state_dict())  # what `async_save` does
    assert again["head.weight"]._shard_spec == model.head.weight._shard_spec


@on_ranks(4)
def test_a_tie_across_units_is_kept(mesh):
    grid = grid_of()
    model = sequence_parallel(seeded(Tiny), grid["tp"])
    model.embed.weight = model.head.weight
    fully_shard(model.head, mesh=grid["dp"])
    fully_shard(model, mesh=grid["dp"])
    assert model.embed.weight is model.head.weight
    assert len(list(model.parameters())) == len(list(Tiny().parameters())) - 1
    plain = seeded(Tiny)
    plain.embed.weight = plain.head.weight
    check_parity(plain, model, model, batch, grid["dp"])


@on_ranks(4)
def test_copies_of_the_model(mesh):
    """HSDP and tensor parallelism; the data axes are two dims of three."""
    grid = grid_of(2, 1, 2, names=("replicate", "shard", "tp"))
    model = sharded(sequence_parallel(seeded(Tiny), grid["tp"]), grid["replicate", "shard"])
    plain = seeded(Tiny)
    values = batch(grid["replicate"].get_local_rank())
    model(**values).backward()
    plain(**values).backward()
    check_gradients(plain, model, grid["replicate"])


class Gathers(torch.Tensor):
    """A tensor subclass with FSDP2's hooks, as torchao's float8 weights are."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.Tensor._make_wrapper_subclass(cls, args[0].shape)  # of `detach`

    def fsdp_pre_all_gather(self, mesh): ...

    def fsdp_post_all_gather(self, *args): ...


@on_ranks(4)
def test_refusals(mesh):
    grid = grid_of()

    def linear(placement, on):
        module = nn.Linear(8, 8, bias=False)
        placements = placement if isinstance(placement, list) else [placement]
        module.weight = nn.Parameter(DTensor.from_local(torch.ones(8, 8), on, placements))
        return module

    def refused(module, match, **kwargs):
        weight = module.weight
        with pytest.raises(NotImplementedError, match=match):
            fully_shard(module, mesh=grid["dp"], **kwargs)
        assert type(module) is nn.Linear and module.weight is weight

    refused(linear(Partial(), grid["tp"]), r"parameter 'weight' is a DTensor.*Partial.*neither")
    refused(linear(Shard(0), grid["dp"]), r"mesh.*overlaps.*in ranks \[")
    refused(linear([Replicate(), Shard(0)], grid), "overlaps")
    module = nn.Linear(8, 8, bias=False)
    data = torch.Tensor._make_wrapper_subclass(Gathers, (8, 8))
    module.weight = nn.Parameter(data, requires_grad=False)
    refused(module, r"is a Gathers and cannot be sharded: it has no __tensor_flatten__")
    module = linear(Shard(0), grid["tp"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fully_shard(module, mesh=grid["dp"])
    with pytest.raises(RuntimeError, match="SGD was made before fully_shard"):
        optimizer.step()
    weight = make(grid).layers[0].up.weight
    for view in (lambda: weight.view(-1), lambda: weight[3], lambda: weight.t()):
        strict()
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
            view()
        strict(False)
    full = weight.detach().full_tensor()
    assert torch.equal(weight.detach().t() + 0, full.t())
    assert torch.equal(weight.detach()[3] + 0, full[3])
    for dims in ({}, {"dim": 0}, {"dim": 1}):
        torch.testing.assert_close(weight.detach().sum(**dims), full.sum(**dims))
        torch.testing.assert_close(weight.detach().amax(**dims), full.amax(**dims))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="tensor parallelism"):
        weight[[1, 2]] = 0.0


def spmd_model(mesh, data, shard, **kwargs):
    """Every parameter a DTensor on the whole mesh: as `sequence_parallel`, replicated on `data`."""

    def place(name, module, _):
        kind = {"up": Shard(0), "down": Shard(1)}.get(name.rsplit(".")[-1], Replicate())
        for key, param in list(module.named_parameters(recurse=False)):
            cut = Replicate() if key == "bias" and kind == Shard(1) else kind
            placements = [Replicate() if dim in data else cut for dim in mesh.mesh_dim_names]
            new = distribute_tensor(param.detach(), mesh, placements)
            module.register_parameter(key, nn.Parameter(new))

    return shard(distribute_module(seeded(Tiny), mesh, place), mesh, **kwargs)


HAS_DIMS = pytest.mark.skipif(
    not hasattr(fsdp, "DataParallelMeshDims"), reason="this torch has no dp_mesh_dims"
)
FSDP = {"dp": 2, "tp": 2}, {"shard": "dp"}
FLATTENED = {"dp": 2, "cp": 1, "tp": 2}, {"shard": ("dp", "cp")}
HSDP = {"rep": 2, "dp": 2, "tp": 1}, {"replicate": "rep", "shard": "dp"}
REPLICATED = {"rep": 2, "tp": 2}, {"replicate": "rep"}


@HAS_DIMS
@pytest.mark.parametrize(
    "shape, dims, executor",
    [(*FSDP, "inductor"), *((*case, None) for case in (FSDP, FLATTENED, HSDP, REPLICATED))],
)
@on_ranks(4)
def test_parameters_on_the_whole_mesh(mesh, shape, dims, executor):
    grid = only_mesh(tuple(shape.items()))
    dims = fsdp.DataParallelMeshDims(**dims)
    data = {*dims.shard_names, *dims.replicate_names}
    theirs = spmd_model(grid, data, fsdp2, dp_mesh_dims=dims)
    ours = spmd_model(grid, data, sharded, dp_mesh_dims=dims)
    names = [name for name in shape if name in data]
    rank = sum(grid.get_local_rank(name) * 2**i for i, name in enumerate(names))
    losses = []
    for model in (theirs, compiled(ours, executor) if executor else ours):
        inputs = {key: whole_batch(value, grid, data) for key, value in batch(rank).items()}
        losses.append(model(**inputs))
        losses[-1].backward()
    torch.testing.assert_close(whole(losses[1]), whole(losses[0]))
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(whole(q.grad), whole(p.grad), msg=name)


@HAS_DIMS
@on_ranks(4)
def test_what_the_whole_mesh_needs(mesh):
    grid = only_mesh((("dp", 2), ("tp", 2)))
    dp, tp, rows = (fsdp.DataParallelMeshDims(shard=name) for name in ("dp", "tp", "rows"))
    with pytest.raises(ValueError, match=r"names \['rows'\]; the mesh has the dims \['dp', 'tp'\]"):
        fully_shard(seeded(Tiny), mesh=grid, dp_mesh_dims=rows)
    with pytest.raises(ValueError, match="needs a mesh whose dims have names"):
        fully_shard(seeded(Tiny), dp_mesh_dims=dp)
    with pytest.raises(ValueError, match=r"'embed.weight' is a plain tensor; with dp_mesh_dims"):
        fully_shard(seeded(Tiny), mesh=grid, dp_mesh_dims=dp)
    with pytest.raises(NotImplementedError, match=r"with dp_mesh_dims it must be on"):
        fully_shard(sequence_parallel(seeded(Tiny), grid["tp"]), mesh=grid, dp_mesh_dims=dp)
    with pytest.raises(NotImplementedError, match=r"it is Shard.* on the data-parallel dim 'tp'"):
        spmd_model(grid, {"dp"}, sharded, dp_mesh_dims=tp)


@functools.cache
def only_mesh(shape):
    """FSDP2 compares meshes by identity, and DTensor may give a parameter an equal older one."""
    names, sizes = zip(*shape, strict=True)
    return mesh_of("cpu", sizes, mesh_dim_names=names)


def whole_batch(local, grid, data):
    placements = [Shard(0) if name in data else Replicate() for name in grid.mesh_dim_names]
    return DTensor.from_local(local, grid, placements, run_check=False)
