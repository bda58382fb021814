"""Optimizer state by name: sharded and full, against the unsharded optimizer's and FSDP2's."""

import copy

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from fsdp2 import fsdp2
from models import Stack, full, seeded
from ranks import on_ranks
from scripts import load
from test_state_dict import FROM_RANK_0, FULL, LOCAL, ON_RANK_0, Everything, everything
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from shardc import (
    ShardTensor,
    StateDictOptions,
    fully_shard,
    get_optimizer_state_dict,
    get_state_dict,
    rekey_optimizer_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)


def step(model: nn.Module, optimizer: Optimizer, seed: int, skip: str = "") -> None:
    """A step with gradients that every rank and every model draws the same."""
    draw(model, seed, skip)
    optimizer.step()
    optimizer.zero_grad()


def draw(model: nn.Module, seed: int, skip: str = "") -> None:
    """Give every trainable parameter but `skip` a gradient."""
    for index, (name, p) in enumerate(model.named_parameters()):
        if p.requires_grad and name != skip:
            generator = torch.Generator().manual_seed(100 * seed + index)
            drawn = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            p.grad = torch.zeros_like(p)
            if isinstance(p, DTensor):
                drawn = torch.distributed.tensor.distribute_tensor(
                    drawn, p.device_mesh, p.placements
                )
            p.grad.copy_(drawn)


def adamw(model: nn.Module) -> AdamW:
    """Two parameter groups, frozen parameters among them."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": 0.02}]
    return AdamW(groups, lr=0.01)


def trained(model: nn.Module, steps: int = 2) -> tuple[nn.Module, AdamW]:
    optimizer = adamw(model)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def leaves(state: dict) -> dict[str, object]:
    """The states by `name.key`, whole."""
    return {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, entries in state["state"].items()
        for key, value in entries.items()
    }


def check_same(got: dict, want: dict) -> None:
    """Two state dicts by name: the same states and groups."""
    mine, other = leaves(got), leaves(want)
    assert mine.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(mine[name], value, msg=lambda m, name=name: f"{name}: {m}")
    assert got["param_groups"] == want["param_groups"]


def check_models(model: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = p.full_tensor() if isinstance(p, DTensor) else full(p)
        torch.testing.assert_close(whole, q.detach(), msg=lambda m, name=name: f"{name}: {m}")


# -- get ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_full_state_is_the_unsharded_one(mesh):
    plain, theirs_ = trained(seeded(Everything))
    model, ours = trained(everything(mesh, 0))
    want = theirs.get_optimizer_state_dict(plain, theirs_)
    sharded = get_optimizer_state_dict(model, ours)
    assert isinstance(sharded["state"]["square"]["exp_avg"], ShardTensor)
    assert sharded["state"]["scalar"]["step"].item() == 2 and "frozen" not in sharded["state"]
    check_same(sharded, want)
    state = get_optimizer_state_dict(model, ours, options=FULL)
    assert all(type(value) is torch.Tensor for value in leaves(state).values())
    check_same(state, want)
    first = get_optimizer_state_dict(model, ours, options=ON_RANK_0)
    if mesh.get_rank() == 0:
        check_same(first, want)
    else:
        assert first == {}
    flat = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    got = get_optimizer_state_dict(model, ours, options=flat)
    expected = theirs.get_optimizer_state_dict(
        plain, theirs_, options=theirs.StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)
    inner = get_optimizer_state_dict(model, ours, submodules={model.norm})
    assert set(inner["state"]) == {"norm.weight", "norm.bias"}
    assert inner["param_groups"][0]["params"] == ["norm.weight", "norm.bias"]


@on_ranks(2)
def test_a_given_state_dict(mesh):
    """FSDP1's `optim_state_dict(model, optim, optim_state_dict=...)`: one that was changed."""
    model, optimizer = trained(everything(mesh, 0))
    given = copy.copy(optimizer.state_dict())
    given["state"] = {k: {"mine": v["exp_avg"] * 2} for k, v in given["state"].items()}
    state = get_optimizer_state_dict(model, optimizer, options=FULL, optim_state_dict=given)
    want = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert state["state"].keys() == want["state"].keys()
    for name, entries in state["state"].items():
        assert torch.equal(entries["mine"], 2 * want["state"][name]["exp_avg"])
    with pytest.raises(ValueError, match="one optimizer, got 2"):
        get_optimizer_state_dict(model, [optimizer, optimizer], optim_state_dict=given)


