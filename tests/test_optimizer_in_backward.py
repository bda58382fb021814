"""Optimizers that hooks step in the backward, each parameter by its own, as torchtune has them.

The ordinary loop steps the same optimizers after the backward: bits must be equal.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from fsdp2 import fsdp2, sharded
from models import Checkpointed, Stack, compiled, full, measured_peak, seeded, tokens
from ranks import mesh_of, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.multiprocessing.reductions import StorageWeakRef

import shardc


class Twice(Stack):
    """Calls each block twice, so that its gradient has two parts."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Sharing(Stack):
    """Blocks that share weights with other blocks, which are other units."""

    def __init__(self):
        super().__init__(3)
        self.layers[2].up = self.layers[0].up
        self.layers[1].norm.weight = self.layers[0].norm.weight


def tied():
    return Stack(tied=True)


def half_frozen():
    model = Stack()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("embed", "layers.0.up")))
    return model


def blocks_compiled(model):
    for layer in model.layers:
        layer.compile(backend="shardc", options={"executor": "eager"})
    return model


WAYS = {
    "uncompiled": lambda model: model,
    "blocks": blocks_compiled,
    "whole": compiled,
    "Inductor": lambda model: compiled(model, "inductor"),
}
THREE = ["uncompiled", "blocks", "whole"]


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05)


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def optimizers_of(model, make=adamw, in_backward=True):
    """One optimizer for each parameter that is trained, by name."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizers = {param: make([param]) for param in trained.values()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in trained.values() if in_backward else ():
        param.register_post_accumulate_grad_hook(step)
    return {name: optimizers[param] for name, param in trained.items()}


def end_step(optimizers, in_backward):
    """Step the optimizers, unless hooks have."""
    for optimizer in () if in_backward else optimizers.values():
        optimizer.step()
        optimizer.zero_grad()


def batch(number, micro=0):
    return tokens(100 * number + 10 * micro + dist.get_rank())


def train(model, call, optimizers, in_backward, steps=3, micro_batches=1):
    """Train; the losses, and the parameters by name."""
    losses = []
    for number in range(steps):
        for micro in range(micro_batches):
            x, is_last = batch(number, micro), micro == micro_batches - 1
            model.set_requires_gradient_sync(is_last)
            losses.append(call(x, x))
            losses[-1].backward()
        end_step(optimizers, in_backward)
        assert all(param.grad is None for param in model.parameters())
    values = {name: full(param).clone() for name, param in model.named_parameters()}
    return torch.stack(losses).detach(), values


def check_both_ways(mesh, way, build=Stack, make=adamw, micro_batches=1, **settings):
    """Train with the optimizers in the backward and after it: all bits must be equal."""
    found = {}
    for in_backward in (True, False):
        model = sharded(seeded(build), mesh, **settings)
        optimizers = optimizers_of(model, make, in_backward)
        call = WAYS[way](model)
        found[in_backward] = train(
            model, call, optimizers, in_backward, micro_batches=micro_batches
        )
    (losses, values), (wanted_losses, wanted) = found[True], found[False]
    start = dict(seeded(build).named_parameters())
    for name, value in wanted.items():
        assert torch.equal(values[name], value), name
        assert torch.equal(value, start[name]) != start[name].requires_grad, name
    assert torch.equal(losses, wanted_losses)


# -- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Stack, tied, half_frozen, Twice, Sharing, Checkpointed])
@pytest.mark.parametrize("way", THREE)
@on_ranks(2)
def test_trains_as_after_the_backward(mesh, way, build):
    check_both_ways(mesh, way, build)


@pytest.mark.parametrize("build", [Stack, tied, Sharing])
@pytest.mark.parametrize("way", THREE)
@on_ranks(2)
def test_two_micro_batches(mesh, way, build):
    check_both_ways(mesh, way, build, micro_batches=2)


@on_ranks(2)
def test_compiled_by_inductor(mesh):
    check_both_ways(mesh, "Inductor", tied, momentum, micro_batches=2)


@pytest.mark.parametrize(
    "settings",
    [
        {"reshard_after_forward": False},
        {"mp_policy": shardc.MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": shardc.CPUOffloadPolicy()},
    ],
    ids=["kept", "bf16", "on the host"],
)
@pytest.mark.parametrize("way", THREE)
@on_ranks(2)
def test_settings_of_units(mesh, way, settings):
    check_both_ways(mesh, way, Twice, momentum, **settings)


@pytest.mark.parametrize("way", THREE)
@on_ranks(4)
def test_all_reduce_after_the_last_micro_batch(mesh, way):
    mesh = mesh_of("cpu", (2, 2), ("copies", "shards"))
    values = []
    for in_backward in (True, False):
        model = sharded(seeded(Twice), mesh)
        optimizers = optimizers_of(model, momentum, in_backward)
        call = WAYS[way](model)
        for number in range(2):
            for is_last in (False, True):
                model.set_requires_all_reduce(is_last)
                call(batch(number, is_last), batch(number, is_last)).backward()
            end_step(optimizers, in_backward)
        values.append([full(param) for param in model.parameters()])
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("way", THREE)
@on_ranks(2)
def test_optimizers_of_whole_tensors(mesh, way):
    values = []
    for in_backward in (True, False):
        model = sharded(seeded(Stack), mesh)
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith(("up.weight", "down.weight")))
        muon = lambda params: shardc.WholeTensorOptimizer(torch.optim.Muon, params, lr=0.1)  # noqa: E731
        optimizers = optimizers_of(model, muon, in_backward)
        values.append(train(model, WAYS[way](model), optimizers, in_backward)[1])
    assert all(map(torch.equal, *(each.values() for each in values)))


@pytest.mark.parametrize("way", ["uncompiled", "whole"])
@on_ranks(2)
def test_hooks_from_before_sharding_stay(mesh, way):
    values = []
    for before in (True, False):
        model = seeded(Stack)
        if before:
            optimizers = optimizers_of(model)
        sharded(model, mesh)
        if not before:
            optimizers = optimizers_of(model)
        values.append(train(model, WAYS[way](model), optimizers, in_backward=True)[1])
    assert all(map(torch.equal, *(each.values() for each in values)))


@pytest.mark.parametrize("way", THREE)
@on_ranks(2)
def test_a_scheduler_of_one_optimizer(mesh, way):
    """Its learning rate goes to the other optimizers, as in torchtune's wrapper."""
    values = []
    for in_backward in (True, False):
        model = sharded(seeded(Stack), mesh)
        optimizers = optimizers_of(model, momentum, in_backward)
        call, others = WAYS[way](model), list(optimizers.values())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(others[0], 0.5)
        for number in range(3):
            call(batch(number), batch(number)).backward()
            end_step(optimizers, in_backward)
            scheduler.step()
            for optimizer in others:
                optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        assert others[-1].param_groups[0]["lr"] == 0.05 / 8
        values.append([full(param) for param in model.parameters()])
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("way", THREE)
@on_ranks(2)
def test_inside_of_compile_step(mesh, way):
    values = []
    for whole_step in (True, False):
        model = sharded(seeded(Stack), mesh)
        optimizers = optimizers_of(model)
        call = WAYS[way](model)

        def step(x, call=call):
            loss = call(x, x)
            loss.backward()
            return loss.detach()

        run = shardc.compile_step(step) if whole_step else step
        losses = []
        for number in range(5):
            if number == 3:
                for optimizer in optimizers.values():
                    optimizer.param_groups[0]["lr"] = 0.01
            losses.append(run(batch(number)))
        if whole_step:
            assert len(run.graphs) == 1 and not run.reasons
        values.append([*losses, *(full(param) for param in model.parameters())])
    assert all(map(torch.equal, *values))


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [Twice, Sharing])
@pytest.mark.parametrize("way", THREE)
@on_ranks(2)
def test_hooks_see_the_whole_gradient_once(mesh, way, build):
    """Also where a backward reduces the gradient in parts."""
    seen = {}
    for is_plain in (True, False):
        model = seeded(build) if is_plain else sharded(seeded(build), mesh)
        calls = []
        for name, param in model.named_parameters():
            param.register_hook(lambda g, name=name, calls=calls: calls.append((name, full(g))))
            param.register_post_accumulate_grad_hook(
                lambda p, name=name, calls=calls: calls.append((name, full(p.grad)))
            )
        call = model if is_plain else WAYS[way](model)
        call(tokens(0), tokens(0)).backward()
        seen[is_plain] = sorted(calls, key=lambda pair: pair[0])
    assert [name for name, _ in seen[False]] == [name for name, _ in seen[True]]
    for (name, value), (_, wanted) in zip(seen[False], seen[True], strict=True):
        torch.testing.assert_close(value, wanted, msg=name)


