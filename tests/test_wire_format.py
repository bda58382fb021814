"""Parameters and gradients that travel in one byte each: what arrives, and what is trained."""

import copy
import dataclasses
import functools

import pytest
import torch
from models import QUICK, Stack, Wire, compiled, full, mean_over_ranks, seeded, tokens
from ranks import mesh_of, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

import shardc
from shardc import MixedPrecisionPolicy, fully_shard, summon_full_params
from shardc.runtime.comm.quantise import decode, encode
from shardc.runtime.layout.layout import Param, plan_buckets
from shardc.runtime.layout.wire_format import MICROSCALING, WireFormat

int8, float8 = torch.int8, torch.float8_e4m3fn
BOTH = MixedPrecisionPolicy(gather_wire_dtype=int8, reduce_wire_dtype=int8, wire_block=32)

# -- messages ------------------------------------------------------------------------------------


def _arrived(values: Tensor, form: WireFormat) -> Tensor:
    """`values: (R, S)` after they have travelled."""
    return decode(encode(values, form), values.shape[1], form)


def _values(kind: str) -> Tensor:
    torch.manual_seed(0)
    values = torch.randn(4, 64 + 128 * 40)
    scales = {"normal": 1.0, "tiny": 1e-30, "huge": 1e37, "mixed": 10.0 ** torch.randn(4, 1) * 3}
    return values * scales[kind]


FORMS = [
    WireFormat(dtype, block, exact, seed)
    for dtype in (int8, float8)
    for block, exact in ((128, 64), (32, 0))
    for seed in (None, 7)
]
MICRO = {
    name: WireFormat(form.dtype, form.block, 64, scale=form.scale)
    for name, form in MICROSCALING.items()
}
FORMS += MICRO.values()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_error_is_bounded(form):
    for kind in ("normal", "tiny", "huge", "mixed"):
        values = _values(kind)
        got = _arrived(values, form)
        assert torch.equal(got[:, : form.exact], values[:, : form.exact])
        blocks, arrived = (t[:, form.exact :].reshape(-1, form.block) for t in (values, got))
        error = (arrived - blocks).abs() / blocks.abs().amax(-1, keepdim=True)
        assert 0.2 * form.error < error.max() <= form.error, (kind, error.max(), form.error)
        assert encode(values, form).shape == (4, form.row_bytes(values.shape[1]))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_special_values_arrive_as_such(form):
    values = _values("normal")
    alone = _arrived(values, form)
    special = {3: torch.inf, 70: -torch.inf, 71: torch.nan, 400: torch.inf, 401: torch.nan}
    for place, value in special.items():
        values[1, place] = value
    values[2, 256:512] = 0.0  # a block of zeros
    got = _arrived(values, form)
    if form.scale is not None:
        broken = ~values[:, form.exact :].view(4, -1, form.block).isfinite().all(-1)
        arrived = got[:, form.exact :].view(4, -1, form.block)
        assert broken.any() and arrived[broken].isnan().all() and arrived[~broken].isfinite().all()
        assert got[2, 256:512].eq(0).all() and got[1, 3].isinf()
        return
    for place, value in special.items():
        assert got[1, place].item() == value or (value != value and got[1, place].isnan())
    assert got[2, 256:512].eq(0).all()
    finite = values.isfinite()
    finite[2] = False  # whose blocks are others now
    assert got[finite].isfinite().all()
    blocks = values[1, 128 + form.exact :].isfinite()
    if form.seed is None:
        assert torch.equal(got[0], alone[0]) and torch.equal(got[3], alone[3])
        assert blocks.any()


@pytest.mark.parametrize("name", MICRO)
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_microscaling_is_that_of_torchao(name, size):
    form = WireFormat(*MICROSCALING[name][:2], scale=MICROSCALING[name].scale)
    torch.manual_seed(0)
    values = size * torch.randn(3, 4096) * torch.randn(3, 4096).mul(2).exp()
    values[:, :64] = 0.0
    halfway = torch.tensor([0.0, 0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 6.0])
    values[:, 64:128] = size * halfway.repeat(8)
    for row, got in zip(values, _arrived(values, form), strict=True):  # each has its own factor
        if name == "nvfp4":
            factor = per_tensor_amax_to_scale(row.abs().max())
            quantised = NVFP4Tensor.to_nvfp4(row[None], form.block, per_tensor_scale=factor)
            wanted = quantised.dequantize(torch.float32)[0]
        else:
            scales, codes = to_mx(row[None], form.dtype, form.block, ScaleCalculationMode.RCEIL)
            wanted = to_dtype(codes, scales, form.dtype, form.block, torch.float32)[0]
        assert torch.equal(got, wanted) and not torch.equal(got, row)
    assert encode(values, form).shape[1] == {
        "mxfp8": 4096 + 128, "mxfp4": 2048 + 128, "nvfp4": 2048 + 256 + 4 + 12
    }[name]  # fmt: skip


