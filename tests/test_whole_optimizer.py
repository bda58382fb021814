"""WholeTensorOptimizer: any optimizer on sharded parameters equals the unsharded run."""

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer as more
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Stack, compiled, full, seeded, tokens
from ranks import mesh_of, on_ranks
from test_optimizers import collectives_issued
from torch import Tensor, nn, optim

from shardc import (
    ShardTensor,
    StateDictOptions,
    WholeTensorOptimizer,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from shardc.optim.owners import owners_of, update_cost
from shardc.optim.state_sizes import state_sizes

MATRICES = {"a": (12, 20), "b": (9, 7), "c": (16, 16), "d": (5, 3)}
ALL = {**MATRICES, "bias": (13,), "conv": (4, 3, 3, 3), "scalar": (1,)}

Make = Callable[..., optim.Optimizer]
# name: (optimizer, its settings, parameters, whether one rank must have all)
TABLE: dict[str, tuple[Make, dict[str, Any], dict[str, tuple[int, ...]], bool]] = {
    "Muon": (optim.Muon, {"lr": 0.05}, MATRICES, False),
    "Adafactor": (optim.Adafactor, {"lr": 0.05}, ALL, False),
    "AdamW": (optim.AdamW, {"lr": 0.05}, ALL, False),
    "Shampoo": (more.Shampoo, {"lr": 0.05}, ALL, False),
    "ScalableShampoo": (
        more.ScalableShampoo, {"lr": 0.05, "start_preconditioning_step": 2}, ALL, False,
    ),
    "SOAP": (more.SOAP, {"lr": 0.05, "precondition_frequency": 2}, ALL, False),
    "CAME": (more.CAME, {"lr": 0.05}, ALL, False),
    "Kron": (more.Kron, {"lr": 0.05}, ALL, True),  # draws of one generator
    "Prodigy": (more.Prodigy, {"lr": 1.0}, ALL, True),  # a step size of all gradients
    "AdamMini": (
        more.AdamMini, {"lr": 0.05, "num_embeds": 4, "num_heads": 2}, MATRICES, False,
    ),
    "StableAdamW": (more.StableAdamW, {"lr": 0.05}, ALL, False),
    "LARS": (more.LARS, {"lr": 0.05}, ALL, False),
    "LAMB": (more.Lamb, {"lr": 0.05}, ALL, False),
    "LAMB, one norm": (more.Lamb, {"lr": 0.05, "pre_norm": True}, ALL, True),
}  # fmt: skip


class Some(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(index)
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def pair(mesh, shapes: dict[str, tuple[int, ...]] = ALL) -> tuple[nn.Module, nn.Module]:
    """A plain model and its sharded twin, of which a rank holds a part."""
    plain, sharded = Some(shapes), fully_shard(Some(shapes), mesh=mesh)
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    held = [(p.to_local().numel(), p.numel()) for p in sharded.parameters()]
    assert sum(part for part, _ in held) < sum(numel for _, numel in held)
    return plain, sharded


def set_gradients(model: nn.Module, step: int, skip: str = "") -> None:
    """The same full gradients on a plain model, and parts of them on a sharded one."""
    for index, (name, p) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        grad = torch.randn(p.shape, generator=generator)
        if isinstance(p, ShardTensor):
            grad = torch.empty_like(p.detach()).copy_(grad)
        p.grad = None if name == skip else grad


def seed(step: int) -> None:
    torch.manual_seed(step)
    np.random.seed(step)
    random.seed(step)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: range, **kwargs) -> None:
    for step in steps:
        set_gradients(model, step, **kwargs)
        seed(step)
        optimizer.step()


def assert_same(plain: nn.Module, sharded: nn.Module, label: str = "") -> None:
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            full(q), p.detach(), rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{label} {n}: {m}"
        )


