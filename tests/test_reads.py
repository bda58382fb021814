"""Ways to read a parameter other than `self.weight`, and to give a module other values."""

from functools import partial
from unittest import mock

import pytest
import torch
from models import check_parity, full, mean_over_ranks, seeded
from ranks import on_ranks
from torch import nn

from shardc import MixedPrecisionPolicy, ShardTensor, fully_shard
from shardc.backend.graph_plan import graph_plans
from shardc.runtime import compat


def compiled_in(way, model):
    """`model`, compiled in a way: whole, its blocks alone, or not."""
    blocks = [each for each in model.modules() if isinstance(each, Block)]
    for module in {"uncompiled": [], "blocks": blocks}.get(way, [model]):
        module.compile(backend="shardc", options={"executor": "eager"})
    return model


def batch(seed):
    """Values of a rank and seed: what is right on one rank only is off on two."""
    return {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))}


class Block(nn.Module):
    """Reads its parameters, and those of modules inside, as `read` does."""

    def __init__(self, read):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4) + 1)
        self.inner = nn.Linear(4, 4)
        self.read = read

    def forward(self, x):
        return self.read(self, x)


class Model(nn.Module):
    """A block between layers."""

    def __init__(self, read):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), Block(read), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.block(self.first(x)).tanh()).square().mean()


def _has(self, x):
    x = x * self.scale if hasattr(self, "scale") else x + 5
    return x * 3 if hasattr(self, "missing") or not hasattr(self.inner, "bias") else x


def _get_with_default(self, x):
    scale, bias = getattr(self, "scale", None), getattr(self.inner, "bias", None)
    x = x + 5 if scale is None or bias is None else x * scale + bias
    return x if getattr(self.inner, "missing", None) is None else x * 3


def _in_dict(self, x):
    return torch.nn.functional.linear(
        x * self._parameters["scale"], self.inner._parameters["weight"]
    )


def _in_vars(self, x):
    return x * vars(self)["_parameters"].get("scale") + self.inner.__dict__["_parameters"]["bias"]


def _by_get_parameter(self, x):
    return x * self.get_parameter("scale") @ self.get_parameter("inner.weight")


def _by_name(self, x):
    named = dict(self.named_parameters())
    return x * named["scale"] + named["inner.bias"] @ dict(self.inner.named_parameters())["weight"]


def _penalty(self, x):
    """Of a batch's own weight: a rank's gradient is not that of the others."""
    return self.inner(x * self.scale) + x.mean() * sum(p.square().sum() for p in self.parameters())


def _as_parameter(self, x):
    is_one = isinstance(self.scale, nn.Parameter) and isinstance(self.inner.weight, nn.Parameter)
    return self.inner(x * self.scale) if is_one else x


READS = [
    _has, _get_with_default, _in_dict, _in_vars, _by_get_parameter, _by_name, _penalty,
    _as_parameter,
]  # fmt: skip


