"""Frozen weights of subclasses made of several tensors, as NF4 for QLoRA: as with FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import full
from ranks import mesh_of, on_ranks
from subclasses import compiled
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, to_nf4

import shardc
from shardc import ShardTensor, fully_shard, get_model_state_dict, summon_full_params
from shardc.runtime.tensor.packing import Packing

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FULL = StateDictOptions(full_state_dict=True)
WIDTH, INNER = 64, 1024


class Adapted(nn.Module):
    """A frozen NF4 layer and two small matrices beside it that are trained."""

    def __init__(self, inputs, outputs, dtype):
        super().__init__()
        weight = to_nf4(torch.randn(outputs, inputs, dtype=dtype) / inputs**0.5)
        self.base = nn.Linear(inputs, outputs, bias=False)
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Linear(inputs, 4, bias=False, dtype=dtype)
        self.b = nn.Linear(4, outputs, bias=False, dtype=dtype)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def build(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(Adapted(WIDTH, INNER, dtype), nn.GELU(), Adapted(INNER, WIDTH, dtype))


def sharded(mesh, shard=fully_shard, model=None, **options):
    model = build() if model is None else model
    for module in (model[0], model[2]):
        shard(module, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, "uncompiled"),
        ({}, "eager"),
        ({}, "blocks"),
        ({}, "inductor"),
        ({"reshard_after_forward": False}, "uncompiled"),
        ({"mp_policy": BF16}, "uncompiled"),
        ({"mp_policy": BF16}, "eager"),
    ],
)
@on_ranks(2)
def test_as_fsdp2(mesh, options, how):
    theirs = sharded(mesh, fsdp.fully_shard, **options)
    ours = sharded(mesh, **options)
    compiled(ours, how, (ours[0], ours[2]))
    trained = [p for p in ours.parameters() if p.requires_grad]
    assert len(trained) == 4 and all(isinstance(p, ShardTensor) for p in ours.parameters())
    compare(theirs, ours, 1e-5 if how == "inductor" else 0.0)


def compare(theirs, ours, tolerance):
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (theirs, ours)
    ]
    for number in range(3):
        for model in (theirs, ours):
            draw = torch.Generator().manual_seed(10 * number + dist.get_rank())
            x = torch.randn(8, WIDTH, generator=draw)
            model(x).float().square().mean().backward()
        for p, q in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True):
            whole = p.grad.full_tensor()
            assert whole.any()
            torch.testing.assert_close(full(q.grad), whole, rtol=tolerance, atol=tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_copies_of_the_model(mesh):
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    compare(sharded(grid, fsdp.fully_shard), sharded(grid), 0.0)


def same(found, wanted):
    assert type(found) is NF4Tensor and found.shape == wanted.shape
    for name in wanted.__tensor_flatten__()[0]:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@on_ranks(2, 4)
def test_a_rank_holds_its_part(mesh):
    plain, model = build(), sharded(mesh)
    weight = model[0].get_parameter("base.weight")
    assert type(weight) is ShardTensor and weight.dtype == torch.uint8
    groups = WIDTH * INNER // (64 * 256)
    assert weight.shape[0] == groups and not weight.requires_grad
    assert weight.to_local().numel() == weight.numel() // mesh.size()
    values = WIDTH * INNER // 2  # two in a byte
    assert values < weight.numel() < 1.05 * values
    with summon_full_params(model):
        for module in (0, 2):
            same(model[module].base.weight, plain[module].base.weight)
    again = copy.deepcopy(model)
    x = torch.randn(3, WIDTH)
    assert torch.equal(again(x), model(x))
    torch.testing.assert_close(model(x), plain(x))


@on_ranks(4)
def test_values_in_and_out(mesh, tmp_path):
    """A state dict has the bytes: they load on other numbers of ranks, and weights load as well."""
    grid = mesh_of("cpu", (2, 2), ("outer", "inner"))
    torch.manual_seed(5)
    other = nn.Sequential(
        Adapted(WIDTH, INNER, torch.float32), nn.GELU(), Adapted(INNER, WIDTH, torch.float32)
    )
    plain, first = build(), sharded(grid["inner"])
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    want = first(x)
    if dist.get_rank() < 2:
        state = get_model_state_dict(first)
        dcp.save(state, checkpoint_id=tmp_path, process_group=grid["inner"].get_group())
    dist.barrier()
    second = sharded(mesh, model=other)
    assert not torch.allclose(second(x), want)
    state = get_model_state_dict(second)
    dcp.load(state, checkpoint_id=tmp_path)
    shardc.set_model_state_dict(second, state)
    assert torch.equal(second(x), want)
    whole = get_model_state_dict(second, options=FULL)
    assert whole["0.base.weight"].dtype == torch.uint8
    torch.manual_seed(6)
    third = sharded(mesh, model=copy.deepcopy(build()))
    with torch.no_grad():
        third[0].get_parameter("base.weight").fill_(0)
    third.load_state_dict(whole)
    assert torch.equal(third(x), want)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.base.weight.*\[1024, 64\]"):
        third.load_state_dict(plain.state_dict())


def test_packing():
    weight = to_nf4(torch.randn(512, 96))
    packing = Packing.of(weight)
    assert packing is None, "3 blocks of scales, which no cut of 512 rows ends with"
    weight = to_nf4(torch.randn(768, 128))
    packing = Packing.of(weight)
    assert (packing.groups, packing.rows) == (6, 128)
    packed = packing.pack(weight)
    assert packed.shape == (6, packing.nbytes) and packed.dtype == torch.uint8
    for count in (1, 2, 3, 6):
        chunks = torch.chunk(weight, count)
        for chunk, part in zip(chunks, packed.chunk(count), strict=True):
            for name, value in packing.unpack(part).items():
                assert torch.equal(value, getattr(chunk, name)), name


@on_ranks(4)
def test_refused_by_name(mesh):
    for inputs, rows, why in (
        (64, 512, "end with every 256 rows: 4 ranks do not divide 2 times as many; name it"),
        (512, 96, "end with every 32 rows: 4 ranks do not divide 3 times as many; name it"),
        (96, 512, "nor of several that torch.chunk cuts with its rows: name it in ignored_params"),
    ):
        model = nn.Linear(inputs, rows, bias=False)
        weight = to_nf4(model.weight.detach())
        model.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(NotImplementedError, match=f"'weight' is a NF4Tensor.*{why}"):
            fully_shard(model, mesh=mesh)
        assert type(model) is nn.Linear


def test_explained():
    report = shardc.explain(build(), torch.randn(8, WIDTH), world_size=4)
    gathered = [c for c in report.collectives if c.kind == "all_gather" and c.dtype == "uint8"]
    sent = sum(c.nbytes for c in gathered)
    values = 2 * WIDTH * INNER // 2
    assert values < sent < 2 * 1.05 * values