def made(name: str, plain: nn.Module, sharded: nn.Module) -> tuple[optim.Optimizer, Any]:
    make, settings, _, _ = TABLE[name]
    given = [m if name == "AdamMini" else m.parameters() for m in (plain, sharded)]
    seed(0)
    return make(given[0], **settings), WholeTensorOptimizer(make, given[1], **settings)


@on_ranks(4)
def test_on_a_mesh_with_copies(mesh):
    grid = mesh_of("cpu", (2, 2), ("replicate", "shard"))
    plain, sharded = pair(grid, MATRICES)
    assert sharded.a._shard_spec.world_size == 2
    reference, optimizer = made("Muon", plain, sharded)
    train(plain, reference, range(3))
    train(sharded, optimizer, range(3))
    assert_same(plain, sharded)


@on_ranks(2)
def test_training(mesh):
    """A model as users train it: Muon for matrices, AdamW beside it, gradients of a backward."""
    plain, sharded = seeded(Stack), fully_shard(seeded(Stack), mesh=mesh, units="auto")
    held = sum(p.to_local().numel() for p in sharded.parameters())
    assert held < sum(p.numel() for p in plain.parameters())
    call = compiled(sharded)
    batches = [(tokens(2 * r), tokens(2 * r + 1)) for r in range(2)]
    optimizers = []
    for model in (plain, sharded):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        muon = partial(WholeTensorOptimizer, optim.Muon) if model is sharded else optim.Muon
        optimizers.append((muon(matrices, lr=0.02), optim.AdamW(others, lr=0.01)))
    start = full(sharded.head.weight)
    for _ in range(3):
        for batch in batches:
            (plain(*batch) / 2).backward()
        call(*batches[mesh.get_local_rank()]).backward()
        for one in (*optimizers[0], *optimizers[1]):
            one.step()
            one.zero_grad()
    assert not torch.equal(start, full(sharded.head.weight))
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q), p.detach(), rtol=1e-3, atol=2e-4)


@on_ranks(2)
def test_state_is_on_owners_only(mesh):
    shapes = {str(i): (16, 16) for i in range(8)}
    plain, sharded = pair(mesh, shapes)
    reference = optim.Muon(plain.parameters())
    optimizer = WholeTensorOptimizer(optim.Muon, sharded.parameters())
    with collectives_issued(all_reduce=1, all_to_all_single=2):
        train(sharded, optimizer, range(1))
    train(plain, reference, range(1))

    def nbytes(one: optim.Optimizer) -> int:
        tensors = (t for state in one.state.values() for t in state.values())
        return sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor))

    (inner,) = optimizer.inners
    share = nbytes(inner) / nbytes(reference)
    assert abs(share - 1 / mesh.size()) < 0.05 / mesh.size()
    assert all(p.grad is None and not p.untyped_storage().nbytes() for p in inner.state)


def test_owners_have_equal_work_and_equal_state():
    shapes = [(64, 64)] * 6 + [(128, 64)] * 3 + [(64,)] * 9 + [()]
    for world in (1, 2, 3, 4):
        owners = owners_of(shapes, world)
        loads = [0] * world
        for shape, owner in zip(shapes, owners, strict=True):
            loads[owner] += update_cost(shape)
        assert max(loads) <= 1.2 * sum(loads) / world and set(owners) == set(range(world))
    shapes, state = [(64, 64)] * 8, [100] * 4 + [1] * 4
    owners = owners_of(shapes, 4, state)
    assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(owners[:4]) == [0, 1, 2, 3], "those that keep most are not on one rank"


