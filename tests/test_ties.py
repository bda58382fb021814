"""Weights that are tied after `fully_shard`, as transformers' `tie_weights` does, and untied."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import check_parity, compiled, full, on_meta, seeded, tokens
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from shardc import MixedPrecisionPolicy, ShardTensor, fully_shard, summon_full_params


class Model(nn.Module):
    """An embedding and a head, in modules that may be units."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleDict({"table": nn.Embedding(31, 6), "up": nn.Linear(6, 6)})
        self.last = nn.ModuleDict({"norm": nn.LayerNorm(6), "head": nn.Linear(6, 31, bias=False)})

    def forward(self, tokens):
        x = self.first["up"](self.first["table"](tokens)).tanh()
        return self.last["head"](self.last["norm"](x)).logsumexp(-1).mean()


def _tied(model, is_reversed=False):
    if is_reversed:
        model.first["table"].weight = model.last["head"].weight
    else:
        model.last["head"].weight = model.first["table"].weight
    return model


UNITS = {
    "one unit": [],
    "from an inner unit": ["first.table"],
    "into an inner unit": ["last.head"],
    "between inner units": ["first.table", "last.head"],
    "of several modules": ["first.table", "first.up", "last.norm", "last.head"],
}


def _sharded(model, mesh, units, **kwargs):
    for name in UNITS[units]:
        fully_shard(model.get_submodule(name), mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def _batch(seed):
    return {"tokens": tokens(seed)}


def _call(model, way):
    if way == "blocks":
        for module in (model.first["up"], model.last["head"]):
            module.compile(backend="shardc", options={"executor": "eager"})
    return compiled(model) if way == "eager" else model


CASES = [
    *((units, False, way) for units in UNITS for way in ("uncompiled", "eager")),
    *((units, False, "blocks") for units in ("into an inner unit", "between inner units")),
    *(("into an inner unit", True, way) for way in ("uncompiled", "eager")),
]


@pytest.mark.parametrize(("units", "is_reversed", "way"), CASES)
@on_ranks(2)
def test_weights_are_tied_after_sharding(mesh, units, is_reversed, way):
    plain, model = (seeded(Model) for _ in range(2))
    call = _call(_sharded(model, mesh, units), way)
    call(**_batch(3)).backward()  # graphs and gathers of two weights are there
    model.zero_grad()
    for each in (plain, model):
        _tied(each, is_reversed)
    weight = model.first["table"].get_parameter("weight")
    assert model.last["head"].get_parameter("weight") is weight
    check_parity(plain, model, call, _batch, mesh)
    other = copy.deepcopy(model)
    assert other.last["head"].weight is other.first["table"].weight
    check_parity(plain, other, other, _batch, mesh, steps=1)


@on_ranks(2)
def test_tied_weights_of_a_model_on_meta(mesh):
    model = on_meta(Model)
    _tied(_sharded(model, mesh, "into an inner unit"))
    plain = _tied(seeded(Model))
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    check_parity(plain, model, compiled(model), _batch, mesh)


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(2)
def test_weights_are_untied_by_the_parameter_that_was_there(mesh, way):
    plain, model = (seeded(Model) for _ in range(2))
    call = _call(_sharded(model, mesh, "one unit"), way)
    own = [each.last["head"].get_parameter("weight") for each in (plain, model)]
    for each in (plain, model):
        _tied(each)
    check_parity(plain, model, call, _batch, mesh, steps=1)
    with pytest.raises(NotImplementedError, match="'weight' of Linear is sharded and shared by 2"):
        model.last["head"].weight = nn.Parameter(torch.ones(31, 6))
    for each, weight in zip((plain, model), own, strict=True):
        each.last["head"].weight = weight
    check_parity(plain, model, call, _batch, mesh)


@on_ranks(2)
def test_a_tie_of_summoned_parameters_is_refused(mesh):
    model = _tied(_sharded(seeded(Model), mesh, "one unit"))
    with summon_full_params(model):
        _tied(model)  # they are
        model.first["up"].weight = nn.Parameter(torch.ones(6, 6))
        with pytest.raises(NotImplementedError, match=r"tie it to 'first\.up\.weight' outside of"):
            model.last["norm"].weight = model.first["up"].weight
    assert torch.equal(full(model.first["up"].weight), torch.ones(6, 6))


@on_ranks(2)
def test_what_cannot_be_tied_is_refused(mesh):
    model = _sharded(seeded(Model), mesh, "one unit")
    head = model.last["head"]
    before = head.get_parameter("weight")
    with pytest.raises(ValueError, match=r"cannot become a parameter of shape \(6, 6\)"):
        head.weight = model.first["up"].weight
    model.unshard()
    with pytest.raises(NotImplementedError, match=r"assigned a full parameter.*unshard\(\)"):
        head.weight = model.first["table"].weight
    model.reshard()
    copied = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    other = fully_shard(seeded(Model), mesh=copied)
    with pytest.raises(NotImplementedError, match=r"'first\.table\.weight' are sharded over"):
        head.weight = other.first["table"].weight
    assert head.get_parameter("weight") is before and isinstance(before, ShardTensor)
    assert not torch.equal(full(before), full(model.first["table"].weight))
    check_parity(seeded(Model), model, model, _batch, mesh)


@on_ranks(2)
def test_a_plain_model_of_tied_units_is_converted_whole(mesh):
    model = seeded(Model)
    for name in ("first.table", "last.head"):
        fully_shard(model.get_submodule(name), mesh=mesh)
    _tied(model)
    model.to("cpu").double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    head = model.last["head"]
    assert head.weight is model.first["table"].weight and isinstance(head.weight, ShardTensor)
    with pytest.raises(NotImplementedError, match="convert the unit's module instead"):
        head.float()
    with pytest.raises(NotImplementedError, match="convert the unit's module instead"):
        head._apply(lambda value: 2 * value)
    assert head.weight.dtype == torch.float64


class Attentions(nn.Module):
    """Attention reads the weight of a child, `out_proj`, that it does not call."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        return x.square().mean()


@pytest.mark.parametrize(
    ("way", "when"), [("uncompiled", "before"), ("uncompiled", "after"), ("eager", "after")]
)
@on_ranks(2)
def test_a_tied_weight_is_read_of_a_child_that_is_not_called(mesh, when, way):
    plain, model = (seeded(Attentions) for _ in range(2))
    computed = MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float64)
    for each in (plain, model):
        if each is plain or when == "before":
            each.blocks[2].out_proj.weight = each.blocks[0].out_proj.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=computed)
    fully_shard(model, mesh=mesh, mp_policy=computed)
    model.blocks[2].out_proj.weight = model.blocks[0].out_proj.weight
    assert isinstance(model.blocks[2].out_proj.weight, ShardTensor)
    plain.double()
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    x = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    for each in (plain, compiled(model) if way == "eager" else model):
        each(x).backward()
    for wanted, found in zip(plain.parameters(), model.parameters(), strict=True):
        dist.all_reduce(wanted.grad)
        assert torch.allclose(full(found.grad).double(), wanted.grad / 2, rtol=1e-6, atol=1e-9)


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x).tanh()


class Recomputed(nn.Module):
    """Blocks that a checkpoint recomputes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Tanh() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


@on_ranks(2)
def test_blocks_run_the_graph_of_their_own_tie(mesh):
    """A graph that reads two buckets would do for the block that reads one, but saves others."""
    plain, model = (seeded(Recomputed) for _ in range(2))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        block.compile(backend="shardc", options={"executor": "eager"})
    fully_shard(model, mesh=mesh)
    for each in (plain, model):
        each.blocks[1].linear.weight = each.blocks[0].linear.weight
    with torch.no_grad():
        model(torch.ones(3, 6))

    def batch(seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2 + seed // 100, 6, generator=generator, requires_grad=True)
        return {"x": x}

    check_parity(plain, model, model, batch, mesh)
    assert not any(block._shardc_unit.buckets[0].gathered.is_shared for block in model.blocks)
