"""Operations around a training step: the table of which `test_operations` tries each row.

    PYTHONPATH=tests python -m operations          # prints the page docs/guides/around_a_step.md
    PYTHONPATH=tests python -m operations --write  # writes it

The operations of a group run between the steps of a plain model and of a sharded one. Both must
give the same gradients and parameters; or the sharded side must refuse it in the words of the row,
and train on as if it had not been asked.
"""

import copy
import io
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from models import full, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn.utils import parametrize, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardc import fully_shard

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "around_a_step.md"
WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.up(x).relu()


class Model(nn.Module):
    """Layers and a head; `beside(self, x)` is a term of the loss that the forward adds."""

    beside: Callable[[nn.Module, Tensor], Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head, self.twin = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        loss = (self.head(y) + self.twin(y)).square().mean()
        return loss if self.beside is None else loss + self.beside(x)


@dataclass
class Side:
    """One of the two models, as an operation finds and leaves it.

    Attributes:
        model, optimizer: what is trained.
        x: a rank's batch; on the plain side operations that compute with one see that of each rank.
        seen: whole values that must be equal on both sides.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    x: Tensor
    seen: list[Tensor] = field(default_factory=list)

    @property
    def is_sharded(self) -> bool:
        return any(isinstance(p, DTensor) for p in self.model.parameters())

    def whole(self) -> dict[str, Tensor]:
        """The parameters by name, plain copies."""
        return {name: full(p).clone() for name, p in self.model.named_parameters()}

    def restart(self) -> None:
        """A new optimizer for the parameters that the model has now."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


Run = Callable[[Side], object]


@dataclass(frozen=True)
class Operation:
    """A row.

    Attributes:
        group, name: the operation, as the page has it.
        run: does it.
        refused: what the error of the sharded side says; "": both sides are equal.
        note: one sentence for the page.
        beside: what the model's forward adds, for operations inside of it.
        early: whether it comes before the first step.
        last: whether the model is of no use after it.
    """

    group: str
    name: str
    run: Run = lambda side: None
    refused: str = ""
    note: str = ""
    beside: Callable[[nn.Module, Tensor], Tensor] | None = None
    early: bool = False
    last: bool = False


# -- copying ---------------------------------------------------------------------------------------


def _deepcopy(side: Side) -> None:
    original, side.model = side.model, copy.deepcopy(side.model)
    with torch.no_grad():
        for p in original.parameters():
            p.zero_()
    side.restart()


def _average(side: Side) -> None:
    averaged = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        averaged.update_parameters(side.model)
        with torch.no_grad():
            for p in side.model.parameters():
                p.mul_(0.5)
    with torch.no_grad():
        side.seen.append(averaged(side.x))


def _copy_of_a_layer(side: Side) -> None:
    layer = copy.deepcopy(side.model.layers[0])
    with torch.no_grad():
        layer.up.weight.mul_(2.0)
        side.seen += [layer(side.x), side.model.layers[0](side.x)]


# -- other values ----------------------------------------------------------------------------------


def _functional(pick: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Run:
    def run(side: Side) -> None:
        given = pick({name: p.detach() * 0.5 for name, p in side.model.named_parameters()})
        with torch.no_grad():
            side.seen.append(functional_call(side.model, given, (side.x,)))
            side.seen.append(side.model(side.x))

    return run


def _transform(side: Side) -> None:
    def loss(values: dict[str, Tensor]) -> Tensor:
        return functional_call(side.model, values, (side.x,))

    side.seen += torch.func.grad(loss)(side.whole()).values()


def _assign_data(side: Side) -> None:
    for p in side.model.parameters():
        p.data = p.data * 0.5


def _assign_parameter(side: Side) -> None:
    side.model.layers[0].up.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25))
    side.restart()


def _write(side: Side) -> None:
    with torch.no_grad():
        for p in side.model.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape) / p.numel() / WIDTH)
        side.model.head.weight[2:5] = 0.1
        side.model.head.weight[:, 1] = 0.2


def _swap(side: Side) -> None:
    torch.utils.swap_tensors(side.model.head.weight, nn.Parameter(torch.ones(WIDTH, WIDTH)))


def _tie(side: Side) -> None:
    side.model.twin.weight = side.model.head.weight
    side.seen.append(torch.tensor(len(list(side.model.parameters()))))
    assert side.model.twin.weight is side.model.head.weight
    side.restart()


def _untie(side: Side) -> None:
    side.model.twin.weight = side.model.head.weight
    side.model.twin.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


# -- saving and loading ----------------------------------------------------------------------------