def test_state_is_seen_without_values():
    def sizes(make, *shapes, **settings):
        params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        return state_sizes(lambda: make(params, lr=0.1, **settings), params)

    states = torch.random.get_rng_state(), random.getstate()
    step = 4  # bytes of a count
    assert sizes(optim.Muon, (8, 6), (3, 2)) == [4 * 48, 4 * 6]
    assert sizes(optim.AdamW, (8, 6), (7,)) == [2 * 4 * 48 + step, 2 * 4 * 7 + step]
    assert sizes(optim.Adafactor, (8, 6)) == [4 * (8 + 6) + step], "it reads values"
    kept, skipped = sizes(more.SOAP, (64, 8), (8, 4), max_precondition_dim=32)
    assert skipped == 4 * (2 * 32 + 2 * 64 + 2 * 16) and kept == 4 * (2 * 512 + 2 * 64)
    assert sizes(optim.SGD, (8, 6)) == [4 * 48], "no state: as large as the parameter"
    assert sizes(optim.LBFGS, (8, 6)) == [4 * 48], "no step without a closure"
    assert torch.equal(torch.random.get_rng_state(), states[0]) and random.getstate() == states[1]


# -- life of an optimizer --------------------------------------------------------------------------


@on_ranks(2)
def test_groups_schedulers_scaler_and_clipping(mesh):
    plain, sharded = pair(mesh)
    optimizers, schedulers, scalers = [], [], []
    for model, make in (
        (plain, optim.Adafactor), (sharded, partial(WholeTensorOptimizer, optim.Adafactor)),
    ):  # fmt: skip
        groups = [
            {"params": [model.a, model.bias], "lr": 0.1},
            {"params": (model.b,), "weight_decay": 0.2},
            {"params": model.scalar},
        ]
        optimizer = make(groups, lr=0.03)
        optimizer.add_param_group({"params": [model.c, model.conv], "lr": 0.02})
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.03, 0.03, 0.02]
        optimizers.append(optimizer)
        schedulers.append(optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        scalers.append(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100))
    for step in range(4):
        for model, optimizer, scheduler, scaler in zip(
            (plain, sharded), optimizers, schedulers, scalers, strict=True
        ):
            optimizer.zero_grad()
            scaler.scale(torch.ones(()))
            set_gradients(model, step, skip="b" if step == 1 else "")
            if step == 2:  # one element, so on one rank
                with torch.no_grad():
                    model.c.grad[15, 15] = float("inf")
            before = full(model.c) if model is sharded else model.c.detach().clone()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            after = full(model.c) if model is sharded else model.c.detach()
            assert torch.equal(before, after) == (step == 2)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
    assert_same(plain, sharded)
    assert optimizers[1].param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"] == 0.1 / 16


@on_ranks(2)
def test_gradients_that_one_rank_has(mesh):
    """An uncompiled forward leaves a gradient None where this rank did not use the parameter."""
    plain, sharded = pair(mesh)
    reference = optim.Muon([plain.a, plain.c])
    optimizer = WholeTensorOptimizer(optim.Muon, [sharded.a, sharded.c])
    for model in (plain, sharded):
        set_gradients(model, 0)
    if not sharded.a.grad.to_local().any():
        sharded.a.grad = None
    elif mesh.get_local_rank():
        start, stop = sharded.a._shard_spec.interval()
        plain.a.grad.view(-1)[start:stop] = 0
        sharded.a.grad = None
    dist.broadcast(plain.a.grad, 1)
    sharded.c.grad = plain.c.grad = None
    reference.step()
    optimizer.step()
    assert_same(plain, sharded)
    assert sharded.c not in optimizer.whole_state()


@on_ranks(2)
def test_a_plain_parameter_beside_sharded_ones(mesh):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Some(MATRICES), Some({"x": (4, 6)})

    plain, sharded = Two(), Two()
    fully_shard(sharded, mesh=mesh, ignored_params=set(sharded.other.parameters()))
    assert type(sharded.other.x) is nn.Parameter
    reference = optim.Muon(plain.parameters())
    optimizer = WholeTensorOptimizer(optim.Muon, sharded.parameters())
    train(plain, reference, range(3))
    train(sharded, optimizer, range(3))
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q) if isinstance(q, ShardTensor) else q, p)
    with pytest.raises(ValueError, match=r"looks at all parameters together.*\(4, 6\) is not shar"):
        WholeTensorOptimizer(more.Prodigy, sharded.parameters())
    single, twin = Some(MATRICES), Some(MATRICES)  # not sharded at all
    train(single, optim.Muon(single.parameters()), range(2))
    train(twin, WholeTensorOptimizer(optim.Muon, twin.parameters()), range(2))
    assert all(map(torch.equal, single.parameters(), twin.parameters()))


