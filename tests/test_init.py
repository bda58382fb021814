"""Models built on meta: every rank makes its part of what one process would have made."""

from typing import ClassVar

import pytest
import torch
from models import (
    Block,
    Live,
    Stack,
    batch_of,
    check_parity,
    compiled,
    full,
    on_meta,
    seeded,
    shard_all,
)
from ranks import mesh_of, on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions

import shardc
from shardc import ShardTensor, fully_shard


def _to_empty_each(module):
    """What FSDP1's users give as `param_init_fn`."""
    module.to_empty(device=torch.device("cpu"), recurse=False)
    module.reset_parameters()


def check_equal(model, plain):
    """Bit by bit; first, that one is sharded and the other not."""
    assert any(isinstance(p, ShardTensor) for p in model.parameters())
    assert not any(isinstance(p, ShardTensor) for p in plain.parameters())
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    assert list(named) == list(others)
    for name, value in named.items():
        assert not value.is_meta and torch.equal(full(value), others[name]), name


# -- values --------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_values_are_those_of_one_process(mesh):
    plain = on_meta()
    torch.manual_seed(7)
    shardc.materialize(plain, "cpu")
    state = torch.get_rng_state()
    other = seeded(Stack, 7)
    assert not torch.equal(plain.head.weight, other.head.weight)  # another order of draws

    def first_sharded(model):
        return shardc.materialize(shard_all(model, mesh))

    def by_function(model):
        return shardc.materialize(shard_all(model, mesh), "cpu", lambda m: m.reset_parameters())

    def by_argument(model):
        return shard_all(model, mesh, param_init_fn=_to_empty_each)

    def kept_on_the_host(model):
        return shardc.materialize(shard_all(model, mesh, offload_policy=shardc.CPUOffloadPolicy()))

    for make in (first_sharded, by_function, kept_on_the_host, by_argument):
        model = on_meta()
        ids = [id(p) for p in model.parameters()]
        torch.manual_seed(7)
        assert make(model) is model
        assert [id(p) for p in model.parameters()] == ids
        check_equal(model, plain)
        assert torch.equal(torch.get_rng_state(), state)
    check_parity(plain, model, model, batch_of, mesh)


@on_ranks(2)
def test_bottom_up_as_fsdp1(mesh):
    """Inner units first, each with its function, then the rest."""
    model, plain = on_meta(), on_meta()
    torch.manual_seed(3)
    for inner in plain.layers:
        shardc.materialize(inner, "cpu")
    shardc.materialize(plain, "cpu")
    torch.manual_seed(3)
    for inner in model.layers:
        fully_shard(inner, mesh=mesh, param_init_fn=_to_empty_each)
        assert not inner.up.weight.is_meta
    fully_shard(model, mesh=mesh, param_init_fn=_to_empty_each)
    check_equal(model, plain)


@on_ranks(2)
def test_to_empty_module_by_module(mesh):
    """A loop that FSDP2's users write: the first module of a unit allocates all of it."""
    model, plain = shard_all(on_meta(), mesh), on_meta().to_empty(device="cpu")
    for each in (model, plain):
        torch.manual_seed(2)
        for module in each.modules():
            if hasattr(module, "reset_parameters"):
                module.to_empty(device="cpu", recurse=False)
                module.reset_parameters()
    check_equal(model, plain)
    with pytest.raises(NotImplementedError, match="convert the unit's module"):
        model.layers[0].up.to_empty(device="meta")


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.body = nn.Linear(5, 4), kind(4, 6, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.body(self.inner(x))[0].square().mean()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@on_ranks(2)
def test_recurrent_layers_move_from_meta_and_change_dtype(mesh, kind):
    plain = seeded(lambda: Recurrent(kind))
    model = on_meta(lambda: Recurrent(kind))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())
    plain.double()
    model.double()
    model.body.flatten_parameters()
    check_parity(plain, model, model, lambda seed: {"x": torch.randn(3, 2, 5).double()}, mesh)


@on_ranks(4)
def test_copies_of_the_model(mesh):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = on_meta()
    torch.manual_seed(1)
    shardc.materialize(plain, "cpu")
    torch.manual_seed(1)
    check_equal(shard_all(on_meta(), grid, param_init_fn=_to_empty_each), plain)
    torch.manual_seed(10 + mesh.get_local_rank())  # copies would drift apart
    model = shard_all(on_meta(), grid)
    with pytest.raises(RuntimeError, match=r"ranks disagree on .*random state .*seed all ranks"):
        shardc.materialize(model)
    assert all(p.is_meta for p in model.parameters())
    model = on_meta()
    with pytest.raises(RuntimeError, match=r"ranks disagree on .*random state .*seed all ranks"):
        shard_all(model, grid, param_init_fn=_to_empty_each)
    assert not any(isinstance(p, ShardTensor) for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"ranks disagree on .*only some ranks give a param"):
        one = _to_empty_each if mesh.get_local_rank() == 1 else None
        shard_all(model, mesh, param_init_fn=one)
    assert not any(isinstance(p, ShardTensor) for p in model.parameters())
    model = shard_all(on_meta(), grid, param_init_fn=_to_empty_each, sync_module_states=True)
    shardc.check_same_values(_whole(model), mesh)


