"""Two hundred steps of every kind in random order: equal to the unsharded run."""

import random

import pytest
import torch
from fsdp2 import sharded
from models import Stack, full, mean_over_ranks, seeded, tokens
from ranks import on_ranks
from torch import nn

STEPS = 200


class Interrupted(Stack):
    """Raises in the middle of a forward or backward, where told so, and breaks the graph."""

    where = None

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if index == 1:
                x = self._stop(x)
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def _stop(self, x):
        if self.where == "forward":
            raise ValueError("stop")
        if self.where == "backward":
            x.register_hook(self._raise)
        return x

    def _raise(self, grad):
        raise ValueError("stop")


def _ways(model):
    """How a forward may run: name to callable."""
    options = {"backend": "shardc", "options": {"executor": "eager", "fallback": False}}
    blocks = [torch.compile(layer, **options) for layer in model.layers]

    def by_blocks(tokens, targets):
        x = model.embed(tokens)
        for block in blocks:
            x = block(x)
        return nn.functional.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())

    return {
        "uncompiled": model,
        "compiled": torch.compile(model, **options),
        "blocks": by_blocks,
    }


def _micro_batch(seed, rank):
    return tokens(2 * seed + 1000 * rank), tokens(2 * seed + 1 + 1000 * rank)


@on_ranks(2)
def test_two_hundred_random_steps(mesh):
    plain, model = seeded(lambda: Interrupted(3)), sharded(seeded(lambda: Interrupted(3)), mesh)
    ways, choice, rank = _ways(model), random.Random(0), mesh.get_local_rank()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
    done = set()
    for step in range(STEPS):
        way = choice.choice(list(ways))
        kind = choice.choice(
            ["step", "step", "accumulate", "no_sync", "no_grad", "forward", "backward"]
        )
        done.add((way, kind))
        batches = [_micro_batch(10 * step + i, rank) for i in range(choice.choice([2, 3]))]
        if kind == "no_grad":
            with torch.no_grad():
                torch.testing.assert_close(ways[way](*batches[0]), plain(*batches[0]))
            continue
        if kind in ("forward", "backward"):
            if way != "uncompiled":
                continue
            model.where = kind
            with pytest.raises(ValueError, match="stop"):
                model(*batches[0]).backward()
            model.where = None
            model.zero_grad()
            continue
        if kind == "step":
            batches = batches[:1]
        for index, batch in enumerate(batches):
            if kind == "no_sync":
                model.set_requires_gradient_sync(index == len(batches) - 1)
            (ways[choice.choice(list(ways))](*batch) / len(batches)).backward()
            (plain(*batch) / len(batches)).backward()
        largest = max(float(p.grad.abs().max()) for p in plain.parameters())
        for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
            p.grad = mean_over_ranks(p.grad, mesh)
            torch.testing.assert_close(
                full(q.grad), p.grad, rtol=1e-4, atol=1e-5 * largest,
                msg=lambda m, at=(step, way, kind, name): f"{at}: {m}",
            )  # fmt: skip
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(done) > 15, done
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q), p.detach(), rtol=1e-3, atol=1e-4, msg=name)