@on_ranks(2)
def test_refusals(mesh):
    _, sharded = pair(mesh)
    for call, error, words in (
        (lambda: WholeTensorOptimizer(optim.Muon, sharded.parameters()), ValueError, "2D"),
        (
            lambda: WholeTensorOptimizer(optim.AdamW, sharded.parameters(), lr=-1),
            ValueError, "rate: -1",
        ),
        (lambda: WholeTensorOptimizer(optim.AdamW, []), ValueError, "empty parameter list"),
        (
            lambda: WholeTensorOptimizer(optim.LBFGS, sharded.parameters()).step(),
            TypeError, "LBFGS needs a closure",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()


# -- closures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@on_ranks(2)
def test_lbfgs(mesh, search):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))

    plain, sharded = build(), fully_shard(build(), mesh=mesh)
    batches = [
        torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(mesh.size())
    ]
    settings = {"lr": 0.5, "max_iter": 6, "line_search_fn": search}
    losses, calls = [], []
    for model, make, x in (
        (plain, optim.LBFGS, torch.cat(batches)),
        (sharded, partial(WholeTensorOptimizer, optim.LBFGS), batches[mesh.get_local_rank()]),
    ):
        optimizer = make(model.parameters(), **settings)
        count = [0]

        def closure(model=model, optimizer=optimizer, x=x, count=count) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x).square().sum(1) - 1).square().mean()
            loss.backward()
            count[0] += 1
            return loss

        losses.append([float(optimizer.step(closure)) for _ in range(3)])
        calls.append(count[0])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-5)
    assert calls[0] == calls[1] > 6 and losses[1][-1] < losses[1][0]
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q), p.detach(), rtol=1e-3, atol=1e-4)


@on_ranks(4)
def test_lbfgs_resumes_with_its_history(mesh):
    """From two ranks to four."""
    grid = mesh_of("cpu", (2, 2), ("outer", "inner"))
    plain, first = pair(grid["inner"], MATRICES)
    second = fully_shard(Some(MATRICES), mesh=mesh)

    def closure(model) -> float:
        value = 0.0
        for p in model.parameters():
            p.grad = p.detach() ** 3
            value += float((p.detach() ** 4).sum()) / 4
        return value

    reference = optim.LBFGS(plain.parameters(), max_iter=3)
    optimizer = WholeTensorOptimizer(optim.LBFGS, first.parameters(), max_iter=3)
    reference.step(partial(closure, plain))
    optimizer.step(partial(closure, first))
    whole = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(first, optimizer, options=whole)
    assert saved["state"]["a"]["old_dirs"], saved["state"]
    set_model_state_dict(second, {n: full(p) for n, p in first.named_parameters()})
    forgetful, fresh = (
        WholeTensorOptimizer(optim.LBFGS, second.parameters(), max_iter=3) for _ in range(2)
    )
    set_optimizer_state_dict(second, fresh, saved)
    before = [full(p) for p in second.parameters()]
    reference.step(partial(closure, plain))
    optimizer.step(partial(closure, first))
    fresh.step(partial(closure, second))
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(full(q), full(p), rtol=1e-5, atol=1e-6)
    assert_same(plain, second, "LBFGS")
    after = [full(p) for p in second.parameters()]
    with torch.no_grad():
        for p, value in zip(second.parameters(), before, strict=True):
            p.copy_(value)
    forgetful.step(partial(closure, second))
    assert not all(map(torch.equal, after, map(full, second.parameters()))), "history is used"


