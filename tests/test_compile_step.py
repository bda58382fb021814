"""`compile_step`: a step that runs as one graph has the bits of the separate step, or says why not.

Each test shows that the graph ran: the Python of the step runs in its first two calls only.
"""

import argparse
import contextlib
import functools
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from models import Stack, compiled, seeded, tokens
from ranks import on_ranks, run_on_ranks
from test_labels import asked_autograd
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from shardc import MixedPrecisionPolicy, WholeTensorOptimizer, compile_step, fully_shard
from shardc.step import rerun
from shardc.step.compile_step import MOST_CHANGES, MOST_KINDS
from shardc.step.values import part_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import train_lm

CALLS = 6


def _model(mesh, dtype=None):
    model = seeded(functools.partial(Stack, 3))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _batch(number):
    seed = 10 * number + dist.get_rank()
    return tokens(seed), tokens(seed + 50)


def _update(loss, optimizer):
    """The end of a step."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class _Run:
    """A model with its optimizers, and a step of it, whole or separate."""

    def __init__(
        self, mesh, executor, make, whole, *, clip=0.0, scaled=False, parts=1, no_sync=False,
        dtype=None,
    ):  # fmt: skip
        self.model, self.parts = _model(mesh, dtype), parts
        made = make(self.model.parameters())
        self.optimizers = made if isinstance(made, list) else [made]
        call = compiled(self.model, executor) if executor else self.model
        self.scaler = torch.amp.GradScaler("cpu", 2.0**8, growth_interval=2, enabled=scaled)
        self.losses, self.calls = [], []

        def step(*batch):
            self.calls.append(len(batch))
            for number, (given, targets) in enumerate(zip(batch[::2], batch[1::2], strict=True)):
                late = no_sync and number < parts - 1
                with self.model.no_sync() if late else contextlib.nullcontext():
                    loss = call(given, targets) / parts
                    self.scaler.scale(loss).backward()
            if clip:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            self.model.zero_grad()
            return loss

        self.step = compile_step(step) if whole else step

    def train(self, numbers):
        """Run steps of the batches of `numbers`; settings of the optimizers follow the number."""
        for number in numbers:
            for group in (g for each in self.optimizers for g in each.param_groups):
                group["lr"] = group.setdefault("first_lr", group["lr"]) / (1 + number)
                group["weight_decay"] = 0.01 * (1 + number)
                if "betas" in group:
                    group["betas"] = 0.9 - 0.01 * number, 0.99 - 0.01 * number
            each = range(number * self.parts, (number + 1) * self.parts)
            batches = [tensor for part in each for tensor in _batch(part)]
            self.losses.append(self.step(*batches).item())
        return self

    @property
    def python(self):
        """How often the Python of the step ran."""
        return len(self.calls)

    def state(self):
        """Parameters, and the tensors of the optimizer's state, as this rank has them."""
        for name, param in self.model.named_parameters():
            yield name, param._local
        for optimizer in self.optimizers:
            for one in getattr(optimizer, "inners", [optimizer]):
                for number, state in enumerate(one.state.values()):
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor):
                            yield f"{number} {key}", getattr(value, "_local", value)


def _check(mesh, executor, make, *, calls=CALLS, **how):
    separate, whole = (
        _Run(mesh, executor, make, whole, **how).train(range(calls)) for whole in (False, True)
    )
    assert separate.python == calls
    assert whole.step.reasons == [], whole.step.reasons
    assert (whole.python, len(whole.step.graphs)) == (2, 1)
    assert whole.losses == separate.losses
    assert len(set(whole.losses)) > calls / 2
    assert whole.scaler.get_scale() == separate.scaler.get_scale()
    _check_equal(separate, whole)


def _check_equal(separate, whole):
    for (name, one), (_, other) in zip(separate.state(), whole.state(), strict=True):
        assert torch.equal(one, other), name


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": adamw,
    "AdamW, foreach": functools.partial(adamw, foreach=True),
    "AdamW, fused": functools.partial(adamw, fused=True),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "Adafactor": lambda params: WholeTensorOptimizer(torch.optim.Adafactor, params, lr=0.05),
    "Muon and AdamW": lambda params: _muon_and_adamw([*params]),
    "reads values": lambda params: _ByItsNorm(params, lr=0.1),
}


