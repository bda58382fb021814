"""Weights that are sent in two planes: each half of a step gathers the one that it reads."""

import pytest
import torch
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import seeded
from ranks import on_ranks
from subclasses import Planes, compiled, extended, from_mx, mx
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from torchao.prototype.mx_formats.mx_tensor import to_mx

import shardc

ROWS, COLUMNS = 128, 64
PLANE = ROWS * COLUMNS + ROWS * COLUMNS // 32
"""Bytes of a plane of a weight: values of a byte, and a byte for 32 of them."""


class Blocks(nn.Module):
    """Two layers of two linear layers each, whose rows are whole blocks on two ranks."""

    def __init__(self):
        super().__init__()
        layers = ([nn.Linear(COLUMNS, ROWS), nn.GELU(), nn.Linear(ROWS, COLUMNS)] for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(*layer) for layer in layers)
        for layer in self.layers:
            nn.init.normal_(layer[0].weight, std=0.1)
            nn.init.normal_(layer[2].weight, std=0.1)

    def forward(self, x, again=False):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if again else layer(x))
        return x.square().mean()


def inputs(number):
    torch.manual_seed(10 * number + torch.distributed.get_rank())
    return torch.randn(6, COLUMNS)


def step(model, call, number, again=False):
    call(inputs(number), again).backward()


def planes():
    return extended(seeded(Blocks), Planes)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_format_is_torchaos(dim):
    torch.manual_seed(0)
    weight = torch.randn(64, 96) * torch.logspace(-12, 3, 96)
    weight[:, 3], weight[5] = 0, 1e-30
    values, scales = mx(weight, dim)
    turned = weight if dim == 1 else weight.t().contiguous()
    their_scales, theirs = to_mx(turned, torch.float8_e4m3fn, 32)
    if dim == 0:
        their_scales, theirs = their_scales.t(), theirs.t()
    assert torch.equal(scales, their_scales.view(torch.uint8))
    assert torch.equal(values.view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_planes_differ():
    """A forward that read the plane of the backward would compute something else."""
    model, x = seeded(Blocks), torch.randn(6, COLUMNS)
    weight = model.layers[0][0].weight.detach()
    by_rows, by_columns = (from_mx(*mx(weight, dim), dim, torch.float32) for dim in (1, 0))
    results = [linear(x, each) for each in (weight, by_rows, by_columns)]
    assert not any(torch.equal(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("how", ["uncompiled", "blocks", "eager", "inductor"])
@on_ranks(2)
def test_as_fsdp2(mesh, how):
    theirs, ours = fsdp2(planes(), mesh), compiled(sharded(planes(), mesh), how)
    tolerance = 1e-5 if how == "inductor" else 0
    check_against_fsdp2(theirs, ours, ours, step, 3, tolerance=tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ],
    ids=["kept", "bf16"],
)
@on_ranks(2)
def test_options_as_fsdp2(mesh, options):
    theirs = fsdp2(planes(), mesh, **options)
    ours = compiled(sharded(planes(), mesh, **options), "eager")
    check_against_fsdp2(theirs, ours, ours, step, 2, tolerance=0)


def gathered(model, again=False):
    """The planes that each gather of a weight brings, by phase."""
    step(model, model, 0, again)
    rows = [row for row in shardc.report(model).collectives if row.kind == "all_gather"]
    found = {"forward": [], "backward": []}
    for row in rows:
        if row.nbytes % PLANE == 0:
            found[row.phase].append(row.nbytes // PLANE)
    return found


@on_ranks(2)
def test_each_half_gathers_its_plane(mesh):
    model = compiled(sharded(planes(), mesh), "eager")
    assert gathered(model) == {"forward": [1] * 4, "backward": [1] * 3}, "no gradient of the input"


@on_ranks(1)
def test_one_rank(mesh):
    alone, ours = sharded(planes(), mesh), compiled(sharded(planes(), mesh), "eager")
    for model in (alone, ours):
        step(model, model, 0)
    for p, q in zip(alone.parameters(), ours.parameters(), strict=True):
        assert p.grad.to_local().any() and torch.equal(p.grad.to_local(), q.grad.to_local())


@on_ranks(2)
def test_a_weight_that_a_backward_reads_in_both_ways(mesh):
    model = compiled(sharded(planes(), mesh), "eager")
    found = gathered(model, again=True)
    assert found["forward"] == [1] * 4
    assert sorted(found["backward"]) == [1, 1, 1, 2], "the last layer's first weight is read twice"


@on_ranks(2)
def test_a_weight_that_stays_is_gathered_whole(mesh):
    model = compiled(sharded(planes(), mesh, reshard_after_forward=False), "eager")
    assert gathered(model) == {"forward": [1, 2, 2, 2], "backward": []}


@on_ranks(2)
def test_a_forward_alone_gathers_its_plane(mesh):
    model = compiled(sharded(planes(), mesh), "eager")
    with torch.no_grad():
        alone = model(inputs(0))
    sizes = [row.nbytes for row in shardc.report(model).collectives]
    assert [size for size in sizes if size % PLANE == 0] == [PLANE] * 4
    assert torch.equal(alone, model(inputs(0)).detach())