UNSTEPPED = {
    "adam": lambda model: adamw(model),
    "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
    "momentum with decay": lambda model: SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
    ),
    "nadam": lambda model: torch.optim.NAdam(model.stack.parameters(), lr=0.1),
    "rprop": lambda model: torch.optim.Rprop(model.stack.parameters(), lr=0.1),
    "asgd": lambda model: torch.optim.ASGD(model.stack.parameters(), lr=0.1),
    "sgd": lambda model: SGD(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("kind", UNSTEPPED)
@on_ranks(2)
def test_an_optimizer_that_has_not_stepped(mesh, kind):
    """It gives what DCP can load into, and stays as it was, gradients and all."""
    model, plain = everything(mesh, 0), seeded(Everything)
    optimizer, reference = UNSTEPPED[kind](model), UNSTEPPED[kind](plain)
    model.square.grad = torch.ones_like(model.square)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    check_models(model, plain)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == state["param_groups"][0]["lr"]
    assert model.square.grad.to_local().sum() == model.square.to_local().numel()
    assert model.scalar.grad is None
    if kind == "sgd":
        assert state["state"] == {}
    else:
        step(plain, each := UNSTEPPED[kind](plain), 0)
        with_state = theirs.get_optimizer_state_dict(plain, each)["state"]
        assert {name: entries.keys() for name, entries in state["state"].items()} == {
            name: entries.keys() for name, entries in with_state.items()
        }
        assert "momentum" in kind or state["state"]["stack.embed.weight"]["step"] == 0
        plain.load_state_dict(seeded(Everything).state_dict())
    model.square.grad = None
    set_optimizer_state_dict(model, optimizer, state)
    for number in range(2):
        step(model, optimizer, number)
        step(plain, reference, number)
    check_models(model, plain)


# -- set ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "stepped"),
    [
        ("names", False), ("names", True), ("ids", False), ("flat", False), ("rank 0", False),
        ("sharded", False), ("sharded", True), ("fsdp2", False), ("local", False),
    ],
)  # fmt: skip
@on_ranks(2)
def test_load(mesh, way, stepped):
    """What then trains on does so as if nothing had been saved."""
    fsdp = way == "fsdp2"
    plain, reference = trained(seeded(Stack if fsdp else Everything))
    if fsdp:
        model = fully_shard(seeded(Stack, 1), mesh=mesh, units="auto")
    else:
        model = everything(mesh, 1)
    optimizer = adamw(model)
    for group in optimizer.param_groups:
        group["lr"] = 7.0
    if stepped:
        step(model, optimizer, 9)
    rank = mesh.get_rank()
    state = theirs.get_optimizer_state_dict(plain, reference)
    options = FULL
    if way == "ids":
        state = reference.state_dict()
    elif way == "flat":
        state = theirs.get_optimizer_state_dict(
            plain, reference, options=theirs.StateDictOptions(flatten_optimizer_state_dict=True)
        )
    elif way == "rank 0":
        state, options = (state if rank == 0 else {}), FROM_RANK_0
    elif way in ("sharded", "local"):
        options = LOCAL if way == "local" else None
        state = get_optimizer_state_dict(*trained(everything(mesh, 0)), options=options)
    elif fsdp:
        options = None
        state = theirs.get_optimizer_state_dict(*trained(fsdp2(seeded(Stack), mesh)))
        assert isinstance(state["state"]["head.weight"]["exp_avg"], DTensor)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    assert optimizer.param_groups[1]["lr"] == 0.02
    model.load_state_dict(plain.state_dict())
    p = model.stack.head.weight if not fsdp else model.head.weight
    assert isinstance(optimizer.state[p]["exp_avg"], ShardTensor)
    for number in range(2, 4):
        step(plain, reference, number)
        step(model, optimizer, number)
    check_models(model, plain)
    check_same(
        get_optimizer_state_dict(model, optimizer),
        theirs.get_optimizer_state_dict(plain, reference),
    )


