"""Parameters of tensor subclasses that say what is gathered of them: as with FSDP2."""

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Checkpointed, Stack, full, mean_over_ranks, seeded, tokens
from ranks import mesh_of, on_ranks
from subclasses import Fp8, Rowwise, compiled, extended, rounding
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torchao import float8
from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig as Int8
from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingLinearWeight,
)

from shardc import (
    ShardTensor,
    fully_shard,
    get_model_state_dict,
    materialize,
    summon_full_params,
)
from shardc.runtime.comm import collectives

KINDS = {"rowwise": Rowwise, "fp8": Fp8}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = StateDictOptions(full_state_dict=True)


def step(model, call, number):
    seed = 10 * number + torch.distributed.get_rank()
    call(tokens(seed), tokens(seed + 5)).backward()


def even(kind=None):
    """A model whose linear weights have an even number of rows: FSDP2 knows no other."""
    model = seeded(lambda: Stack(vocab=32, dim=16))
    for layer in model.layers:
        layer.up, layer.down = nn.Linear(16, 40), nn.Linear(40, 16, bias=False)
    return extended(model, KINDS[kind]) if kind else model


def rounded(weight):
    values, scale = Rowwise.parts(weight.detach())
    return values * scale


@pytest.mark.parametrize(
    ("kind", "how", "options"),
    [
        ("rowwise", "uncompiled", {}),
        ("rowwise", "eager", {}),
        ("fp8", "uncompiled", {}),
        ("fp8", "blocks", {}),
        ("fp8", "inductor", {}),
        ("rowwise", "uncompiled", {"reshard_after_forward": False}),
        ("rowwise", "eager", {"reshard_after_forward": False}),
        ("rowwise", "uncompiled", {"mp_policy": BF16}),
        ("rowwise", "eager", {"mp_policy": BF16}),
        ("rowwise", "uncompiled", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ],
)
@on_ranks(2)
def test_as_fsdp2(mesh, kind, how, options):
    theirs = fsdp2(even(kind), mesh, **options)
    ours = compiled(sharded(even(kind), mesh, **options), how)
    exact = how != "inductor"
    check_against_fsdp2(theirs, ours, ours, step, 3, tolerance=0 if exact else 1e-5)


@pytest.mark.parametrize("how", ["uncompiled", "eager"])
@on_ranks(4)
def test_copies_of_the_model(mesh, how):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    theirs, ours = fsdp2(even("fp8"), grid), compiled(sharded(even("fp8"), grid), how)
    check_against_fsdp2(theirs, ours, ours, step, 2, tolerance=0)


@pytest.mark.parametrize("how", ["uncompiled", "eager"])
@on_ranks(2)
def test_accumulation_as_fsdp2(mesh, how):
    theirs, ours = fsdp2(even("fp8"), mesh), compiled(sharded(even("fp8"), mesh), how)

    def accumulate(model, call, number):
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            step(model, call, 3 * number + micro)

    check_against_fsdp2(theirs, ours, ours, accumulate, 2, tolerance=1e-6)


def uneven():
    """Rows that no number of ranks divides, and a layer of fewer rows than ranks have parts."""
    model = seeded(Stack)
    model.layers[0].down = nn.Sequential(nn.Linear(37, 5), nn.Linear(5, 18, bias=False))
    return model


@pytest.mark.parametrize(
    ("kind", "how"), [("rowwise", "uncompiled"), ("fp8", "uncompiled"), ("fp8", "eager")]
)
@on_ranks(4)
def test_uneven_rows_as_unsharded(mesh, kind, how):
    plain = uneven()
    alone = rounding(copy.deepcopy(plain), KINDS[kind])
    ours = compiled(sharded(extended(copy.deepcopy(plain), KINDS[kind]), mesh), how)
    x, y = tokens(7), tokens(8)
    assert (plain(x, y) - alone(x, y)).abs() > 1e-5, "rounding makes no difference"
    of_alone, of_ours = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, ours))
    for number in range(2):
        step(alone, alone, number)
        step(ours, ours, number)
        for (name, p), q in zip(alone.named_parameters(), ours.parameters(), strict=True):
            mean = mean_over_ranks(p.grad, mesh)
            torch.testing.assert_close(full(q.grad), mean, rtol=1e-4, atol=1e-6, msg=name)
            p.grad = mean
        for optimizer in (of_alone, of_ours):
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(alone.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(full(q), p.detach(), rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_cut_by_rows_and_gathered_as_sent(mesh):
    model = even("fp8")
    before = {name: p.detach()._inner for name, p in model.named_parameters() if "up.w" in name}
    fully_shard(model, mesh=mesh)
    rank = mesh.get_local_rank()
    for name, whole in before.items():
        param = model.get_parameter(name)
        assert type(param) is ShardTensor and not hasattr(param, "_inner")
        assert torch.equal(param.to_local(), whole.chunk(2)[rank])
        assert torch.equal(param.full_tensor(), whole)
    buckets = model._shardc_unit.buckets
    assert [len(bucket.layout.slots) for bucket in buckets] == [7, 1, 1, 1, 1, 1]
    Fp8.gathers = 0
    sent = []
    start = collectives.start_all_gather

    def note(flat, *args):
        sent.append(flat.dtype)
        return start(flat, *args)

    with mock.patch.object(collectives, "start_all_gather", note):
        step(model, model, 0)
    assert sent.count(torch.float8_e4m3fn) == Fp8.gathers == 5, "the root is gathered once"
    assert model.layers[0].up.weight.grad.shape == (40, 16)


@on_ranks(2)
def test_nothing_gathered_stays_for_the_backward(mesh):
    model = fully_shard(even("fp8"), mesh=mesh, reshard_after_forward=True)
    Fp8.gathers, alive = 0, []
    after = Fp8.fsdp_post_all_gather

    def note(self, outputs, *args, **kwargs):
        made = after(self, outputs, *args, **kwargs)
        alive.append(weakref.ref(made[0]._values.untyped_storage()))
        return made

    with mock.patch.object(Fp8, "fsdp_post_all_gather", note):
        loss = model(tokens(0), tokens(1))
        gc.collect()
        assert len(alive) == 5 and not any(ref() for ref in alive)
        loss.backward()
    assert len(alive) == Fp8.gathers == 10 and not any(ref() for ref in alive)


@on_ranks(2)
def test_values_in_and_out(mesh):
    plain, model = even(), sharded(even("rowwise"), mesh)
    values = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(values)  # whole and plain
    found = get_model_state_dict(model, options=FULL)
    assert all(torch.equal(found[name], value) for name, value in values.items())
    of_subclass = extended(copy.deepcopy(plain), Rowwise).state_dict()
    model.load_state_dict(of_subclass)
    assert torch.equal(full(model.head.weight), plain.head.weight)
    again = copy.deepcopy(model)
    model.load_state_dict(values, assign=True)
    x = tokens(3)
    assert torch.equal(again(x), sharded(even("rowwise"), mesh)(x))
    assert not torch.equal(again(x), model(x))
    with summon_full_params(again):
        assert type(again.head.weight) is Rowwise, "in full precision, and what the module expects"
        assert torch.equal(again.head.weight._inner, plain.head.weight)
        with torch.no_grad():
            again.head.weight.mul_(2)
    assert torch.equal(full(again.head.weight), 2 * plain.head.weight)
    again.unshard()
    assert torch.equal(again.head.weight, rounded(2 * plain.head.weight))
    with torch.no_grad():
        again.get_parameter("head.weight").mul_(2)
    again.unshard()
    assert torch.equal(again.head.weight, rounded(4 * plain.head.weight))
    again.reshard()
    assert type(again.head.weight) is ShardTensor


@on_ranks(2)
def test_parameter_keeps_what_the_user_put_on_it(mesh):
    model = even("fp8")
    model.head.weight.no_decay = True
    weight = model.head.weight
    fully_shard(model, mesh=mesh)
    assert model.get_parameter("head.weight") is weight and weight.no_decay
    with pytest.raises(
        NotImplementedError, match=r"weight' is Fp8 of torch.float32.*before fully_shard"
    ):
        model.to(torch.bfloat16)
    assert weight.dtype == torch.float32 and model.embed.weight.dtype == torch.float32


class OneHook(Fp8):
    fsdp_post_all_gather = property()  # as if it were not there


class TwoArguments(Fp8):
    def fsdp_pre_all_gather(self, mesh, outer_size): ...


class Packed(Fp8):
    """Of two tensors, as NF4 weights are of several."""

    def __tensor_flatten__(self):
        return ["_inner", "_inner"], None


class Uncut(Packed):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.split.Tensor:
            raise NotImplementedError("split")
        return super().__torch_dispatch__(func, types, args, kwargs)


@on_ranks(2)
def test_refused_by_name(mesh):
    for kind, why in (
        (OneHook, "it has no fsdp_post_all_gather"),
        (TwoArguments, r"fsdp_pre_all_gather takes 2 arguments; it must take \(mesh\) or"),
        (Packed, r"of several tensors, which are sharded only frozen: requires_grad_\(False\)"),
        (Uncut, "nor of several that torch.chunk cuts with its rows: name it in ignored_params"),
    ):
        model = extended(nn.Linear(4, 4), kind)
        weight = model.weight
        with pytest.raises(NotImplementedError, match=f"'weight' is a {kind.__name__}.*{why}"):
            fully_shard(model, mesh=mesh)
        assert type(model) is nn.Linear and model.weight is weight


def torchao_linears(kind):
    """Sizes that float8 matmuls take."""
    model = seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    if kind == "float8":
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return float8.convert_to_float8_training(model, config=config)
    for module in (model[0], model[2]):
        weight = Int8MixedPrecisionTrainingLinearWeight(module.weight.detach(), Int8())
        module.weight = nn.Parameter(weight)
    return model


@pytest.mark.parametrize("how", ["uncompiled", "eager"])
@pytest.mark.parametrize("kind", ["float8", "int8"])
@on_ranks(2)
def test_torchao_as_fsdp2(mesh, kind, how):
    theirs = fsdp.fully_shard(torchao_linears(kind), mesh=mesh, mp_policy=BF16)
    ours = compiled(fully_shard(torchao_linears(kind), mesh=mesh, mp_policy=BF16), how)

    def step(model, call, number):
        draw = torch.Generator().manual_seed(10 * number + mesh.get_local_rank())
        call(torch.randn(16, 32, generator=draw)).square().mean().backward()

    if kind == "float8":
        x = torch.randn(16, 32)
        plain = seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
        assert not torch.allclose(ours(x).float(), plain(x), rtol=0.01, atol=1e-3)
    check_against_fsdp2(theirs, ours, ours, step, 3, tolerance=0)


@pytest.mark.parametrize("how", ["uncompiled", "eager"])
@on_ranks(4)
def test_fewer_ranks_after_the_forward(mesh, how):
    """FSDP2 has not built it; here all ranks gather again."""
    whole, part = (
        compiled(sharded(even("fp8"), mesh, reshard_after_forward=size), how) for size in (True, 2)
    )
    for model in (whole, part):
        step(model, model, 0)
    for p, q in zip(whole.parameters(), part.parameters(), strict=True):
        assert torch.equal(full(p.grad), full(q.grad)) and p.grad.to_local().isfinite().all()


@pytest.mark.parametrize("how", ["uncompiled", "eager"])
@on_ranks(2)
def test_recomputed_from_meta(mesh, how):
    def build(checkpointed):
        with torch.device("meta"):
            model = extended((Checkpointed if checkpointed else Stack)(), Rowwise)
        sharded(model, mesh)
        torch.manual_seed(3)
        return materialize(model)

    plain, again = (compiled(build(flag), how) for flag in (False, True))
    for model in (plain, again):
        step(model, model, 0)
    for p, q in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(full(p), full(q)) and full(p.grad).any()
        torch.testing.assert_close(full(q.grad), full(p.grad))


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2, device="sim")
def test_on_a_device(mesh, offload):
    policy = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    cpu = mesh_of("cpu", (2,))
    theirs = sharded(even("rowwise"), cpu)
    for how in ("uncompiled", "eager"):
        ours = compiled(sharded(even("rowwise"), mesh, **policy), how)
        for model, place in ((theirs, "cpu"), (ours, "sim")):
            x = tokens(mesh.get_local_rank()).to(place)
            model(x, x).backward()
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert q.grad.device.type == ("cpu" if offload else "sim")
            torch.testing.assert_close(full(q.grad).cpu(), full(p.grad), rtol=1e-4, atol=1e-6)
            p.grad = None
