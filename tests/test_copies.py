"""A sharded model as a living object: copies, averages, assigned parameters, data and gradients."""

import copy
import functools
import gc
import threading

import pytest
import torch
import torch.distributed as dist
from fsdp2 import sharded
from models import (
    Stack,
    check_gradients,
    check_parity,
    compiled,
    full,
    mean_over_ranks,
    on_meta,
    seeded,
    tokens,
)
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import shardc
from shardc import (
    MixedPrecisionPolicy,
    ShardTensor,
    fully_shard,
    register_fsdp_forward_method,
    units_of,
)

TIED = functools.partial(Stack, tied=True)
EXECUTORS = pytest.mark.parametrize("executor", ["eager", None])


def _batch(seed=0):
    rank = dist.get_rank()
    return {"tokens": tokens(seed + rank), "targets": tokens(seed + rank + 50)}


def _call(model, executor):
    return compiled(model, executor) if executor else model


class Picky(Stack):
    """Leaves an attribute out of its state, which cannot be copied."""

    def __init__(self):
        super().__init__(tied=True)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {key: value for key, value in super().__getstate__().items() if key != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()


@EXECUTORS
@on_ranks(2)
def test_a_copy_trains_apart(mesh, executor):
    model = sharded(seeded(Picky), mesh)
    model.layers[0].up.weight.requires_grad_(False)
    call = _call(model, executor)
    call(**_batch()).backward()
    before = [full(p) for p in model.parameters()]
    other = copy.deepcopy(model)
    assert list(units_of(other)) == list(units_of(model))
    assert not {*other.modules()} & {*model.modules()} and other.lock is not model.lock
    assert all(p.grad is None for p in other.parameters())
    assert [p.requires_grad for p in other.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    plain = seeded(Picky)
    plain.layers[0].up.weight.requires_grad_(False)
    check_parity(plain, other, _call(other, executor), _batch, mesh)
    assert not all(map(torch.equal, before, map(full, other.parameters()))), "it did not train"
    assert all(map(torch.equal, before, map(full, model.parameters())))
    assert other.head.weight is not model.head.weight
    assert dict(other.named_parameters()).keys() == dict(plain.named_parameters()).keys()


class _Parametrized(nn.Module):
    """Layers whose weights are computed, one of them from what each forward in training updates."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.last(self.first(x).tanh()).square().mean()


@pytest.mark.parametrize(("is_inside", "executor"), [(False, "eager"), (True, None)])
@on_ranks(2)
def test_a_copy_of_parametrized_modules_trains_apart(mesh, is_inside, executor):
    plain, model = seeded(_Parametrized), seeded(_Parametrized)
    for module in (model.first, model.last, model) if is_inside else (model,):
        fully_shard(module, mesh=mesh)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()

    def batch(seed=0):
        generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
        return {"x": torch.randn(3, 6, generator=generator)}

    check_parity(plain, other, _call(other, executor), batch, mesh)
    assert not any(full(param).any() for param in model.parameters())


COPIES = {
    "warm": copy.deepcopy,
    "in a container": lambda model: copy.deepcopy({"all": [model.layers, model]})["all"][1],
    "inside of a module": lambda model: copy.deepcopy(nn.Sequential(model))[0],
    "an average": lambda model: AveragedModel(model).module,
    "of a shallow one": lambda model: copy.deepcopy(copy.copy(model)),
}


def _compiled_as(model, how, backend):
    if how == "wrapped":
        return torch.compile(model, **backend)
    for module in model.layers if how == "blocks" else [model]:
        module.compile(**backend)
    return model


@pytest.mark.parametrize("how", ["whole", "blocks", "wrapped"])
@on_ranks(2)
def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(mesh, how):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    before = [full(p) for p in model.parameters()]
    backends = ({"backend": "eager"}, {"backend": "shardc", "options": {"executor": "eager"}})
    pairs = zip((plain, model), backends, strict=True)
    calls = [_compiled_as(each, how, backend) for each, backend in pairs]
    with torch._dynamo.config.patch(recompile_limit=64):
        for kind in ("cold", *COPIES):
            want, got = (COPIES.get(kind, copy.deepcopy)(call) for call in calls)
            names = [(type(each).__name__, type(each).__module__) for each in (got, want)]
            assert names[0] == names[1], kind
            assert list(got.state_dict()) == list(want.state_dict()), kind
            check_parity(want, got, got, _batch, mesh, steps=1)
            assert all(map(torch.equal, before, map(full, model.parameters()))), kind
            assert all(p.grad is None for p in model.parameters())
            if kind == "cold":
                for call in calls:
                    call(**_batch(3)).backward()
                    call.zero_grad()
        check_parity(plain, model, calls[1], _batch, mesh, steps=1)


@EXECUTORS
@on_ranks(2)
def test_a_shallow_copy_has_the_parameters_of_the_original(mesh, executor):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    shallow = copy.copy(model)
    assert shallow is not model and shallow.layers is model.layers
    assert all(map(lambda p, q: p is q, shallow.parameters(), model.parameters()))
    del model
    gc.collect()
    check_parity(plain, shallow, _call(shallow, executor), _batch, mesh)


@on_ranks(2)
def test_a_copy_keeps_wrappers_that_forward_attributes(mesh):
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
    other = copy.deepcopy(fully_shard(model, mesh=mesh))
    assert type(other[0]) is type(model[0])
    assert list(dict(other.named_parameters())) == list(dict(model.named_parameters()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p is not q and torch.equal(full(p), full(q))
    other(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_a_copy_of_a_model_that_began_on_meta(mesh):
    model = sharded(on_meta(), mesh).to_empty(device="cpu")
    model.load_state_dict(seeded(Stack).state_dict())
    other = copy.deepcopy(model)
    check_parity(seeded(Stack), other, other, _batch, mesh)
    for p, q in zip(seeded(Stack).parameters(), model.parameters(), strict=True):
        assert torch.equal(full(q), p.detach())


@on_ranks(2)
def test_a_copy_of_a_part(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    block = copy.deepcopy(model.layers[0])
    x = torch.randn(2, 18)
    torch.testing.assert_close(block(x), plain.layers[0](x))
    assert block._shardc_unit.is_root and not model.layers[0]._shardc_unit.is_root
    param = copy.deepcopy(model.head.weight)
    assert type(param.data) is ShardTensor and isinstance(param, nn.Parameter)
    assert torch.equal(full(param), plain.head.weight)


@on_ranks(2)
def test_a_copy_of_a_unit_without_parameters_of_its_own(mesh):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    other = copy.deepcopy(model)
    expected = model(torch.ones(2, 4))
    del model, module
    gc.collect()
    assert other._shardc_unit.modules == (other,)
    with shardc.summon_full_params(other):
        torch.testing.assert_close(other(torch.ones(2, 4)), expected)


@on_ranks(2)
def test_a_copy_of_a_model_with_a_unit_of_several_modules(mesh):
    model = seeded(lambda: Stack(3))
    fully_shard([model.layers[0], model.layers[2]], mesh=mesh)
    compiled(model)(**_batch()).backward()
    new = copy.deepcopy(model)
    assert type(new.layers[0]) is type(model.layers[0])
    of_new, of_old = {id(p) for p in new.parameters()}, {id(p) for p in model.parameters()}
    assert len(of_new) == len(of_old) and not of_new & of_old
    for each in (model, new):
        each.zero_grad()
    for each in (new, model):
        compiled(each)(**_batch(7)).backward()
    for (name, p), q in zip(new.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(p.grad), full(q.grad), rtol=0, atol=0, msg=name)


@EXECUTORS
@on_ranks(2)
def test_a_copy_of_one_module_of_a_unit_of_several(mesh, executor):
    layers = seeded(lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]))
    policy = MixedPrecisionPolicy(torch.bfloat16, full_precision_in_eval=True)
    fully_shard(list(layers), mesh=mesh, mp_policy=policy)
    new = copy.deepcopy(layers[1])
    layers.eval()
    for each in (layers[1], new.eval()):
        assert _call(each, executor)(torch.ones(2, 4)).dtype == torch.float32


@on_ranks(2)
def test_an_assigned_parameter_is_adopted(mesh):
    model = sharded(seeded(Stack), mesh)
    old = model.layers[0].up.weight
    before = full(old)
    model.layers[0].up.weight = new = nn.Parameter(torch.randn(37, 18))
    assert model.layers[0].up.weight is new and isinstance(new, ShardTensor)
    assert torch.equal(full(old), before), "the one that was replaced lost its values"
    meta = fully_shard(Stack().to("meta"), mesh=mesh)
    with pytest.raises(RuntimeError, match="cannot become a parameter on the meta device"):
        meta.head.weight = nn.Parameter(torch.ones(31, 18, device="meta"))
    assert meta.head.weight.is_meta
    meta.head.weight = nn.Parameter(torch.ones(31, 18))
    assert torch.equal(full(meta.head.weight), torch.ones(31, 18))


@EXECUTORS
@on_ranks(2)
def test_assigned_data_and_gradients_are_honoured(mesh, executor):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    call = _call(model, executor)
    call(**_batch())  # what is gathered later must not be older
    value, grad = torch.randn(31, 18), torch.randn(31, 18)
    dist.broadcast(value, 0)
    dist.broadcast(grad, 0)
    for run in (plain, model):
        run.get_parameter("head.weight").data = value.clone()
        run.get_parameter("head.weight").grad = grad.clone()
    plain(**_batch()).backward()
    call(**_batch()).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, full(q)) and isinstance(q.grad, ShardTensor)
        torch.testing.assert_close(full(q.grad), mean_over_ranks(p.grad, mesh))
    plain.head.weight.grad, model.get_parameter("head.weight").grad = grad.clone(), grad.clone()
    for run in (plain, model):
        torch.optim.SGD([run.get_parameter("head.weight")], lr=1.0).step()
    torch.testing.assert_close(full(model.head.weight), plain.head.weight)


@EXECUTORS
@on_ranks(2)
def test_data_assigned_while_gathered_is_read_from_then_on(mesh, executor):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    call = _call(model, executor)
    for number in range(3):
        if number < 2:
            model.unshard()
        else:  # what a backward leaves gathered
            model.set_reshard_after_backward(False)
            call(**_batch()).backward()
            plain(**_batch()).backward()
        if number == 1:
            assert torch.equal(model.head.weight, plain.head.weight)
        value = torch.full((31, 18), number + 2.0)
        plain.head.weight.data = value.clone()
        model.get_parameter("head.weight").data = value.clone()
        if number < 2:
            assert torch.equal(model.head.weight, value)
        torch.testing.assert_close(call(**_batch()), plain(**_batch()))
        model.reshard()
        assert torch.equal(full(model.head.weight), value)


@on_ranks(2)
def test_reads_after_unshard(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    assert isinstance(model.head.weight, ShardTensor)
    model.unshard()
    assert torch.equal(model.head.weight, plain.head.weight)
    assert type(model.head.weight) is torch.Tensor
    assert isinstance(model.layers[0].up.weight, ShardTensor)
    (model.head.weight.sum() + model(**_batch())).backward()
    (plain.head.weight.sum() + plain(**_batch())).backward()
    assert isinstance(model.head.weight, ShardTensor), "not resharded after the backward"
    check_gradients(plain, model, mesh)
    model.unshard()
    model.reshard()
    assert isinstance(model.head.weight, ShardTensor)


class Encoder(Stack):
    """Has a way in beside `forward`, which reads a parameter of its own."""

    def encode(self, tokens):
        x = self.embed(tokens)
        return self.layers[0](x) @ self.head.weight.T + torch.zeros(1, dtype=x.dtype)


@EXECUTORS
@on_ranks(2)
def test_another_way_in(mesh, executor):
    plain, model = seeded(Encoder), sharded(seeded(Encoder), mesh)
    batch = _batch()["tokens"]
    model.encode(batch).square().sum().backward()  # each read of a parameter gathers by itself
    unregistered = [None if p.grad is None else full(p.grad) for p in model.parameters()]
    model.zero_grad()
    with pytest.raises(ValueError, match="Encoder has no method 'decode'"):
        register_fsdp_forward_method(model, "decode")
    register_fsdp_forward_method(plain, "encode")  # not sharded: nothing happens
    register_fsdp_forward_method(torch.compile(model, backend="eager"), "encode")  # changes model
    encode = model.encode
    if executor:
        encode = torch.compile(encode, backend="shardc", options={"executor": executor})
    for run in (plain.encode, encode):
        run(batch).square().sum().backward()
    grads = zip(plain.named_parameters(), model.parameters(), unregistered, strict=True)
    for (name, p), q, beside in grads:
        assert (p.grad is None) == (q.grad is None) == (beside is None), name
        if p.grad is not None:
            torch.testing.assert_close(full(q.grad), mean_over_ranks(p.grad, mesh))
            torch.testing.assert_close(beside, full(q.grad))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.head.weight.zero_()
        assert not copied.encode(batch).any() and model.encode(batch).any()