@on_ranks(2)
def test_into_an_unsharded_optimizer_and_fsdp2(mesh):
    model, optimizer = trained(fully_shard(seeded(Stack), mesh=mesh))
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    plain, peer = seeded(Stack), fsdp2(seeded(Stack), mesh)
    values = {n: full(p) for n, p in model.named_parameters()}
    plain.load_state_dict(values)
    whole = theirs.StateDictOptions(full_state_dict=True)
    theirs.set_model_state_dict(peer, values, options=whole)
    reference, torchs = adamw(plain), adamw(peer)
    reference.load_state_dict(rekey_optimizer_state_dict(state, "ids", plain, reference))
    state = copy.deepcopy(state)  # both take tensors over as they are
    theirs.set_optimizer_state_dict(peer, torchs, state, options=whole)
    for each, opt in ((model, optimizer), (plain, reference), (peer, torchs)):
        step(each, opt, 5)
    check_models(model, plain)
    check_models(peer, plain)


@on_ranks(2)
def test_rekey(mesh):
    """Between names and ids, a tied parameter under either name, for any model."""
    plain, reference = trained(seeded(Stack, 0))
    tied = seeded(lambda: Stack(tied=True))
    _, optimizer = trained(tied)
    model, ours = trained(fully_shard(seeded(lambda: Stack(tied=True)), mesh=mesh))
    for each, opt in ((plain, reference), (tied, optimizer), (model, ours)):
        ids = opt.state_dict()
        names = rekey_optimizer_state_dict(ids, "names", each, opt)
        assert names["state"]["embed.weight"] is opt.state[each.embed.weight]
        assert ("head.weight" in names["state"]) == (each is plain)
        assert rekey_optimizer_state_dict(names, "ids", each, opt) == ids
        assert rekey_optimizer_state_dict(names, "names", each, opt) == names
        if each is not plain:
            other = {**names, "state": dict(names["state"])}
            other["state"]["head.weight"] = other["state"].pop("embed.weight")
            back = rekey_optimizer_state_dict(other, "ids", each, opt)
            assert back["state"].keys() == ids["state"].keys()
    simple = SGD(plain.parameters(), momentum=0.9)
    assert rekey_optimizer_state_dict(simple.state_dict(), "names", plain)["param_groups"][0][
        "params"
    ] == [name for name, _ in plain.named_parameters()]
    with pytest.raises(ValueError, match=r"'nobody', which is not a parameter"):
        rekey_optimizer_state_dict({"state": {"nobody": {}}, "param_groups": []}, "ids", plain)
    full_names = get_optimizer_state_dict(model, ours, options=FULL)
    swapped = {**full_names, "state": dict(full_names["state"])}
    swapped["state"]["head.weight"] = swapped["state"].pop("embed.weight")
    swapped["param_groups"] = [
        {**g, "params": ["head.weight" if n == "embed.weight" else n for n in g["params"]]}
        for g in full_names["param_groups"]
    ]
    fresh = adamw(model)
    set_optimizer_state_dict(model, fresh, swapped)
    check_same(get_optimizer_state_dict(model, fresh, options=FULL), full_names)


@on_ranks(2)
def test_named_optimizers(mesh):
    """Those that know names: `named_parameters()` given to a stock one, and torch's `_Named...`."""
    model = seeded(Stack)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    fully_shard(model, mesh=mesh)
    plain = seeded(Stack)
    reference = AdamW(plain.named_parameters())
    optimizer = AdamW(model.named_parameters())
    for each, opt in ((plain, reference), (model, optimizer)):
        step(each, opt, 0)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    check_same(state, theirs.get_optimizer_state_dict(plain, reference))
    assert state["param_groups"][0]["param_names"] == [n for n, _ in plain.named_parameters()]
    set_optimizer_state_dict(model, optimizer, state)
    assert "_checkpoint_wrapped" in "".join(optimizer.param_groups[0]["param_names"])

    from torch.distributed.optim.named_optimizer import _NamedOptimizer  # warns when imported

    named = _NamedOptimizer(model.named_parameters(), AdamW, None, model)
    named.init_state()
    assert "head.weight" in named.state_dict()["state"]
    set_optimizer_state_dict(model, named, state)
    got = get_optimizer_state_dict(model, named, options=FULL)
    assert leaves(got).keys() == leaves(state).keys()
    assert torch.equal(leaves(got)["head.weight.exp_avg"], leaves(state)["head.weight.exp_avg"])