@on_ranks(2)
def test_hooks_on_nodes_of_autograd_are_refused(mesh):
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns when it is imported

    model = sharded(seeded(Stack), mesh)
    with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model(tokens(0), tokens(0)).backward()
    assert all(param.grad is not None for param in model.parameters())


# -- memory --------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Blocks whose parameters are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(16)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Held:
    """Counts the bytes of gradients that parameters have, or had and that still exist."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.most = 0
        self._params = list(params)
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._count)

    def _count(self, _) -> None:
        for param in self._params:
            if param.grad is not None:
                memory = param.grad.to_local().untyped_storage()
                self._known[memory._cdata] = StorageWeakRef(memory), memory.nbytes()
        self._known = {key: each for key, each in self._known.items() if not each[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._known.values()))


@on_ranks(2)
def test_gradients_are_freed_as_they_come(mesh):
    """One block's are held at a time, as by FSDP2; a graph of the whole model holds all."""
    found = {}
    ways = [(fsdp2, "uncompiled"), *((sharded, way) for way in THREE)]
    for shard, way in ways:
        for in_backward in (True, False):
            model = shard(seeded(Wide), mesh)
            held = Held(model.parameters())
            plain = lambda params: torch.optim.SGD(params, lr=0.1, foreach=False)  # noqa: E731
            optimizers = optimizers_of(model, plain, in_backward)
            call = WAYS[way](model)

            def step(call=call, optimizers=optimizers, in_backward=in_backward):
                call(torch.ones(2, 128)).backward()
                end_step(optimizers, in_backward)

            step()
            step()  # the order of gathers is known
            held.most = 0
            with tempfile.TemporaryDirectory() as folder:  # gloo's threads may hold more at times
                peak = min(measured_peak(step, Path(folder)) for _ in range(12))
            found[shard.__name__, way, in_backward] = held.most, peak
    size = sum(param.to_local().nbytes for param in model.parameters())
    for (_, way, in_backward), (most, _) in found.items():
        assert most == (size // 16 if in_backward else size), (way, in_backward)
    for shard, way in ways:
        fall = found[shard.__name__, way, False][1] - found[shard.__name__, way, True][1]
        if shard is sharded:  # three quarters, and nothing
            assert (fall > 0.4 * size) == (way != "whole"), (way, fall / size)


# -- checkpoints ---------------------------------------------------------------------------------


def by_name(model, optimizers, folder):
    """A full state of each optimizer, by names, from rank 0, as torchtune saves and loads them."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    states = {
        name: shardc.get_optimizer_state_dict(model, optimizer, options=options)
        for name, optimizer in optimizers.items()
    }
    kept = states if dist.get_rank() == 0 else {name: {} for name in states}
    assert all(kept[name] == {} for name in kept) == (dist.get_rank() != 0)

    def load(model, optimizers):
        for name, state in kept.items():
            shardc.set_optimizer_state_dict(model, optimizers[name], state, options=options)

    return load


def together(model, optimizers, folder):
    """The state of all optimizers as one, as torchtitan saves it with DCP."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state(model, optimizers):
        several = list(optimizers.values())
        return shardc.get_optimizer_state_dict(model, several, options=options)

    dcp.save(state(model, optimizers), checkpoint_id=folder)

    def load(model, optimizers):
        found = state(model, optimizers)
        dcp.load(found, checkpoint_id=folder)
        several = list(optimizers.values())
        shardc.set_optimizer_state_dict(model, several, found, options=options)

    return load


def by_their_own(model, optimizers, folder):
    """The state dict of each optimizer by name, with DCP, as torchtune saves it while it trains."""
    states = lambda optimizers: {n: each.state_dict() for n, each in optimizers.items()}  # noqa: E731
    dcp.save(states(optimizers), checkpoint_id=folder)

    def load(model, optimizers):
        model(batch(9), batch(9)).backward()  # makes a state to load into
        found = states(optimizers)
        dcp.load(found, checkpoint_id=folder)
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(found[name])

    return load


@pytest.mark.parametrize("save", [by_name, together, by_their_own])
@on_ranks(2)
def test_resumes_from_states_of_many_optimizers(mesh, save, tmp_path):
    model = sharded(seeded(Stack), mesh)
    optimizers = optimizers_of(model)
    train(model, model, optimizers, in_backward=True)
    load = save(model, optimizers, tmp_path)
    values = shardc.get_model_state_dict(model)
    values = {name: value.clone() for name, value in values.items()}
    wanted = train(model, model, optimizers, in_backward=True, steps=1)[1]

    again = sharded(seeded(Stack), mesh)
    optimizers = optimizers_of(again)
    load(again, optimizers)
    shardc.set_model_state_dict(again, values)
    found = train(again, again, optimizers, in_backward=True, steps=1)[1]
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