def _muon_and_adamw(params):
    return [
        WholeTensorOptimizer(torch.optim.Muon, [p for p in params if p.dim() == 2], lr=0.02),
        adamw([p for p in params if p.dim() != 2]),
    ]


class _ByItsNorm(torch.optim.SGD):
    """SGD that divides a gradient by its norm, which it reads on the host, and differentiates."""

    def step(self, closure=None):
        with torch.enable_grad():
            half = torch.full((), 0.5, requires_grad=True)
            (half,) = torch.autograd.grad(half.square() / 2, half)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(half)
                    param.grad.mul_(1 / (1 + param.grad._local.norm().item()))
        return super().step(closure)


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
        {"parts": 2, "no_sync": True},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
@on_ranks(2)
def test_clips_scales_and_accumulates(mesh, how):
    _check(mesh, "eager", OPTIMIZERS["AdamW, fused"], **how)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 2, 4)
def test_twenty_steps(mesh, name):
    make, fused = OPTIMIZERS[name], "fused" in name
    _check(mesh, "eager", make, calls=20, clip=0.1, scaled=fused)
    _check(mesh, None, make, calls=20, parts=2, no_sync=True, dtype=torch.bfloat16)


def go_on(mesh, path, first):
    """A checkpoint of one way goes on by the other; one that replays its graph loads it, too."""
    ways = [_Run(mesh, "eager", adamw, whole, clip=0.1) for whole in (first, not first)]
    state = [
        lambda run=run: dict(enumerate(get_state_dict(run.model, run.optimizers))) for run in ways
    ]
    ways[0].train(range(5))
    dcp.save(state[0](), checkpoint_id=path)
    ways[0].train(range(5, 9))
    ways[1].train(range(20, 24))
    loaded = state[1]()
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        ways[1].model,
        ways[1].optimizers,
        model_state_dict=loaded[0],
        optim_state_dict=loaded[1],
    )
    ways[1].train(range(5, 9))
    assert [run.python for run in ways] == ([2, 8] if first else [9, 2])
    _check_equal(*ways)


@pytest.mark.parametrize("first", [False, True], ids=["separate", "whole"])
def test_checkpoints_go_both_ways(tmp_path, first):
    run_on_ranks(2, __name__, "go_on", {"path": str(tmp_path / "saved"), "first": first})


def train_text(mesh, path):
    """`examples/train_lm.py`, whole and separate; the whole step goes on from a checkpoint."""
    run = {"steps": 9, "length": 16, "batch_size": 2, "lr": 1e-2, "seed": 0, "dim": 32, "layers": 2}
    run |= {"log_every": 3, "save_every": 6, "executor": "eager"}
    held_out = {}
    for whole in (False, True):
        folder = Path(path, str(whole))
        for resume in (False, True):
            args = argparse.Namespace(**run, whole_step=whole, checkpoint_dir=folder, resume=resume)
            torch.manual_seed(0)
            model = train_lm.LanguageModel(args.dim, args.layers, args.length)
            fully_shard(model, mesh=mesh)
            held_out[whole, resume] = train_lm.train(model, args, torch.device("cpu"))
            if dist.get_rank() == 0:
                shutil.rmtree(folder / "step-9")  # so that the second run goes on from step 6
            dist.barrier()
    assert len(set(held_out.values())) == 1


def test_the_example_prints_the_same_losses(tmp_path):
    run_on_ranks(2, __name__, "train_text", {"path": str(tmp_path)})


@on_ranks(3)
def test_uncompiled_models_too(mesh):
    _check(mesh, None, adamw, clip=0.1)
    asked = []
    for whole in (False, True):
        run = _Run(mesh, None, OPTIMIZERS["AdamW, fused"], whole=whole).train(range(3))
        asked.append(asked_autograd(lambda run=run: run.train([3])))
    assert asked[0] > 0 == asked[1], "a whole step differentiates nothing"


