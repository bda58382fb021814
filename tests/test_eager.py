"""The eager runtime: a sharded model uncompiled has FSDP's results, memory and messages."""

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Stack, check_parity, seeded, shard_all, tokens
from ranks import on_ranks
from torch.utils.checkpoint import checkpoint

from shardc import MixedPrecisionPolicy
from shardc.runtime import collectives, compat, gathers, unshard


class Events:
    """What is started and waited for, in order, while it is entered: ("start", unit) and so on."""

    def __init__(self):
        self.log = []
        self.gathered = []
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        start, reducing = gathers._start, unshard.reducing

        def start_and_log(bucket, code, again):
            started = start(bucket, code, again)
            self.log.append(("start", bucket.owner.name))

            def wait():
                full = started.wait()
                self.log.append(("wait", bucket.owner.name))
                self.gathered.append(weakref.ref(full.untyped_storage()))
                return full

            return gathers._Started(started.code, started.written, wait)

        def reduce_and_log(flat, spec, partial=None):
            self.log.append(("reduce", flat.numel()))
            return reducing(flat, spec, partial)

        for module, name, new in (
            (gathers, "_start", start_and_log),
            ("shardc.runtime.backward_pass", "reducing", reduce_and_log),
        ):
            target = f"{module if isinstance(module, str) else module.__name__}.{name}"
            self._patches.enter_context(mock.patch(target, new))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def of(self, kind):
        return [unit for event, unit in self.log if event == kind]

    def alive(self):
        """How many gathered buckets still exist."""
        gc.collect()
        return sum(reference() is not None for reference in self.gathered)


def _batch(seed):
    return {"tokens": tokens(seed), "targets": tokens(seed + 1)}


def _step(model, call, number):
    rank = torch.distributed.get_rank()
    call(tokens(10 * number + rank), tokens(10 * number + rank + 5)).backward()


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_bitwise_equal_to_fsdp2(mesh, tied):
    theirs = fsdp2(seeded(lambda: Stack(3, tied=tied)), mesh)
    ours = sharded(seeded(lambda: Stack(3, tied=tied)), mesh)
    check_against_fsdp2(theirs, ours, ours, _step, tolerance=0)


@on_ranks(2)
def test_gathered_when_needed_ahead_and_again_for_the_backward(mesh):
    model = sharded(seeded(lambda: Stack(3)), mesh)
    units = ["layers.0", "layers.1", "layers.2"]
    for number in range(3):
        with Events() as events:
            _step(model, model, number)
        forward, backward = ["Stack", *units], units[::-1]
        assert events.of("start") == forward + backward
        assert events.of("wait") == forward + backward
        starts = [i for i, (event, unit) in enumerate(events.log) if event == "start"]
        ahead = [events.log[i - 1][0] == "wait" for i in starts]
        # In the first step each gather is waited for at once; then the next one is under way.
        log = [f"{event} {unit}" for event, unit in events.log if event != "reduce"]
        before = log.index("start layers.1") < log.index("wait layers.0")
        after = log.index("start layers.1") == log.index("wait layers.0") + 1
        assert after and not before, log
        assert sum(ahead) == len(starts) - 1 if number else True
        assert events.alive() == 0
        model.zero_grad()
    with Events() as events:
        loss = model(tokens(1), tokens(2))
        # The root stays for the backward; what the blocks saved are handles.
        assert events.alive() == 1
        loss.backward()
        del loss
        assert events.alive() == 0


class Broken(Stack):
    """Breaks the graph between blocks."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return self.head(x).logsumexp(-1).mean() + 0 * targets.sum()


def _compile_blocks(model):
    for layer in model.layers:
        layer.compile(backend="shardc", options={"executor": "eager"})
    return model


def _wrap_blocks(model):
    options = {"executor": "eager"}
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="shardc", options=options)
    return model


def _compile_model(model):
    model.compile(backend="shardc", options={"executor": "eager"})
    return model


MIXES = {
    "blocks compiled in place": (_compile_blocks, Stack),
    "a block compiled": (lambda model: _compile_blocks_of(model, [1]), Stack),
    "blocks wrapped": (_wrap_blocks, Stack),
    "a model with breaks": (_compile_model, Broken),
}


def _compile_blocks_of(model, indices):
    for index in indices:
        model.layers[index].compile(backend="shardc", options={"executor": "eager"})
    return model


@pytest.mark.parametrize("mix", MIXES)
@on_ranks(2)
def test_a_bucket_is_gathered_once_for_all_pieces(mesh, mix):
    prepare, build = MIXES[mix]
    model = prepare(sharded(seeded(lambda: build(3)), mesh))
    units = ["layers.0", "layers.1", "layers.2"]
    for number in range(4):
        with Events() as events:
            _step(model, model, number)
        if number > 1:
            assert events.of("start") == [build.__name__, *units, *units[::-1]], events.log
            assert len(events.of("reduce")) == 4
        assert events.alive() == 0
        model.zero_grad()