def test_stochastic_rounding_has_the_right_mean():
    """Of values between two codes, by the nearest all go one way."""
    values = torch.full((1, 128 * 1000), 0.3)
    values += torch.rand(1, 128 * 1000) * 1e-3  # equal values at one place are rounded equally
    values[:, ::128] = 100.0
    for dtype in (int8, float8):
        nearest, random = (WireFormat(dtype, 128, 0, seed) for seed in (None, 5))
        off = (_arrived(values, nearest) - values).reshape(-1, 128)[:, 1:].mean().abs()
        less = (_arrived(values, random) - values).reshape(-1, 128)[:, 1:].mean().abs()
        assert less < 0.05 * max(off, 0.1), (dtype, off, less)
    assert torch.equal(_arrived(values, random), _arrived(values.clone(), random))  # reproducible
    other = WireFormat(int8, 128, 0, 6)
    assert not torch.equal(_arrived(values, WireFormat(int8, 128, 0, 5)), _arrived(values, other))
    near, form = torch.where(values == 100.0, values, values + 1e-6), WireFormat(int8, 128, 0, 5)
    apart = (_arrived(values, form) - _arrived(near, form)).abs() > 0.5
    assert apart.float().mean() > 0.2, "the value draws too, not its place alone"


# -- layout --------------------------------------------------------------------------------------


def test_what_is_not_quantised_comes_first():
    params = [Param("up", (64, 48)), Param("norm", (50,)), Param("down", (48, 64))]
    params += [Param("small", (4, 4)), Param("number", ()), Param("index", (64, 64), torch.int64)]
    layout, other = plan_buckets(params, 4, block=32)
    assert [slot.name for slot in layout.slots] == ["norm", "small", "number", "up", "down"]
    assert layout.exact == 96 and layout.block == 32 and layout.segment % 32 == 0
    assert all(slot.start % 32 == 0 for slot in layout.slots[3:])
    assert (other.block, other.exact) == (0, 0)
    bias, up = plan_buckets([params[0], Param("bias", (5000,))], 4, block=32)
    assert (bias.block, up.block, up.exact) == (0, 32, 0), "vectors would fill much of a segment"
    assert plan_buckets(params, 4)[0].slots[0].name == "up"


# -- training ------------------------------------------------------------------------------------


def _travelled(model: nn.Module, values: list[Tensor], purpose: str) -> None:
    """Have `values`, one a parameter of `model`, be what arrives of them, bucket by bucket."""
    params = list(model.parameters())
    for bucket in dict.fromkeys(param._slot.bucket for param in params):
        code = bucket.key.code
        form = code.wire if purpose == "gather" else code.reduction.wire
        if form is None:
            continue
        flat = torch.zeros(bucket.layout.numel)
        places = [
            (values[next(i for i, param in enumerate(params) if param is own)], slot)
            for own, slot in zip(bucket.params, bucket.layout.slots, strict=True)
        ]
        for value, slot in places:
            flat[slot.start : slot.stop] = value.flatten()
        arrived = _arrived(flat.view(bucket.layout.world_size, -1), form).flatten()
        for value, slot in places:
            value.copy_(arrived[slot.start : slot.stop].view(value.shape))


def _check(model, call, mesh, batches=((1,), (2, 3)), tolerance=2e-6) -> None:
    """Gradients and loss are those of the unsharded model on what arrives of its parameters.

    Each step has the micro-batches of one entry of `batches`, whose gradients are added up before
    they are sent. First shows that something is quantised.
    """
    rank = torch.distributed.get_rank()
    own = seeded(lambda: _build(len(model.layers)))
    for seeds in batches:
        plain = copy.deepcopy(own)
        before = [param.detach().clone() for param in plain.parameters()]
        with torch.no_grad():
            _travelled(model, [param.data for param in plain.parameters()], "gather")
        changed = [not torch.equal(a, b) for a, b in zip(before, plain.parameters(), strict=True)]
        gathers = model.head.weight._slot.bucket.key.code.wire is not None
        assert any(changed) == gathers
        for number, seed in enumerate(seeds):
            batch = tokens(seed + 10 * rank, vocab=64), tokens(seed + 10 * rank + 50, vocab=64)
            model.set_requires_gradient_sync(number == len(seeds) - 1)
            got, want = call(*batch), plain(*batch)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            got.backward()
            want.backward()
        for param in plain.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads = [param.grad.clone() for param in plain.parameters()]
        _travelled(model, [param.grad for param in plain.parameters()], "reduce")
        sent = [param.grad for param in plain.parameters()]
        reduces = model.head.weight._slot.bucket.key.code.reduction.wire is not None
        assert any(not torch.equal(a, b) for a, b in zip(grads, sent, strict=True)) == reduces
        with torch.no_grad():
            for (name, q), arrived, p in zip(
                model.named_parameters(), sent, own.parameters(), strict=True
            ):
                want = mean_over_ranks(arrived, mesh)
                assert (q.grad is None) == (not q.requires_grad)
                if q.grad is None:
                    continue
                # a gradient that is a little off may be rounded to the next code
                off = (full(q.grad) - want).abs().max() / want.abs().max()
                assert off <= tolerance, (name, off)
                p.sub_(0.1 * full(q.grad))
                q.sub_(0.1 * q.grad)
                q.grad = None
    for p, q in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q), p.detach(), rtol=1e-6, atol=1e-6)  # as stored