def _save_and_load(side: Side) -> None:
    file = io.BytesIO()
    torch.save(side.model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in side.model.parameters():
            p.zero_()
    side.model.load_state_dict(torch.load(file))


def _load(make: Callable[[Tensor, Tensor], Tensor], assign: bool) -> Run:
    def run(side: Side) -> None:
        state = side.model.state_dict()
        values = {name: full(value) * 0.8 for name, value in state.items()}
        made = {
            name: make(value, state[name]) if side.is_sharded else value
            for name, value in values.items()
        }
        side.model.load_state_dict(made, assign=assign)
        side.restart()

    return run


def _like(value: Tensor, p: Tensor) -> Tensor:
    assert isinstance(p, DTensor)
    return distribute_tensor(value, p.device_mesh, p.placements)


def _by_rows(value: Tensor, p: Tensor) -> Tensor:
    assert isinstance(p, DTensor)
    return distribute_tensor(value, p.device_mesh, [Shard(0)])


def _torchs_state(side: Side) -> None:
    whole = StateDictOptions(full_state_dict=True)
    side.seen += [v.clone() for v in get_model_state_dict(side.model, options=whole).values()]


def _export_by_hand(side: Side) -> None:
    for value in side.model.state_dict().values():
        side.seen.append(value.full_tensor() if isinstance(value, DTensor) else value.clone())


# -- parts and gradients by hand -------------------------------------------------------------------


def _grads(side: Side) -> list[Tensor]:
    side.optimizer.zero_grad()
    x = side.x.new_ones(side.x.shape)  # alike on all ranks
    side.model(x).backward()
    return [p.grad for p in side.model.parameters() if p.grad is not None]


def _norm_by_hand(side: Side) -> None:
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in _grads(side)]
    total = torch.stack([part.square().sum() for part in parts]).sum()
    if side.is_sharded:
        dist.all_reduce(total)
    side.seen.append(total.sqrt())


def _clip(side: Side) -> None:
    _grads(side)
    total = nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)
    side.seen.append(total.full_tensor() if hasattr(total, "full_tensor") else total)
    side.seen += [full(p.grad) for p in side.model.parameters()]


def _statistics(side: Side) -> None:
    for p in side.model.parameters():
        side.seen += [
            p.sum(), p.detach().norm(), p.abs().max(), p.mean(0), p.reshape(-1)[1:3].sum(),
        ]  # fmt: skip


def _redistribute(side: Side) -> None:
    weight = side.model.head.weight.detach()
    placed = weight.redistribute(placements=[Replicate()]) if side.is_sharded else weight
    side.seen.append((placed.to_local() if side.is_sharded else placed).clone())


# -- hooks, flags and optimizers -------------------------------------------------------------------


def _hooks(side: Side) -> None:
    side.model.layers[0].register_forward_hook(lambda module, args, out: out * 2)
    side.model.head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    side.model.head.weight.register_hook(lambda grad: grad * 3)


def _freeze(side: Side) -> None:
    side.model.head.weight.requires_grad_(False)
    side.model.layers[0].requires_grad_(False)
    side.model.layers[0].requires_grad_(True)
    side.optimizer.zero_grad()


def _double(side: Side) -> None:
    side.model.double()
    side.x = side.x.double()
    side.restart()


def _add_group(side: Side) -> None:
    head, *others = reversed(list(side.model.parameters()))
    side.optimizer = torch.optim.SGD(others, lr=0.1)
    side.optimizer.add_param_group({"params": [head], "lr": 0.5})


def _set_gradients(side: Side) -> None:
    for p in side.model.parameters():
        p.grad = torch.ones_like(p) if p.dim() > 1 else None
    side.optimizer.step()


def _replace(side: Side) -> None:
    side.model.twin = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.ones_(side.model.twin.weight)
    side.restart()
    side.model(side.x).backward()
    side.optimizer.step()


def _share(side: Side) -> None:
    side.model.layers[1] = side.model.layers[0]
    side.restart()


# -- in the forward --------------------------------------------------------------------------------


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    return x.mean() * sum(p.square().sum() for p in model.parameters())


def _ways_to_read(model: nn.Module, x: Tensor) -> Tensor:
    named = dict(model.named_parameters())
    value = named["head.weight"] + model.head._parameters["weight"]
    value = value + model.get_parameter("head.weight") + model.head.weight
    if hasattr(model.head, "weight") and getattr(model.head, "bias", None) is None:
        value = value * 2
    if isinstance(model.head.weight, nn.Parameter):
        value = value * 2
    return (x @ value).square().mean() / 1000


