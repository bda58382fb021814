"""Full parameters on demand: what is inside, what is kept, what is refused."""

import functools

import pytest
import torch
import torch.distributed as dist
from fsdp2 import sharded
from models import (
    Block,
    Stack,
    batch_of_rank,
    check_gradients,
    compiled,
    full,
    mean_over_ranks,
    seeded,
)
from ranks import mesh_of, on_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardc import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardTensor,
    fully_shard,
    summon_full_params,
)

TIED = functools.partial(Stack, tied=True)


def _locals(model):
    return [p.to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
@on_ranks(2)
def test_inside_are_ordinary_parameters(mesh, shape):
    mesh = mesh_of("cpu", shape)
    plain, model = seeded(TIED), sharded(seeded(TIED), mesh)
    names, before = dict(model.named_parameters()), list(model.parameters())
    if shape == (2,):
        assert sum(p.to_local().numel() for p in before) < sum(p.numel() for p in before)
    with summon_full_params(model):
        inside = dict(model.named_parameters())
        assert inside.keys() == names.keys()
        for (name, p), q in zip(plain.named_parameters(), inside.values(), strict=True):
            assert type(q) is nn.Parameter and q.is_leaf, name
            assert torch.equal(p, q), name
        assert model.layers[0].up.weight is inside["layers.0.up.weight"]
        assert model.state_dict()["head.weight"].shape == plain.head.weight.shape
        assert model.head.weight is model.embed.weight
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("writeback", [True, False])
@on_ranks(2)
def test_what_was_written_is_kept_if_asked(mesh, writeback):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    new = nn.Parameter(torch.full_like(plain.layers[1].up.bias, 3.0))
    with summon_full_params(model, writeback=writeback), torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
        model.layers[0].up.weight.data = torch.ones_like(plain.layers[0].up.weight)
        model.layers[1].up.bias = new  # another object
    want = seeded(Stack)
    if writeback:
        with torch.no_grad():
            for p in want.parameters():
                p.mul_(2)
            want.layers[0].up.weight.fill_(1)
            want.layers[1].up.bias.fill_(3)
    for p, q in zip(want.parameters(), model.parameters(), strict=True):
        assert isinstance(q, ShardTensor) and torch.equal(p, full(q))
    call = compiled(model) if writeback else model
    call(*batch_of_rank()).backward()  # what is gathered after is what was written
    want(*batch_of_rank()).backward()
    check_gradients(want, model, mesh)


@on_ranks(2)
def test_only_the_first_rank(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    with summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if dist.get_rank() == 0:
            assert all(map(torch.equal, plain.parameters(), model.parameters()))
            assert all(type(p) is nn.Parameter for p in model.parameters())
        else:
            assert all(isinstance(p, ShardTensor) for p in model.parameters())


@pytest.mark.parametrize("writeback", [True, False])
@on_ranks(2)
def test_gradients(mesh, writeback):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    for run in (plain, model):
        run(*batch_of_rank()).backward()
    model.layers[0].down.weight.grad = None
    _, cut = model.get_parameter("layers.0.up.weight")._shard_spec.interval(0)
    if dist.get_rank() == 0:
        model.layers[0].up.weight.grad = None  # on one rank only: its part counts as zero
    before = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
    with summon_full_params(model, writeback=writeback, with_grads=True):
        for (name, p), q in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            want = mean_over_ranks(p.grad, mesh)
            if name == "layers.0.down.weight":
                assert q[1].grad is None
                continue
            if name == "layers.0.up.weight":
                assert cut > 0, "rank 0 has none of it"
                want.view(-1)[:cut] = 0
            torch.testing.assert_close(q[1].grad, want, msg=name)
        model.head.weight.grad.fill_(7)
        model.layers[1].up.weight.grad = None
        model.layers[0].down.weight.grad = torch.ones_like(model.layers[0].down.weight)
    assert (full(model.head.weight.grad) == 7).all() == writeback
    assert (model.layers[1].up.weight.grad is None) == writeback
    assert (model.layers[0].down.weight.grad is not None) == writeback
    if not writeback:
        for part, p in zip(before, model.parameters(), strict=True):
            assert (part is None) == (p.grad is None)
            assert part is None or torch.equal(part, p.grad.to_local())
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_a_forward_inside_uses_what_is_there(mesh, executor):
    policy = MixedPrecisionPolicy(torch.bfloat16)
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh, mp_policy=policy)
    call = compiled(model, executor) if executor else model
    before = call(*batch_of_rank())
    graphs = counters["stats"]["unique_graphs"]
    with summon_full_params(model, writeback=False), torch.no_grad():
        for run in (plain, model):
            run.head.weight.mul_(2)
        assert model.head.weight.dtype == torch.float32, "not in full precision"
        torch.testing.assert_close(call(*batch_of_rank()), plain(*batch_of_rank()))
    assert counters["stats"]["unique_graphs"] == graphs  # nothing is compiled for the time inside
    assert torch.equal(call(*batch_of_rank()), before)


@on_ranks(2)
def test_units_that_were_gathered_stay_so(mesh):
    model = sharded(seeded(Stack), mesh)
    model.layers[0].unshard()
    with summon_full_params(model), torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    held = {
        name: module._shardc_unit.buckets[0].gathered.is_held
        for name, module in model.named_modules()
        if hasattr(module, "_shardc_unit")
    }
    assert held == {"": False, "layers.0": True, "layers.1": False}
    want = seeded(Stack)
    with torch.no_grad():
        for p in want.parameters():
            p.mul_(2)
    call = compiled(model)
    torch.testing.assert_close(call(*batch_of_rank()), want(*batch_of_rank()))
    model.load_state_dict(seeded(Stack, 1).state_dict())  # so does any other write
    assert model.layers[0]._shardc_unit.buckets[0].gathered.is_held
    torch.testing.assert_close(call(*batch_of_rank()), seeded(Stack, 1)(*batch_of_rank()))


@on_ranks(2)
def test_which_units(mesh):
    model = sharded(seeded(Stack), mesh)
    outer = nn.Sequential(model)  # not sharded itself
    with summon_full_params(outer, recurse=False):
        assert isinstance(model.head.weight, ShardTensor)
    with summon_full_params(model, recurse=False):
        assert not isinstance(model.head.weight, ShardTensor)
        assert isinstance(model.layers[0].up.weight, ShardTensor)
    with summon_full_params(outer):
        assert not any(isinstance(p, ShardTensor) for p in outer.parameters())
    assert all(isinstance(p, ShardTensor) for p in outer.parameters())


@on_ranks(2)
def test_an_exception_inside(mesh):
    model = sharded(seeded(Stack), mesh)
    before = _locals(model)
    with pytest.raises(KeyError), summon_full_params(model, writeback=False):
        model.head.weight.data.zero_()
        raise KeyError
    assert all(map(torch.equal, before, _locals(model)))
    changed = pytest.raises(ValueError, match=r"'head.weight' of shape .* was \(3,\) when")
    with changed, summon_full_params(model):
        model.head.weight = nn.Parameter(torch.ones(3))
    assert all(isinstance(p, ShardTensor) for p in model.parameters())
    assert all(map(torch.equal, before, _locals(model)))
    model(*batch_of_rank()).backward()


class Summons(Block):
    """Summons its parameters where it must not."""

    def forward(self, x):
        with summon_full_params(self):
            return super().forward(x)


def _summon(model, **kwargs):
    with summon_full_params(model, **kwargs):
        pass


@on_ranks(2)
def test_refused(mesh):
    model = sharded(seeded(Stack), mesh)
    for kwargs, match in (
        ({"rank0_only": True}, r"give writeback=False"),
        ({"with_grads": True, "offload_to_cpu": True}, "with_grads=True with offload_to_cpu"),
    ):
        with pytest.raises(NotImplementedError, match=match), summon_full_params(model, **kwargs):
            raise AssertionError("it was summoned")
    with pytest.warns(UserWarning, match="every rank of a machine"):
        _summon(model, offload_to_cpu=True)
    twice = pytest.raises(RuntimeError, match="Block are summoned already")
    with summon_full_params(model.layers[0]), twice:
        _summon(model)
    replicated = fully_shard(Block(8, 16), mesh=mesh_of("cpu", (2, 1)))
    with pytest.raises(NotImplementedError, match="replicated parameters"):
        _summon(replicated, offload_to_cpu=True, rank0_only=True, writeback=False)
    inside = fully_shard(seeded(lambda: Summons(8, 16)), mesh=mesh)
    with pytest.raises(RuntimeError, match="inside its forward"):
        inside(torch.ones(2, 8))
    x = torch.ones(2, 8, requires_grad=True)

    def summon(grad):
        _summon(model)

    x.register_hook(summon)
    with pytest.raises(RuntimeError, match="inside a backward"):
        fully_shard(Block(8, 16), mesh=mesh)(x).sum().backward()
    meta = fully_shard(Block(8, 16).to("meta"), mesh=mesh)
    with pytest.raises(ValueError, match=r"bucket .* is on the meta device: call to_empty"):
        _summon(meta)


@on_ranks(2)
def test_offloaded_parameters(mesh):
    policy = CPUOffloadPolicy(pin_memory=False)
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh, offload_policy=policy)
    with summon_full_params(model), torch.no_grad():
        assert all(map(torch.equal, plain.parameters(), model.parameters()))
        model.head.weight.fill_(2)
    assert (full(model.head.weight) == 2).all()


