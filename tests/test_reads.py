"""Ways to read a parameter other than `self.weight`, and to give a module other values."""

import pytest
import torch
from models import check_parity, seeded
from ranks import on_ranks
from torch import nn

from shardc import fully_shard

WAYS = pytest.mark.parametrize("way", ["uncompiled", "blocks", "eager", "inductor"])


def compiled_in(way, model):
    """`model`, compiled in a way: whole, by an executor, or its `block` alone."""
    if way != "uncompiled":
        module = model.block if way == "blocks" else model
        executor = "inductor" if way == "inductor" else "eager"
        module.compile(backend="shardc", options={"executor": executor})
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


READS = {"hasattr": _has, "getattr with a default": _get_with_default}


@WAYS
@pytest.mark.parametrize("read", READS)
@on_ranks(2)
def test_a_read_gives_the_full_parameter(mesh, read, way):
    plain, model = (seeded(lambda: Model(READS[read])) for _ in range(2))
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    check_parity(plain, model, compiled_in(way, model), batch, mesh)