class Fused(torch.autograd.Function):
    """A linear layer and its sum, whose gradients are made in the forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight.T
        ctx.save_for_backward(torch.ones_like(y) @ weight, torch.ones_like(y).T @ x)
        return y.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_weight = ctx.saved_tensors
        return grad * of_x, grad * of_weight


def _writes(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    return x.mean()


OPERATIONS = [
    Operation("Copies", "`copy.deepcopy(model)`, also compiled", _deepcopy),
    Operation("Copies", "`AveragedModel(model)`, updated and called", _average),
    Operation("Copies", "`copy.deepcopy` of a block", _copy_of_a_layer),
    Operation("Other values", "`functional_call` with sharded tensors", _functional(dict)),
    Operation(
        "Other values",
        "`functional_call` with whole tensors",
        _functional(lambda given: {name: full(value) for name, value in given.items()}),
    ),
    Operation(
        "Other values",
        "`functional_call` with one tensor",
        _functional(lambda given: {"head.weight": given["head.weight"]}),
    ),
    Operation("Other values", "`torch.func.grad` over whole tensors", _transform),
    Operation("Other values", "`p.data = value`", _assign_data),
    Operation("Other values", "`module.weight = nn.Parameter(value)`", _assign_parameter),
    Operation("Other values", "`p.copy_(value)`, `p[2:5] = value`", _write),
    Operation(
        "Other values",
        "`torch.utils.swap_tensors(p, q)`",
        _swap,
        r"swap_tensors of parameter 'head.weight'",
        "Write values by `p.copy_(full_tensor)`.",
    ),
    Operation("Ties", "`b.weight = a.weight` after `fully_shard`", _tie, early=True),
    Operation(
        "Ties",
        "untying",
        _untie,
        "shared by 2 modules",
        "Untie before `fully_shard`.",
        early=True,
    ),
    Operation(
        "Saving",
        "`torch.save(model.state_dict())`, each rank its own file",
        _save_and_load,
        note="A file loads on its rank and at its number of ranks.",
    ),
    Operation("Saving", "`get_model_state_dict(full_state_dict=True)` of torch", _torchs_state),
    Operation("Saving", "`p.full_tensor() if isinstance(p, DTensor)`", _export_by_hand),
    Operation(
        "Saving",
        "safetensors, NumPy, dlpack of a sharded value",
        lambda side: safetensors.torch.save({"p": side.model.head.weight.detach()}),
        "one rank holds only a part",
        "Give them whole values.",
    ),
    Operation(
        "Saving",
        "`torch.save(model)`, pickling",
        lambda side: torch.save(side.model, io.BytesIO()),
        "cannot be pickled",
        "Save a state dict.",
    ),
    Operation(
        "Saving",
        "`torch.export`, `torch.jit.trace`, `torch.jit.script`",
        lambda side: torch.jit.trace(side.model, side.x),
        "torch.jit.trace cannot trace the sharded",
        "Export an unsharded copy.",
    ),
    *(
        Operation(
            "Loading",
            f"`load_state_dict({'assign=True' if assign else ''})` of {what}",
            _load(make, assign),
        )
        for what, make in [
            ("whole values", lambda value, p: value),
            ("values by `distribute_tensor(v, p.device_mesh, p.placements)`", _like),
            ("DTensors with `Shard(0)`", _by_rows),
        ]
        for assign in (False, True)
    ),
    Operation("By hand", "a norm: `to_local()` parts, squared, all-reduced", _norm_by_hand),
    Operation("By hand", "`clip_grad_norm_(...).full_tensor()`", _clip),
    Operation("By hand", "`p.sum()`, `p.norm()`, `p.mean(0)`, slices", _statistics),
    Operation("By hand", "`p.redistribute(placements=[Replicate()])`", _redistribute),
    Operation("Hooks, flags, optimizers", "hooks of modules, of gradients", _hooks, early=True),
    Operation("Hooks, flags, optimizers", "freezing and unfreezing", _freeze),
    Operation("Hooks, flags, optimizers", "`model.double()`", _double),
    Operation("Hooks, flags, optimizers", "`add_param_group`", _add_group),
    Operation("Hooks, flags, optimizers", "`p.grad = value`, None", _set_gradients),
    Operation(
        "Modules",
        "a parametrization that is added",
        lambda s: parametrize.register_parametrization(s.model.head, "weight", nn.GELU()),
        "cannot be reparametrized",
        "Add it before `fully_shard`.",
    ),
    Operation(
        "Modules",
        "`weight_norm`, pruning",
        lambda side: weight_norm(side.model.head),
        "cannot be reparametrized",
        "Add it before `fully_shard`.",
    ),
    Operation(
        "Modules",
        "a submodule that is replaced by a plain one",
        _replace,
        r"'twin\.weight' came into the sharded Model after fully_shard",
        "Call `fully_shard` on the new one.",
        last=True,
    ),
    Operation("Modules", "a submodule that is shared", _share, early=True),
    Operation(
        "In the forward",
        "a sum over `self.parameters()`, times something of the batch",
        beside=_penalty,
    ),
    Operation(
        "In the forward",
        "`named_parameters()`, `_parameters`, `get_parameter`, `hasattr`, `isinstance`",
        beside=_ways_to_read,
    ),
    Operation(
        "In the forward",
        "an `autograd.Function` of a parameter",
        beside=lambda model, x: Fused.apply(x, model.head.weight) / 100,
    ),
    Operation(
        "In the forward",
        "a write to the module's own parameter",
        lambda side: side.model(side.x),
        "in place|writes to",
        "Write between steps.",
        beside=_writes,
        early=True,
    ),
]


SERIES: dict[str, list[Operation]] = {}
"""The rows that one model goes through, a step after each: what is early or last is alone."""
for _row in OPERATIONS:
    SERIES.setdefault(_row.name if _row.early or _row.last else _row.group, []).append(_row)


# -- trying ----------------------------------------------------------------------------------------


def try_series(mesh: DeviceMesh, way: str, name: str, **tolerances: float) -> None:
    """Train both models through the rows of `SERIES[name]`; raise where they part.

    Args:
        way: "uncompiled", "blocks", or the executor that the whole model is compiled with.
        tolerances: `rtol` and `atol` of `torch.testing.assert_close`.
    """
    rows, rank = SERIES[name], mesh.get_local_rank()
    besides = [row.beside for row in rows if row.beside]

    def beside(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([each(model, x) for each in besides]).sum()

    plain, model = (seeded(Model).to(mesh.device_type) for _ in range(2))
    for each in (plain, model) if besides else ():
        each.beside = beside.__get__(each)
    _shard(model, mesh, way)
    batches = [_batch(r).to(mesh.device_type) for r in range(mesh.size())]
    sides = [
        Side(m, torch.optim.SGD(m.parameters(), lr=0.1), batches[rank].clone())
        for m in (model, plain)
    ]
    before = full(plain.head.weight).clone()
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=64):
        warnings.simplefilter("ignore", UserWarning)
        got = _run(sides[0], rows, [batches[rank]])
        if not got:
            return
        want = _run(sides[1], rows, batches)
    assert not torch.equal(want["after"][-2].to(before.dtype), before), "nothing was trained"
    for row, values in want.items():
        largest = max((b.abs().max().item() for b in values), default=0.0)
        assert largest < 1e3, f"{row} diverges to {largest}: on other CPUs it would round otherwise"
        for index, (a, b) in enumerate(zip(got[row], values, strict=True)):
            message = partial("{}, value {}: {}".format, row, index)
            torch.testing.assert_close(a, b, **tolerances, msg=message)


def _batch(rank: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(rank)
    return torch.randn(4, WIDTH, generator=generator, device="cpu") + rank


def _shard(model: Model, mesh: DeviceMesh, way: str) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if way == "blocks":
        for layer in model.layers:
            layer.compile(backend="shardc", options={"executor": "eager"})
    elif way != "uncompiled":
        model.compile(backend="shardc", options={"executor": way})


def _step(side: Side, batches: list[Tensor]) -> list[Tensor]:
    """A step on the mean over `batches`: every gradient."""
    side.optimizer.zero_grad()
    for x in batches:
        loss = side.model(x.to(side.x.dtype))
        (loss / len(batches)).backward()
    grads = [p.grad for p in side.model.parameters()]
    side.optimizer.step()
    return [torch.zeros(()) if g is None else full(g).clone() for g in grads]


def _run(side: Side, rows: list[Operation], batches: list[Tensor]) -> dict[str, list[Tensor]]:
    """What each row and the steps around it give, by the row's name."""
    found = {"before": [] if rows[0].early else _step(side, batches)}
    for row in rows:
        side.seen.clear()
        if not row.refused:
            row.run(side)
        elif side.is_sharded:
            _check_refusal(side, row)
            if row.early or row.last:
                return {}
        found[row.name] = [full(value).detach() for value in side.seen] + _step(side, batches)
    found["after"] = [*_step(side, batches), *side.whole().values()]
    return found


def _check_refusal(side: Side, row: Operation) -> None:
    try:
        row.run(side)
    except (RuntimeError, NotImplementedError) as error:
        assert re.search(row.refused, str(error)), f"{row.name}: {error}"
        return
    raise AssertionError(f"{row.name} is not refused")


# -- the page --------------------------------------------------------------------------------------


def page() -> str:
    """The page of the documentation."""
    lines = [
        "# Around a step",
        "",
        "Training code copies models, ties, loads, saves and takes norms between steps. Each row",
        "was tried on a plain and on a sharded model, uncompiled, compiled block by block, and",
        "whole: both sides then train alike, every gradient compared; or the sharded model refuses",
        "it at the call and says what to do. `tests/operations.py` is the table.",
        "",
    ]
    for group in dict.fromkeys(row.group for row in OPERATIONS):
        lines += [f"## {group}", "", "| operation | sharded |", "|---|---|"]
        for row in OPERATIONS:
            if row.group == group:
                says = "as unsharded" if not row.refused else "refused"
                lines.append(f"| {row.name} | {says}{'. ' + row.note if row.note else ''} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        print(page())