@on_ranks(2)
def test_an_op_that_keeps_more_where_gradients_are_on(mesh):
    def train(whole):
        torch.manual_seed(0)
        model = fully_shard(nn.LSTM(6, 5), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def step(x):
            return _update(model(x)[0].square().sum(), optimizer)

        call = compile_step(step) if whole else step
        losses = [call(torch.ones(3, 2, 6) + number).item() for number in range(5)]
        return losses, [param._local for param in model.parameters()]

    (losses, values), (others, theirs) = train(False), train(True)
    assert losses == others and len(set(losses)) == 5
    assert all(map(torch.equal, values, theirs))


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
        return _update(model(tokens, targets), optimizer)

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


class _Dropped(nn.Module):
    """A stack whose layers are recomputed, with the dropout of the forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: F.dropout(layer(x), 0.5), x, use_reentrant=False)
        return x.square().mean()


def _recomputes_dropout(model, optimizer, batch):
    return _update(model(batch[0]), optimizer)


def _seeds(model, optimizer, batch):
    torch.manual_seed(7)
    return _recomputes_dropout(model, optimizer, [F.dropout(batch[0], 0.5)])


@pytest.mark.parametrize("step", [_recomputes_dropout, _seeds])
@on_ranks(2)
def test_random_numbers_that_a_graph_would_draw_anew_are_refused(mesh, step):
    runs = []
    for whole in (False, True):
        model = fully_shard(seeded(_Dropped), mesh=mesh)
        optimizer = adamw(model.parameters())

        def run(x, model=model, optimizer=optimizer):
            return step(model, optimizer, [x])

        call = compile_step(run) if whole else run
        torch.manual_seed(3)
        losses = [call(torch.ones(4, 8)).item() for _ in range(5)]
        runs.append((losses, [param._local.clone() for param in model.parameters()]))
    assert "random numbers" in call.reasons[0]
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))


def _selects(model, optimizer, batch):
    loss = model(*batch)
    chosen = batch[0][batch[0] > 4]
    (loss * chosen.float().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _replaces_a_buffer(model, optimizer, batch):
    if "seen" not in model._buffers:
        model.register_buffer("seen", None)
    loss = model(*batch)
    loss.backward()
    model.seen = loss.detach() * 2
    optimizer.step()
    optimizer.zero_grad()
    return loss


REFUSED = {
    "replaces the tensor 'seen'": _replaces_a_buffer,
    "depends on values": _selects,
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
def test_a_python_value_that_changes_is_seen(mesh):
    model = _model(mesh)
    optimizer = adamw(model.parameters())
    python, factor = [], 1.0

    @compile_step
    def step(tokens, targets):
        python.append(factor)
        return _update(factor * model(tokens, targets), optimizer)

    for factor in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0):
        assert step(*_batch(0)).item() / factor < 4
    assert python == [1.0, 1.0, 2.0, 2.0]
    for number in range(2 * MOST_CHANGES):
        factor = float(number // 2)
        step(*_batch(0))
    assert "changed 8 times: factor" in step.reasons[0]


@on_ranks(2)
def test_settings_are_read_unless_a_hook_wants_the_call(mesh):
    run = _Run(mesh, "eager", OPTIMIZERS["AdamW, fused"], whole=True).train(range(2))
    torch.optim.lr_scheduler.ConstantLR(run.optimizers[0])
    with mock.patch.object(rerun, "run_again", wraps=rerun.run_again) as again:
        run.train(range(2, 5))
        assert again.call_count == 1  # to compare
        seen = []
        run.optimizers[0].register_step_post_hook(lambda *_: seen.append(1))
        run.train(range(5, 8))
    assert (again.call_count, len(seen), run.python) == (4, 3, 2)


def test_a_part_is_counted_from_its_tensor():
    assert part_of(torch.arange(10)[4:], [2], [1], 1).tolist() == [5, 6]


@on_ranks(2)
def test_batches_are_parts_of_one_tensor(mesh):
    """The arguments lie at different places of their memory, and the step reads a part of them."""
    batches = torch.stack([torch.stack(_batch(number)) for number in range(CALLS)])
    runs = []
    for whole in (False, True):
        model = _model(mesh)
        optimizer = adamw(model.parameters())
        python = []

        def step(both, model=model, optimizer=optimizer, python=python):
            python.append(1)
            return _update(model(both[0], both[1]), optimizer)

        call = compile_step(step) if whole else step
        runs.append([call(batches[number]).item() for number in range(CALLS)])
    assert runs[0] == runs[1]
    assert len(python) == 2


@on_ranks(2)
def test_gradients_that_wait_outside_are_added(mesh):
    """Of a micro-batch before one call of the step: that call runs as usual."""
    runs = []
    for whole in (False, True):
        run = _Run(mesh, "eager", adamw, whole).train(range(4))
        with run.model.no_sync():
            run.model(*_batch(9)).backward()
        runs.append(run.train(range(4, CALLS)))
    assert runs[1].python == 4
    _check_equal(*runs)


@on_ranks(1)
def test_no_cuda_graph_reads_tensors_of_the_host(mesh):
    model = _model(mesh)
    optimizer = adamw(model.parameters())

    @compile_step(mode="reduce-overhead")
    def step(tokens, targets):
        return _update(model(tokens, targets), optimizer)

    step(*_batch(0))
    with pytest.warns(UserWarning, match=r"without a CUDA graph: it reads a tensor of shape .*cpu"):
        step(*_batch(0))
    step(*_batch(0))
    assert (len(step.graphs), step.captures) == (1, 0)
    with pytest.raises(ValueError, match=r"'reduce-overhead' or None, got 'fast'"):
        compile_step(mode="fast")


@on_ranks(2)
def test_a_step_that_counts_is_refused(mesh):
    model = _model(mesh)
    optimizer = adamw(model.parameters())
    count = 0

    @compile_step
    def step(tokens, targets):
        nonlocal count
        count += 1
        return _update(model(tokens, targets), optimizer)

    for _ in range(4):
        step(*_batch(0))
    assert count == 4
    assert "it changes count" in step.reasons[0]


@on_ranks(2)
def test_graphs_are_bounded(mesh):
    model = _model(mesh)
    optimizer = adamw(model.parameters())

    @compile_step
    def step(number, tokens, targets):
        return _update(model(tokens, targets), optimizer)

    for number in range(MOST_KINDS + 1):
        step(number, *_batch(0))
    assert f"more than {MOST_KINDS} kinds" in step.reasons[0]
    for _ in range(2):
        step(0, *_batch(0))  # an early kind still gets its graph
    assert len(step.graphs) == 1


@pytest.mark.parametrize("who", ["an argument", "a plain module"])
@on_ranks(2)
def test_gradients_of_others_are_left(mesh, who):
    model, head = _model(mesh), nn.Linear(3, 1)
    optimizer = adamw(model.parameters())
    scale = torch.ones(3, requires_grad=who == "an argument")

    @compile_step
    def step(tokens, targets, scale):
        loss = model(tokens, targets)
        if who == "a plain module":
            scale = head(scale)
        return _update(loss * scale.mean(), optimizer)

    before = None
    for number in range(4):
        step(*_batch(number), scale)
        grad = head.weight.grad if who == "a plain module" else scale.grad
        assert before is None or not torch.equal(grad, before)
        before = grad.clone()
    assert "gradient" in step.reasons[0]
    assert step.graphs == []


@on_ranks(2)
def test_a_tensor_from_nowhere_is_refused(mesh):
    model = _model(mesh)
    optimizer = adamw(model.parameters())
    batches = iter([_batch(number) for number in range(5)])

    @compile_step
    def step():
        return _update(model(*next(batches)), optimizer)

    losses = {step().item() for _ in range(5)}
    assert len(losses) == 5
    assert "give it as an argument" in step.reasons[0]
