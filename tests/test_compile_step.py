"""`compile_step`: a step that runs as one graph has the bits of the separate step, or says why not.

Each test shows that the graph ran: the Python of the step runs in its first two calls only.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from models import Stack, compiled, seeded, tokens
from ranks import on_ranks
from torch import nn

from shardc import compile_step, fully_shard

CALLS = 6


def _model(mesh, dtype=None):
    model = seeded(functools.partial(Stack, 3))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _batch(number):
    seed = 10 * number + dist.get_rank()
    return tokens(seed), tokens(seed + 50)


class _Run:
    """A run of `CALLS` steps, whole or separate."""

    def __init__(self, mesh, executor, make, whole, clip=0.0, scaled=False, parts=1, change=True):
        self.model = _model(mesh)
        self.optimizer = make(self.model.parameters())
        call = compiled(self.model, executor) if executor else self.model
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=scaled)
        self.python = 0

        def step(*batch):
            self.python += 1
            for given, targets in zip(batch[::2], batch[1::2], strict=True):
                loss = call(given, targets) / parts
                scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
            return loss

        self.step = compile_step(step) if whole else step
        self.losses = []
        for number in range(CALLS):
            if number == CALLS - 2 and change:
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.5
            batches = [each for part in range(parts) for each in _batch(number * parts + part)]
            self.losses.append(self.step(*batches).item())
        self.scale = scaler.get_scale()

    def state(self):
        """Parameters, and the tensors of the optimizer's state, as this rank has them."""
        for name, param in self.model.named_parameters():
            yield name, param._local
            for key, value in self.optimizer.state[param].items():
                yield f"{name} {key}", getattr(value, "_local", value)


def _check(mesh, executor, make, **how):
    separate, whole = (_Run(mesh, executor, make, whole, **how) for whole in (False, True))
    assert separate.python == CALLS
    assert whole.step.reasons == []
    assert (whole.python, len(whole.step.graphs)) == (2, 1)
    assert whole.losses == separate.losses
    assert len(set(whole.losses)) == CALLS
    assert whole.scale == separate.scale
    for (name, one), (_, other) in zip(separate.state(), whole.state(), strict=True):
        assert torch.equal(one, other), name
    return separate, whole


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": adamw,
    "AdamW, foreach": functools.partial(adamw, foreach=True),
    "AdamW, fused": functools.partial(adamw, fused=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_has_the_bits_of_the_separate_step(mesh, name):
    _check(mesh, "eager", OPTIMIZERS[name])


@pytest.mark.parametrize(
    "how",
    [
        {"clip": 0.1},
        {"clip": 0.1, "scaled": True},
        {"scaled": True},
        {"parts": 2},
    ],
    ids=str,
)
@on_ranks(2)
def test_clips_scales_and_accumulates(mesh, how):
    _check(mesh, "eager", OPTIMIZERS["AdamW, fused"], **how)


@on_ranks(3)
def test_uncompiled_models_too(mesh):
    _check(mesh, None, adamw, clip=0.1)


@on_ranks(2)
def test_inductor_compiles_nothing_anew(mesh):
    _check(mesh, "inductor", OPTIMIZERS["AdamW, fused"], clip=0.1)


@on_ranks(2)
def test_shapes_and_settings_get_graphs_of_their_own(mesh):
    model = _model(mesh)
    optimizer = adamw(model.parameters())
    python = []

    @compile_step
    def step(tokens, targets):
        python.append(tokens.shape)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(4):
        step(*_batch(0))
    for _ in range(4):
        step(*(each[:, :5].contiguous() for each in _batch(0)))
    assert (len(python), len(step.graphs)) == (4, 2)
    model.eval()
    for _ in range(4):
        step(*_batch(0))
    assert len(python) == 6
    optimizer.load_state_dict(optimizer.state_dict())  # other tensors, which the graph then reads
    before = [param._local.clone() for param in model.parameters()]
    step(*_batch(1))
    assert len(python) == 6
    moved = [not torch.equal(a, p._local) for a, p in zip(before, model.parameters(), strict=True)]
    assert any(moved)
    counts = {int(state["step"]) for state in optimizer.state.values()}
    assert counts == {13}


def _reads_a_value(model, optimizer, batch):
    loss = model(*batch)
    loss.backward()
    if loss.item() > 0:
        optimizer.step()
    optimizer.zero_grad()
    return loss


def _leaves_gradients(model, optimizer, batch):
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss


def _calls_no_optimizer(model, optimizer, batch):
    loss = model(*batch)
    loss.backward()
    optimizer.zero_grad()
    return loss


REFUSED = {
    "on the host": _reads_a_value,
    "leaves gradients": _leaves_gradients,
    "calls no optimizer": _calls_no_optimizer,
}


@pytest.mark.parametrize("words", REFUSED)
@on_ranks(2)
def test_a_step_that_is_no_graph_runs_as_usual(mesh, words):
    runs = []
    for whole in (False, True):
        model = _model(mesh)
        optimizer = adamw(model.parameters())

        def step(*batch, model=model, optimizer=optimizer):
            return REFUSED[words](model, optimizer, batch)

        call = compile_step(step) if whole else step
        runs.append([call(*_batch(number)).item() for number in range(4)])
    assert runs[0] == runs[1]
    assert words in call.reasons[0]
    assert call.graphs == []


@on_ranks(2)
def test_a_tensor_from_nowhere_is_refused(mesh):
    model = _model(mesh)
    optimizer = adamw(model.parameters())
    batches = iter([_batch(number) for number in range(5)])

    @compile_step
    def step():
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = {step().item() for _ in range(5)}
    assert len(losses) == 5
    assert "give it as an argument" in step.reasons[0]