class Reading(nn.Module):
    """A block for each way to read."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, READS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("way", ["uncompiled", "blocks", "eager"])
@on_ranks(2)
def test_a_read_gives_the_full_parameter(mesh, way):
    plain, model = (seeded(Reading) for _ in range(2))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    call = compiled_in(way, fully_shard(model, mesh=mesh))
    check_parity(plain, model, call, batch, mesh)


def _by_attribute(self, x):
    return self.inner(x * self.scale)


def _set_items(held, values):
    for name, value in values.items():
        held[name] = value


def _update(held, values):
    held.update(values)


def _or(held, values):
    held |= values


@pytest.mark.parametrize("put", [_set_items, _update, _or])
@on_ranks(2)
def test_a_forward_puts_values_in_the_place_of_parameters(mesh, put):
    """As transformers 5.24 does for its experts: they compute with the local values of DTensors."""

    def with_doubled(self, x):
        own = dict(self.inner.named_parameters())
        put(self.inner._parameters, {name: 2 * param for name, param in own.items()})
        try:
            return self.inner(x * self.scale)
        finally:
            put(self.inner._parameters, own)

    plain, model = (seeded(partial(Model, with_doubled)) for _ in range(2))
    fully_shard(model.block, mesh=mesh)
    check_parity(plain, model, fully_shard(model, mesh=mesh), batch, mesh)


@on_ranks(1)
def test_parameters_of_a_sharded_module_are_not_taken_out(mesh):
    held = fully_shard(nn.Linear(4, 4), mesh=mesh)._parameters
    for take_out in (held.clear, held.popitem, lambda: held.pop("bias")):
        with pytest.raises(NotImplementedError, match="of Linear is sharded and cannot be removed"):
            take_out()
    assert held.setdefault("weight") is held["weight"] and held.setdefault("other") is None
    assert list(held) == ["weight", "bias", "other"]


class Whole(Model):
    """Walks through the parameters of all units in its forward."""

    def forward(self, x):
        penalty = sum(param.square().sum() for param in self.parameters())
        return super().forward(x) + x.mean() * penalty


class Tied(Whole):
    """The same, with a weight that two of its modules share."""

    def __init__(self, read):
        super().__init__(read)
        self.last.weight = self.block.inner.weight


class Follows(Model):
    """Moves frozen parameters after others in its forward, as momentum encoders do."""

    def __init__(self, read):
        super().__init__(read)
        self.last.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.last.parameters(), self.first.parameters(), strict=True):
                own.mul_(0.5).add_(other, alpha=0.5)
        return super().forward(x)


_REFUSED = {
    Tied: "'weight' of Linear is shared by several modules, and compiled code that walks",
    Follows: r"the forward updates a sharded parameter of shape \(4, 4\) in place",
}
"""What compiled code is refused."""


@pytest.mark.parametrize("way", ["uncompiled", "blocks", "eager"])
@pytest.mark.parametrize("cls", [Whole, Tied, Follows])
@on_ranks(2)
def test_a_forward_walks_through_parameters(mesh, cls, way):
    plain, model = (seeded(lambda: cls(_by_attribute)) for _ in range(2))
    fully_shard(model.block, mesh=mesh)
    call = compiled_in(way, fully_shard(model, mesh=mesh))
    if cls in _REFUSED and way == "eager":
        with pytest.raises(RuntimeError, match=_REFUSED[cls]):
            call(**batch(0))
        return
    check_parity(plain, model, call, batch, mesh)
    if cls is Follows:  # a forward that records nothing walks through full parameters
        with torch.no_grad(), pytest.raises(RuntimeError, match="the write is lost"):
            model(**batch(7))
        return
    with torch.no_grad():
        want, got = plain(**batch(7)), model(**batch(7))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(2)
def test_a_forward_cannot_keep_a_full_parameter(mesh, way):
    def keep(self, x):
        self.kept = self.scale
        return x * self.kept

    model = seeded(lambda: Model(keep))
    fully_shard(model, mesh=mesh)
    words = "'kept' of Block was assigned a full parameter" if way == "uncompiled" else "'kept'"
    with pytest.raises((NotImplementedError, ValueError), match=words):
        compiled_in(way, model)(**batch(0))
    assert "kept" not in dict(model.block.named_parameters())


# -- functional calls ------------------------------------------------------------------------------


def _halved(model, other):
    return {name: param.detach() * 0.5 for name, param in model.named_parameters()}


def _one_sharded(model, other):
    return {"block.inner.bias": dict(model.named_parameters())["block.inner.bias"].detach() + 1}


def _whole(model, other):
    return {name: full(param).clone().requires_grad_() for name, param in other.named_parameters()}


def _one_whole(model, other):
    return {"last.weight": _whole(model, other)["last.weight"]}


def _own(model, other):
    return dict(model.named_parameters())


def _of_another(model, other):
    return dict(other.named_parameters())


def _derived(model, other):
    return {name: param * 0.5 for name, param in model.named_parameters()}


GIVEN = [_halved, _one_sharded, _whole, _one_whole, _own, _of_another, _derived]


def _models(mesh, is_sharded):
    models = [seeded(lambda: Model(_by_attribute), seed) for seed in (0, 1)]
    for model in models if is_sharded else ():
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return models


def _called(call, model, other, given, mesh):
    """Two steps with given values: outputs, gradients of what was given whole, of the models."""
    found = []
    model.zero_grad()
    other.zero_grad()
    for seed in (mesh.get_local_rank(), mesh.get_local_rank() + 10):
        values = given(model, other)
        kept = dict(values)
        loss = call(values, batch(seed)["x"])
        assert all(value is kept[name] for name, value in values.items())
        if loss.requires_grad:
            loss.backward()
        found.append(loss.detach())
        found += [v.grad for v in values.values() if v.is_leaf and not _is_of(v, model, other)]
        found.append(model(**batch(seed)).detach())
    for param in (*model.parameters(), *other.parameters()):
        grad = param.grad
        assert grad is None or isinstance(grad, ShardTensor) == isinstance(param, ShardTensor)
        is_local = grad is not None and not isinstance(grad, ShardTensor)
        found.append(mean_over_ranks(grad, mesh) if is_local else grad)
    return [None if each is None else full(each) for each in found]


def _is_of(value, *models):
    return any(value is param for model in models for param in model.parameters())


@pytest.mark.parametrize("way", ["uncompiled", "blocks", "eager", "inside"])
@on_ranks(2)
def test_a_functional_call_computes_with_what_it_is_given(mesh, way):
    results = []
    for is_sharded in (False, True):
        model, other = _models(mesh, is_sharded)

        def call(values, x, model=model):
            return torch.func.functional_call(model, values, (x,))

        if is_sharded and way == "inside":
            call = torch.compile(call, backend="shardc", options={"executor": "eager"})
        elif is_sharded:
            compiled_in(way, model)
        with torch._dynamo.config.patch(recompile_limit=64):
            results.append([_called(call, model, other, given, mesh) for given in GIVEN])
    for given, want, got in zip(GIVEN, *results, strict=True):
        assert any(each is not None and each.any() for each in want)
        tell = partial("{}: {}".format, given.__name__)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=tell)


@pytest.mark.parametrize("way", ["uncompiled", "eager", "inside"])
@on_ranks(2)
def test_what_is_given_is_read_in_the_dtype_of_the_unit(mesh, way):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    sharded = {k: (2 * v.detach()).requires_grad_() for k, v in model.named_parameters()}
    whole = {k: full(v).requires_grad_() for k, v in sharded.items()}
    plain = {k: full(v).requires_grad_() for k, v in sharded.items()}
    x = batch(mesh.get_local_rank())["x"].bfloat16()

    def call(values):
        return torch.func.functional_call(model, values, (x,))

    if way == "inside":
        call = torch.compile(call, backend="shardc", options={"executor": "eager"})
    elif way == "eager":
        model.compile(backend="shardc", options={"executor": "eager"})
    low = {k: v.bfloat16() for k, v in plain.items()}
    want = torch.func.functional_call(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), low, (x,))
    given = [whole] if way == "inside" else [whole, sharded]  # there sharded ones are refused
    for out in (want, *map(call, given)):
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    for name, value in plain.items():
        assert value.grad.any() and value.grad.dtype == torch.float32
        torch.testing.assert_close(whole[name].grad, value.grad)
        if len(given) == 2:
            torch.testing.assert_close(full(sharded[name].grad), mean_over_ranks(value.grad, mesh))


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(2)
def test_function_transforms_of_a_functional_call(mesh, way):
    results = []
    for is_sharded in (False, True):
        model, _ = _models(mesh, is_sharded)
        if is_sharded:
            compiled_in(way, model)
        values = {name: full(param) for name, param in model.named_parameters()}

        def loss(values, x, model=model):
            return torch.func.functional_call(model, values, (x,))

        each = torch.func.vmap(torch.func.grad(loss), (None, 0))
        results.append(each(values, batch(mesh.get_local_rank())["x"]))
    torch.testing.assert_close(results[1], results[0])
    for sharded in (dict(model.named_parameters()), _halved(model, None)):
        with pytest.raises(NotImplementedError, match="'weight' of Linear was given one: give"):
            torch.func.grad(loss)(sharded, batch(0)["x"])
    check_parity(_models(mesh, False)[0], model, model, batch, mesh)


@on_ranks(1)
def test_dynamo_walks_through_stored_parameters(mesh):
    """It does in a module's forward, with torch 2.11: a gather would not be the graph's."""
    kinds = []

    def read(self, x):
        kinds.append({type(p) for p in self.parameters()})
        with mock.patch.object(compat, "compile_id", lambda: (0, 0)):
            kinds.append({type(p) for p in self.parameters()})
        return x

    model = fully_shard(seeded(lambda: Model(read)), mesh=mesh)
    model(**batch(0))
    assert ShardTensor not in kinds[0] and kinds[1] == {ShardTensor}


@on_ranks(2)
def test_a_whole_graph_gathers_for_itself(mesh):
    """It is given nothing that the runtime has gathered."""
    model = seeded(lambda: Model(_penalty))
    fully_shard(model.block, mesh=mesh)
    model = compiled_in("whole", fully_shard(model, mesh=mesh))
    graph_plans.clear()
    model(**batch(0))
    sent = " ".join(label for plan in graph_plans for label in plan.collectives)
    assert "block: all_gather" in sent and "Model: all_gather" in sent, sent