@on_ranks(2)
def test_closure_of_others(mesh):
    plain, sharded = pair(mesh)
    for model, make in (
        (plain, optim.Adafactor),
        (sharded, partial(WholeTensorOptimizer, optim.Adafactor)),
    ):
        optimizer = make(model.parameters())

        def closure(model=model) -> float:
            assert torch.is_grad_enabled()
            set_gradients(model, 1)
            return 2.5

        assert optimizer.step(closure) == 2.5
    assert_same(plain, sharded)


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
@on_ranks(4)
def test_resume_at_another_world_size(mesh, name, tmp_path):
    """Two of four ranks save (sharded, and full); all four load, and go on as the unsharded run."""
    shapes = TABLE[name][2]
    grid = mesh_of("cpu", (2, 2), ("outer", "inner"))
    plain = Some(shapes)
    reference, _ = made(name, plain, plain)
    train(plain, reference, range(3))
    first = fully_shard(Some(shapes), mesh=grid["inner"])
    _, optimizer = made(name, Some(shapes), first)
    train(first, optimizer, range(3))
    whole = get_optimizer_state_dict(
        first, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    own = reference.state_dict()["state"]
    assert len(whole["state"]) == len(own)
    for entries, wanted in zip(whole["state"].values(), own.values(), strict=True):
        assert entries.keys() == wanted.keys()
        for key, value in wanted.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(entries[key], value, rtol=1e-4, atol=1e-4)
    if mesh.get_local_rank() < 2:
        saved = {
            "model": get_model_state_dict(first),
            "optimizer": get_optimizer_state_dict(first, optimizer),
        }
        dcp.save(saved, checkpoint_id=tmp_path, process_group=grid["inner"].get_group())
    dist.barrier()
    train(plain, reference, range(3, 5))
    for form in ("sharded", "full"):
        second = fully_shard(Some(shapes), mesh=mesh)
        assert all(
            a._shard_spec != b._shard_spec
            for a, b in zip(first.parameters(), second.parameters(), strict=True)
        )
        _, resumed = made(name, Some(shapes), second)
        if form == "sharded":
            state = {
                "model": get_model_state_dict(second),
                "optimizer": get_optimizer_state_dict(second, resumed),
            }
            assert not any(any(inner.state.values()) for inner in resumed.inners)
            dcp.load(state, checkpoint_id=tmp_path)
        else:
            model = {n: full(p) for n, p in first.named_parameters()}
            state = {"model": model, "optimizer": copy.deepcopy(whole)}
        set_model_state_dict(second, state["model"])
        set_optimizer_state_dict(second, resumed, state["optimizer"])
        train(second, resumed, range(3, 5))
        assert_same(plain, second, f"{name} {form}")


@on_ranks(2)
def test_state_of_an_unsharded_run(mesh):
    """`load_state_dict` takes it as it is, and `state_dict` gives the same entries."""
    plain, sharded = pair(mesh)
    reference, optimizer = made("SOAP", plain, sharded)
    assert optimizer.state_dict()["state"] == {}
    train(plain, reference, range(2))
    with torch.no_grad():
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
            q.copy_(p)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.param_groups[0]["step"] == 2
    train(plain, reference, range(2, 4))
    train(sharded, optimizer, range(2, 4))
    assert_same(plain, sharded)
    mine, other = optimizer.state_dict(), reference.state_dict()
    assert mine["state"].keys() == other["state"].keys()
    assert mine["state"][0]["exp_avg"].shape == (12, 20)
    fresh = WholeTensorOptimizer(more.SOAP, sharded.parameters(), lr=0.7)
    fresh.load_state_dict(mine)
    assert fresh.param_groups[0]["lr"] == 0.05
    train(plain, reference, range(4, 5))
    train(sharded, fresh, range(4, 5))
    assert_same(plain, sharded)