class Odd(Optimizer):
    """States of every kind: numbers, texts, lists, nested dicts, whole matrices as large as p."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "note": "x", "pair": (1, 2)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    gram = torch.eye(p.shape[0]) if p.dim() else torch.zeros(())
                    state.update(
                        count=0, kind="odd", past=[torch.zeros_like(p)], gram=gram,
                        inner={0: {"a": torch.zeros_like(p), "b": True}},
                    )  # fmt: skip
                state["count"] += 1
                state["gram"] += 1 if group["lr"] else 0
                state["inner"][0]["a"] += p.grad
                state["past"][0] += 2 * p.grad
                p -= group["lr"] * (state["inner"][0]["a"] + state["gram"].flatten()[0])
        self.state["global"] = {"calls": self.state.get("global", {"calls": 0})["calls"] + 1}


@pytest.mark.parametrize(
    ("way", "stepped"), [("full", True), ("rank 0", False), ("sharded", False), ("sharded", True)]
)
@on_ranks(2)
def test_states_that_are_not_tensors_like_the_parameter(mesh, way, stepped):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.square = nn.Parameter(torch.randn(9, 9))
            self.rows = nn.Parameter(torch.randn(7, 3))
            self.scalar = nn.Parameter(torch.randn(()))

    plain, source = seeded(Two), fully_shard(seeded(Two), mesh=mesh)
    model = fully_shard(seeded(Two), mesh=mesh)
    reference, first, optimizer = (Odd(m.parameters()) for m in (plain, source, model))
    for each, opt in ((plain, reference), (source, first)):
        step(each, opt, 0)
    if stepped:
        step(model, optimizer, 9)
    options = {"full": FULL, "rank 0": FROM_RANK_0, "sharded": None}[way]
    state = get_optimizer_state_dict(source, first, options=None if way == "sharded" else FULL)
    assert state["state"]["square"]["kind"] == "odd" and state["state"]["global"] == {"calls": 1}
    assert state["param_groups"][0]["pair"] == (1, 2)
    if way == "rank 0" and mesh.get_rank():
        state = {}
    set_optimizer_state_dict(model, optimizer, state, options=options)
    mine = optimizer.state[model.square]
    assert isinstance(mine["inner"][0]["a"], ShardTensor) and isinstance(
        mine["past"][0], ShardTensor
    )
    assert type(mine["gram"]) is torch.Tensor and mine["gram"].shape == (9, 9)
    assert mine["count"] == 1 and optimizer.state["global"] == {"calls": 1}
    assert isinstance(optimizer.state[model.scalar]["inner"][0]["a"], ShardTensor)
    model.load_state_dict(plain.state_dict())
    for each, opt in ((plain, reference), (model, optimizer)):
        step(each, opt, 1)
    check_models(model, plain)


@on_ranks(2)
def test_several_optimizers_unused_and_frozen_parameters(mesh):
    """A parameter that no step used has no state, before and after."""
    models = [seeded(Stack), fully_shard(seeded(Stack), mesh=mesh, units="auto")]
    pairs = []
    for model in models:
        model.head.weight.requires_grad_(False)
        one, two = AdamW(model.layers.parameters()), SGD(model.embed.parameters(), momentum=0.9)
        three = AdamW([model.head.weight])
        for opt in (one, two):
            step(model, opt, 0, skip="layers.0.up.weight")
        pairs.append((one, two, three))
    (plain, model), (theirs_, ours) = models, pairs
    state = get_optimizer_state_dict(model, ours[:2], options=FULL)
    assert "layers.0.up.weight" not in state["state"] and "embed.weight" in state["state"]
    check_same(state, theirs.get_optimizer_state_dict(plain, theirs_[:2]))
    fresh = AdamW(model.layers.parameters()), SGD(model.embed.parameters(), momentum=0.9)
    set_optimizer_state_dict(model, fresh, state, options=FULL)
    check_same(get_optimizer_state_dict(model, fresh, options=FULL), state)
    assert model.layers[0].up.weight not in fresh[0].state
    frozen = get_optimizer_state_dict(model, ours[2])
    assert frozen["state"] == {} and frozen["param_groups"][0]["params"] == ["head.weight"]
    set_optimizer_state_dict(model, ours[2], frozen)


@on_ranks(2)
def test_what_does_not_fit_is_named_on_all_ranks_before_anything_changes(mesh):
    model, optimizer = trained(everything(mesh, 0))
    good = get_optimizer_state_dict(model, optimizer, options=FULL)
    plain, rank = seeded(Everything), mesh.get_rank()
    wrong = copy.deepcopy(good)
    wrong["state"]["square"]["exp_avg"] = torch.ones(3)
    without = copy.deepcopy(good)
    without["param_groups"][0]["params"].remove("scalar")
    without["param_groups"][1]["params"].remove("square")
    mixed = copy.deepcopy(good)
    mixed["param_groups"].append({**good["param_groups"][0], "params": ["scalar"], "lr": 3.0})
    mixed["param_groups"][0]["params"].remove("scalar")
    cases = {
        r"size mismatch for 'square.exp_avg': it has shape \(9, 9\), got \(3,\)": wrong,
        r"no parameter group has 'scalar' \(2 in all": without,
        "parameter group 0 takes parameters from groups with lr=3.0 .'scalar'": mixed,
        "the optimizer state dict is empty": {},
    }
    for message, bad in cases.items():
        for given, options in ((bad, FULL), (bad, FROM_RANK_0), (good if rank else bad, FULL)):
            with pytest.raises(RuntimeError, match=message):
                set_optimizer_state_dict(model, optimizer, given, options=options)
            with pytest.raises(RuntimeError, match=message):
                set_state_dict(
                    model,
                    optimizer,
                    model_state_dict=plain.state_dict(),
                    optim_state_dict=given,
                    options=options,
                )
    check_same(get_optimizer_state_dict(model, optimizer, options=FULL), good)
    with pytest.raises(AssertionError):
        check_models(model, plain)
    loose = theirs.StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer, without, options=loose)
    stranger = SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer, of shape \(2,\), is not"):
        get_optimizer_state_dict(model, stranger)
    _, same = get_state_dict(model, optimizer, options=FULL)
    set_state_dict(
        model, optimizer, model_state_dict=plain.state_dict(), optim_state_dict=same, options=FULL
    )
    check_models(model, plain)


@on_ranks(2)
def test_the_muon_of_the_examples(mesh):
    """An optimizer that needs whole matrices: full tensor in, shard out."""
    muon = load("examples/muon.py")
    plain, model = seeded(Stack), fully_shard(seeded(Stack), mesh=mesh, units="auto")

    def optimizers(each):
        matrices = [p for p in each.parameters() if p.dim() == 2]
        return muon.Muon(matrices), AdamW(p for p in each.parameters() if p.dim() != 2)

    reference, ours = optimizers(plain), optimizers(model)
    for number in range(2):
        for each, pair in ((plain, reference), (model, ours)):
            draw(each, number)
            for opt in pair:
                opt.step()
    check_models(model, plain)
    state = get_optimizer_state_dict(model, ours, options=ON_RANK_0)
    want = theirs.get_optimizer_state_dict(plain, reference)
    if mesh.get_rank() == 0:
        check_same(state, want)
    fresh = optimizers(model)
    set_optimizer_state_dict(model, fresh, state, options=FROM_RANK_0)
    momentum = fresh[0].state[model.head.weight]["momentum"]
    assert isinstance(momentum, ShardTensor)
    for each, pair in ((plain, reference), (model, fresh)):
        draw(each, 2)
        for opt in pair:
            opt.step()
    check_models(model, plain)