def _build(blocks: int = 2) -> Stack:
    return Stack(blocks, dim=64, vocab=64)


def _shard(mesh, policy=BOTH, blocks: int = 2, **kwargs) -> Stack:
    model = seeded(lambda: _build(blocks))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, **kwargs)
    return fully_shard(model, mesh=mesh, mp_policy=policy, **kwargs)


def _call(model, way):
    if way == "pieces":
        for layer in model.layers:
            layer.compile(backend="shardc", options={"executor": "eager"})
        return model
    return model if way == "uncompiled" else compiled(model, way)


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(2)
def test_training_is_that_on_what_arrives(mesh, way):
    model = _shard(mesh)
    call = _call(model, way)
    _check(model, call, mesh)
    with Wire() as wire:
        call(tokens(0, vocab=64), tokens(1, vocab=64)).backward()
    kinds = {(message.kind, message.dtype) for message in wire.sent}
    assert kinds == {("all_gather", int8), ("all_to_all", int8)}


@on_ranks(4)
def test_training_on_four_ranks(mesh):
    model = _shard(mesh)
    _check(model, _call(model, "pieces"), mesh)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_gradients_of_several_buckets_travel_together(mesh, executor):
    shardc.set_profile(QUICK)
    model = _shard(mesh, blocks=1)
    shardc.set_profile(None)
    assert len(model.layers[0]._shardc_unit.buckets) > 1
    options = {"executor": executor, "profile": QUICK, "coalesce": True}
    call = torch.compile(model, backend="shardc", options=options, fullgraph=True)
    _check(model, call, mesh, tolerance=2e-6 if executor == "eager" else 1e-2)
    with Wire() as wire:
        call(tokens(0, vocab=64), tokens(1, vocab=64)).backward()
    buckets = [b for unit in shardc.units_of(model).values() for b in unit._shardc_unit.buckets]
    reductions = [message for message in wire.sent if message.kind != "all_gather"]
    assert len(reductions) < len(buckets)


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(2)
def test_collectives_of_the_users_own_send_what_they_are_given(mesh, way):
    model = _shard(mesh)
    model.set_custom_reduce(shardc.compress_bf16)
    with pytest.warns(UserWarning, match="gathers are left out"):
        model.layers[0].set_ablation(all_gather=True)
    model.layers[0].set_custom_reduce(shardc.compress_bf16)
    call = _call(model, way)
    with Wire() as wire:
        call(tokens(0, vocab=64), tokens(1, vocab=64)).backward()
    sent = {(message.kind, message.dtype) for message in wire.sent}
    assert sent == {("all_gather", int8), ("reduce_scatter", torch.bfloat16)}


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@pytest.mark.parametrize(
    "case",
    [
        "float8 stochastic kept",
        "fewer",
        "reduce offload",
        "gather again",
        "frozen",
        "mxfp8 offload",
        "nvfp4",
    ],
)
@on_ranks(2)
def test_settings(mesh, case, way):
    settings = {"gather_wire_dtype": int8, "reduce_wire_dtype": int8, "wire_block": 32}
    kwargs = {}
    changes = {
        "float8": (settings, "gather_wire_dtype", float8),
        "mxfp8": (settings, "gather_wire_dtype", "mxfp8"),
        "nvfp4": (settings, "gather_wire_dtype", "nvfp4"),
        "stochastic": (settings, "wire_seed", 3),
        "gather": (settings, "reduce_wire_dtype", None),
        "reduce": (settings, "gather_wire_dtype", None),
        "kept": (kwargs, "reshard_after_forward", False),
        "fewer": (kwargs, "reshard_after_forward", 1),
        "offload": (kwargs, "offload_policy", CPUOffloadPolicy()),
    }
    for word in case.split():
        if word in changes:
            given, name, value = changes[word]
            given[name] = value
    model = _shard(mesh, MixedPrecisionPolicy(**settings), 1, **kwargs)
    if "frozen" in case:
        model.layers[0].requires_grad_(False)
    if "again" in case:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    batches = ((1,), (2, 3)) if way == "uncompiled" else ((2, 3),)  # a graph less
    _check(model, _call(model, way), mesh, batches)


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(4)
def test_among_copies(mesh, way):
    """Inside of a node nothing is quantised; the sums that copies send each other are."""
    copies = mesh_of("cpu", (2, 2))
    model, plain = _shard(copies, blocks=1), seeded(lambda: _build(1))
    call, rank = _call(model, way), torch.distributed.get_rank()
    batch = tokens(rank, vocab=64), tokens(rank + 50, vocab=64)
    call(*batch).backward()
    model.zero_grad()
    with Wire() as wire:
        got = call(*batch)
        got.backward()
    want = plain(*batch)
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    kinds = {(message.kind, message.dtype) for message in wire.sent}
    in_full = {("all_gather", torch.float32), ("reduce_scatter", torch.float32)}
    assert kinds == {*in_full, ("all_to_all", int8)}
    off = []
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        exact, arrived = mean_over_ranks(p.grad, mesh), full(q.grad)
        off.append((arrived - exact).abs().max() / exact.abs().max())
        assert torch.equal(arrived, mean_over_ranks(arrived, mesh))  # the same on all copies
        assert off[-1] < 0.02 if p.ndim > 1 else 1e-5
    assert max(off) > 1e-4