def _whole(model):
    """What a model gathers to within this rank's copy, as a plain module."""
    holder = nn.Module()
    for name, param in model.named_parameters():
        holder.register_buffer(name.replace(".", "_"), full(param))
    return holder


class Wide(nn.Module):
    """Sixteen equal layers: the largest parameter is a sixteenth of the model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(16))


@on_ranks(4)
def test_no_rank_holds_more_than_one_full_parameter(mesh):
    each, total = 128 * 128 * 4, 16 * 128 * 128 * 4
    with Live() as whole:
        plain = shardc.materialize(on_meta(Wide), "cpu")
    assert total <= whole.peak < 1.1 * total and plain is not None
    for units in (None, "auto"):
        with Live(limit=total / 4 + 1.1 * each) as part:
            model = fully_shard(on_meta(Wide), mesh=mesh, units=units, param_init_fn=_to_empty_each)
        assert total / 4 + each <= part.peak <= part.limit, (part.peak, total / 4, each)
        assert all(isinstance(p, ShardTensor) for p in model.parameters())


# -- which modules, in which order -----------------------------------------------------------------


class Noting(nn.Linear):
    """Notes when it is initialised."""

    calls: ClassVar[list[str]] = []

    def __init__(self, name, *inside):
        super().__init__(2, 2)
        self.name = name
        self.inside = nn.ModuleList(inside)

    def reset_parameters(self):
        if hasattr(self, "name"):
            self.calls.append(self.name)
        super().reset_parameters()

    def forward(self, x):
        for child in self.inside:
            x = child(x)
        return super().forward(x)


@on_ranks(2)
def test_parents_first_and_each_module_once(mesh):
    shared = on_meta(lambda: Noting("shared"))
    model = on_meta(lambda: Noting("a", Noting("b", Noting("d")), Noting("c")))
    model.inside[0].inside.append(shared)
    model.inside[1].inside.append(shared)
    tied = on_meta(lambda: Noting("tied"))  # owns nothing that c does not
    tied.weight, tied.bias = model.inside[1].weight, model.inside[1].bias
    model.inside.append(tied)
    ignored = Noting("ignored")
    model.inside.append(ignored)
    with_values = Noting("has values")
    before = with_values.weight.detach().clone()
    model.inside.append(fully_shard(with_values, mesh=mesh))
    fully_shard(model.inside[0], mesh=mesh)
    Noting.calls.clear()
    fully_shard(model, mesh=mesh, ignored_params=[ignored])
    shardc.materialize(model)
    assert Noting.calls == ["a", "b", "c", "d", "shared"]
    assert tied.weight is model.inside[1].weight and not tied.weight.is_meta
    assert torch.equal(full(with_values.weight), before)
    assert not isinstance(ignored.weight, ShardTensor)
    shardc.materialize(model)  # nothing is left to do
    assert len(Noting.calls) == 5
    model(torch.ones(1, 2)).sum().backward()
    assert tied.weight.grad is not None


class Angles(nn.Module):
    """A buffer that only its own function can make, and no `reset_parameters`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return x * self.weight * self.angles


def _init_angles(module):
    if isinstance(module, Angles):
        module.weight.fill_(2)
        module.angles.copy_(torch.arange(3.0))
    else:
        module.reset_parameters()


def _rotated():
    return nn.Sequential(nn.Linear(3, 3), Angles(), nn.BatchNorm1d(3))


@on_ranks(2)
def test_what_cannot_be_initialised_is_named(mesh):
    model = fully_shard(on_meta(_rotated), mesh=mesh)
    with pytest.raises(ValueError, match=r"no reset_parameters\(\): '1' \(Angles\)\. Define it"):
        shardc.materialize(model)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    for bad in (3, "reset"):
        with pytest.raises(TypeError, match=f"param_init_fn must be a function.*{bad!r}"):
            fully_shard(on_meta(_rotated), mesh=mesh, param_init_fn=bad)
        with pytest.raises(TypeError, match="init_fn must be a function"):
            shardc.materialize(model, init_fn=bad)
    with pytest.raises(RuntimeError, match=r"initialising '0' \(Linear\) by the given function"):
        shardc.materialize(on_meta(_rotated), "cpu", lambda module: module.no_such_method())

    rank = mesh.get_local_rank()
    with pytest.raises((TypeError, RuntimeError), match="must be a function"):  # told by the other
        shardc.materialize(model, init_fn=_init_angles if rank == 0 else 3)
    with pytest.raises((ValueError, RuntimeError), match="no reset_parameters"):
        shardc.materialize(model, init_fn=_init_angles if rank == 1 else None)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])

    shardc.materialize(model, init_fn=_init_angles)
    assert full(model[1].weight).tolist() == [2.0] * 3 and model[1].angles.tolist() == [0, 1, 2]
    assert model[2].running_var.tolist() == [1.0] * 3 and model[2].num_batches_tracked == 0


