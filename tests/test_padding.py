"""Padding is easy to tell, and reaches no gradient and no update."""

import os
from unittest import mock

import pytest
import torch
from models import Stack, compiled, full, on_meta, seeded, shard_all, tokens
from ranks import on_ranks

from shardc import MixedPrecisionPolicy, materialize, units_of
from shardc.runtime.comm.unshard import gather
from shardc.runtime.layout.padding import padding_value


def _buckets(model):
    return [b for module in units_of(model).values() for b in module._shardc_unit.buckets]


def _padding_of(flat, bucket):
    """The elements of a whole bucket, `(W*S,)`, that no parameter has."""
    pieces = torch.split(flat, [size for size, _ in bucket.layout.split_sizes()])
    gaps = [p for p, (_, s) in zip(pieces, bucket.layout.split_sizes(), strict=True) if s is None]
    return torch.cat([flat[:0], *gaps])


def _gathered_padding(model):
    with torch.no_grad():
        return torch.cat([_padding_of(gather(b.segment, b.key.code), b) for b in _buckets(model)])


def _train(mesh, padding, executor, **policy):
    """Three clipped steps, the second of two micro-batches: parameters, unreduced padding."""
    with mock.patch.dict(os.environ, SHARDC_PADDING=padding):
        model = shard_all(seeded(Stack), mesh, **policy)
    step = model if executor is None else compiled(model, executor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    unreduced = []
    for number in range(3):
        seeds = [10 * number + 100 * mesh.get_local_rank() + micro for micro in range(2)]
        model.set_requires_gradient_sync(number != 1)
        step(tokens(seeds[0]), tokens(seeds[0] + 1)).backward()
        if number == 1:
            waiting = [(b.gradients.waiting.pending, b) for b in _buckets(model)]
            unreduced += [_padding_of(flat, b) for flat, b in waiting if flat is not None]
            model.set_requires_gradient_sync(True)
            step(tokens(seeds[1]), tokens(seeds[1] + 1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert torch.isfinite(norm)
        optimizer.step()
        optimizer.zero_grad()
    return model, [full(p) for p in model.parameters()], torch.cat(unreduced)


@pytest.mark.parametrize(
    ("executor", "low"), [("eager", False), ("inductor", False), (None, False), (None, True)]
)
@on_ranks(3)
def test_nan_as_padding_trains_bitwise_the_same(mesh, executor, low):
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if low else {}
    plain, values, unreduced = _train(mesh, "", executor, **policy)
    poisoned, same, unreduced_too = _train(mesh, "nan", executor, **policy)
    before, after = _gathered_padding(plain), _gathered_padding(poisoned)
    assert len(before) > 0 and before.eq(42).all() and after.isnan().all()  # three steps later
    for value, other in zip(values, same, strict=True):
        assert torch.equal(value, other) and torch.isfinite(value).all()
    for gradients in (unreduced, unreduced_too):
        assert len(gradients) == len(before) and gradients.eq(0).all()


@pytest.mark.parametrize("way", ["materialize", "to_empty"])
@on_ranks(3)
def test_padding_is_filled_where_values_come_later(mesh, way):
    model = shard_all(on_meta(), mesh)
    if way == "materialize":
        materialize(model)
    else:
        model.to_empty(device="cpu")
    padding = _gathered_padding(model)
    assert len(padding) > 0 and padding.eq(42).all()


def test_the_setting(monkeypatch):
    assert padding_value(torch.float32) == 42
    monkeypatch.setenv("SHARDC_PADDING", "-1.5")
    assert padding_value(torch.bfloat16) == -1.5 and padding_value(torch.int64) == 42
    monkeypatch.setenv("SHARDC_PADDING", "none")
    with pytest.raises(ValueError, match="SHARDC_PADDING must be a number or 'nan', got 'none'"):
        padding_value(torch.float32)