@pytest.mark.parametrize("way", ["uncompiled", "eager"])
@on_ranks(2)
def test_bfloat16_is_computed_from_what_is_stored(mesh, way):
    settings = {"gather_wire_dtype": int8, "reduce_wire_dtype": int8}
    model = _shard(mesh, MixedPrecisionPolicy(torch.bfloat16, torch.float32, **settings), 1)
    whole = _shard(mesh, MixedPrecisionPolicy(torch.bfloat16, torch.float32), 1)
    results = [_call(each, way)(tokens(0, vocab=64)) for each in (model, whole)]
    for result in results:
        assert result.dtype == torch.bfloat16
        result.float().square().sum().backward()
    assert not torch.equal(*results)
    torch.testing.assert_close(*results, rtol=0.1, atol=0.1)
    for q, p in zip(model.parameters(), whole.parameters(), strict=True):
        a, b = full(q.grad).flatten().float(), full(p.grad).flatten().float()
        assert torch.cosine_similarity(a, b, dim=0) > 0.995


@on_ranks(2)
def test_parameters_are_those_stored(mesh):
    """Whatever is not a forward or backward sees them in full precision."""
    policy = dataclasses.replace(BOTH, full_precision_in_eval=True)
    model, plain = _shard(mesh, policy, 1), seeded(lambda: _build(1))
    batch = tokens(0, vocab=64), tokens(50, vocab=64)
    with torch.no_grad():
        for call in (model, compiled(model)):
            assert not torch.equal(call(*batch), plain(*batch))
            model.eval()
            torch.testing.assert_close(call(*batch), plain(*batch), rtol=1e-6, atol=1e-6)
            model.train()
    with summon_full_params(model):
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), plain.state_dict()[name])


@on_ranks(1)
def test_one_rank_sends_nothing(mesh):
    model, plain = _shard(mesh), seeded(_build)
    batch = tokens(0, vocab=64), tokens(50, vocab=64)
    assert torch.equal(model(*batch), plain(*batch))


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("gather_wire_dtype", torch.int16, ValueError, "must be torch.int8, torch.float8_e4m3fn"),
        ("reduce_wire_dtype", float8, ValueError, "must be torch.int8 or None"),
        ("gather_wire_dtype", "fp8", ValueError, "'mxfp8', 'mxfp4', 'nvfp4'"),
        ("wire_block", 100, ValueError, "a multiple of 16 from 16 to 4096"),
        ("wire_block", 32.0, TypeError, "a multiple of 16"),
        ("wire_seed", -1, ValueError, "a whole number of at least 0"),
    ],
)
@on_ranks(1)
def test_bad_policies(mesh, name, value, error, words):
    with pytest.raises(error, match=f"{name} must be .*{words}|{words}"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(**{name: value}))


@on_ranks(1)
def test_a_seed_is_refused_beside_a_format_that_rounds_to_the_nearest(mesh):
    policy = MixedPrecisionPolicy(gather_wire_dtype="mxfp8", wire_seed=3)
    with pytest.raises(ValueError, match=r"wire_seed=3 rounds at random.*leave wire_seed out"):
        fully_shard(nn.Linear(4, 4), mesh=mesh, mp_policy=policy)