@on_ranks(2)
def test_apply_sees_full_parameters(mesh):
    def fill(module):
        if isinstance(module, nn.Linear):
            seen.append(type(module.weight))
            with torch.no_grad():  # what a shard alone could not do
                module.weight.copy_(
                    torch.linalg.svd(module.weight, False)[2].mean() * module.weight
                )

    seen = []
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    for run in (plain, model):
        run.apply(fill)
    assert seen == [nn.Parameter] * len(seen) and seen
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q), p)

    class Applies(Block):
        def forward(self, x):
            self.apply(lambda module: None)
            return super().forward(x)

    with pytest.raises(RuntimeError, match="inside its forward"):
        fully_shard(Applies(8, 16), mesh=mesh)(torch.ones(2, 8))


@on_ranks(2)
def test_a_wrapper_that_forwards_attributes_holds_nothing(mesh):
    model = fully_shard(nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4))), mesh=mesh)
    inner = model[0]._checkpoint_wrapped_module
    names = list(dict(model.named_parameters()))
    with summon_full_params(model):
        assert list(dict(model.named_parameters())) == names
        inner.weight = nn.Parameter(torch.ones(4, 4))
    assert list(dict(model.named_parameters())) == names
    assert torch.equal(full(model.get_parameter(names[0])), torch.ones(4, 4))
    inner.weight = nn.Parameter(torch.zeros(4, 4))  # is held in one place, so it may be assigned
    assert torch.equal(full(model.get_parameter(names[0])), torch.zeros(4, 4))


@on_ranks(2)
def test_a_root_without_parameters_of_its_own_does_not_cast_inside(mesh):
    build = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # noqa: E731
    plain, model = seeded(build), seeded(build)
    fully_shard(model, mesh=mesh, units="auto", mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x = torch.randn(3, 4)
    assert model(x).dtype == torch.bfloat16
    with summon_full_params(model):
        assert torch.equal(model(x), plain(x))
    assert model(x).dtype == torch.bfloat16