# -- forgetting it ---------------------------------------------------------------------------------


@on_ranks(2)
def test_a_forward_on_meta_names_what_has_no_values(mesh):
    theirs = torch.distributed.fsdp.fully_shard(on_meta(_rotated), mesh=mesh)
    model = fully_shard(on_meta(_rotated), mesh=mesh)
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="still on meta device"):
        theirs(x)
    parameters = "'0.weight', '0.bias', '1.weight'"
    buffers = "'1.angles'"
    for call in (model, compiled(model), compiled(model, fullgraph=True)):
        for _ in range(2):
            with pytest.raises(
                Exception, match=f"still on the meta device.*{parameters}.*{buffers}"
            ):
                call(x)
    with pytest.raises(RuntimeError, match=r"still on the meta device.*0.weight"):
        model[0](x)  # a part of the unit
    shardc.materialize(model, init_fn=_init_angles)
    expected = model(x).detach()
    for call in (compiled(model), compiled(model, fullgraph=True), model):
        for _ in range(2):
            torch.testing.assert_close(call(x).detach(), expected)
    with torch.no_grad():
        model.to("meta")
    with pytest.raises(RuntimeError, match="still on the meta device"):
        model(x)


@on_ranks(2)
def test_a_buffer_alone_on_meta_is_named(mesh):
    model = fully_shard(_rotated(), mesh=mesh)
    model[1].angles = model[1].angles.to("meta")
    model._shardc_unit.note_meta()
    x = torch.randn(4, 3)
    for call in (model, compiled(model, fullgraph=True)):
        with pytest.raises(Exception, match=r"still on the meta device.*\['1.angles'\]"):
            call(x)
    model[1].angles = torch.arange(3.0)  # by hand, which nobody is told
    compiled(model, fullgraph=True)(x)
    model(x)


def _assign_by_hand(model, values):
    for name, value in values.items():
        prefix, _, attribute = name.rpartition(".")
        module = model.get_submodule(prefix)
        is_param = attribute in module._parameters
        setattr(module, attribute, nn.Parameter(value.clone()) if is_param else value.clone())


def _fill(model, values):
    model.to_empty(device="cpu")
    shardc.set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))


_GIVING_VALUES = {
    "assign": lambda model, values: model.load_state_dict(values, assign=True),
    "assign around": lambda model, values: nn.ModuleDict({"in": model}).load_state_dict(
        {f"in.{name}": value for name, value in values.items()}, assign=True
    ),
    "materialize": lambda model, values: shardc.materialize(model),
    "set_model_state_dict": _fill,
    "by hand": _assign_by_hand,
}


@pytest.mark.parametrize(
    ("give", "in_place"),
    [
        ("assign", True),
        ("assign around", False),
        ("materialize", False),
        ("set_model_state_dict", True),
        ("by hand", True),  # where `torch.compile(model)` follows, nobody is told of a buffer
    ],
)
@on_ranks(2)
def test_a_model_that_was_on_meta_is_compiled_once(mesh, give, in_place):
    def build():
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in "ab"))

    plain, model = seeded(build), fully_shard(on_meta(build), mesh=mesh, units="auto")
    torch.manual_seed(0)
    _GIVING_VALUES[give](model, plain.state_dict())
    call = model if in_place else compiled(model)
    if in_place:
        model.compile(backend="shardc", options={"executor": "eager"})
    torch._dynamo.reset()
    counters.clear()
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        want, got = plain(x).square().sum(), call(x).square().sum()
        torch.testing.assert_close(got, want)
        got.backward()
    assert counters["stats"]["unique_graphs"] == 1


# -- models of others ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@on_ranks(2)
def test_transformers_model(mesh, name):
    import real_models

    build = getattr(real_models, name)
    plain = shardc.materialize(on_meta(build), "cpu", init_fn=id)  # `to_empty` would part ties
    model = shard_all(on_meta(build), mesh)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for each in (plain, model):
        torch.manual_seed(4)
        each.init_weights()
    check_equal(model, plain)
    assert model.lm_head.weight is model.get_input_embeddings().weight or name == "llama"
    if name == "llama":  # no parent adjusts a child: FSDP1's order gives such a model as well
        by_module = shard_all(on_meta(build), mesh)
        shardc.materialize(by_module, init_fn=by_module._init_weights)
        assert torch.equal(by_module.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
        assert full(by_module.model.embed_tokens.weight).std().item() == pytest.approx(
            0.02, rel=0.2
        )
    batch = real_models.language
    check_parity(plain, model, model, batch, mesh, steps=1)


@on_ranks(2)
def test_ignored_parameters_stay_on_meta(mesh):
    model = on_meta(Block)
    fully_shard(model, mesh=mesh, ignored_params={model.up.bias})
    shardc.materialize(model)
    assert model.up.bias.is_meta and not model.up.weight.is_meta
    model.up.bias = nn.Parameter(torch.zeros(37))
    model(torch.ones(1, 18))
