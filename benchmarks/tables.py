"""The tables of docs/optimizers.md: what shardc and FSDP2 give, beside an unsharded run.

    python benchmarks/tables.py         # prints them, minutes; needs the extra `test`
    python benchmarks/tables.py --write # puts them into the page

Processes with gloo train the same parameters with the same gradients, run the same ops on the same
parameter, train weights of tensor subclasses (`table_of_subclasses`), and count what optimizers
keep (`table_of_state`). "equal" is to 1e-5 of the largest value, after five steps.
"""

import datetime
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes.optim as eight_bit
import heavyball
import pytorch_optimizer as more
import torch
import torch.distributed as dist
from table_of_state import WORLDS, state_cells
from table_of_subclasses import subclass_rows
from tabulate import tabulate
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

import shardc

PAGE = Path(__file__).parent.parent / "docs" / "optimizers.md"
BEGIN, END = "<!-- benchmarks/tables.py: begin -->", "<!-- benchmarks/tables.py: end -->"
SHAPES = {"a": (12, 20), "b": (9, 7), "c": (64, 64), "d": (5, 3)}
STEPS = 5

# name: (class, settings, whether shardc needs WholeTensorOptimizer)
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9}, False),
    "Adam": (optim.Adam, {"lr": 0.05}, False),
    "AdamW": (optim.AdamW, {"lr": 0.05}, False),
    "Adagrad": (optim.Adagrad, {"lr": 0.05}, False),
    "RMSprop": (optim.RMSprop, {"lr": 0.05}, False),
    "Rprop": (optim.Rprop, {"lr": 0.05}, False),
    "AdamW8bit (torchao)": (AdamW8bit, {"lr": 0.05}, False),
    "AdamW4bit (torchao)": (AdamW4bit, {"lr": 0.05}, False),
    "AdamWFp8 (torchao)": (AdamWFp8, {"lr": 0.05}, False),
    "AdamW8bit (bitsandbytes)": (eight_bit.AdamW8bit, {"lr": 0.05, "min_8bit_size": 256}, True),
    "Muon": (optim.Muon, {"lr": 0.05}, True),
    "Adafactor": (optim.Adafactor, {"lr": 0.05}, True),
    "Shampoo": (more.Shampoo, {"lr": 0.05}, True),
    "SOAP": (more.SOAP, {"lr": 0.05, "precondition_frequency": 2}, True),
    "CAME": (more.CAME, {"lr": 0.05}, True),
    "AdamMini": (more.AdamMini, {"lr": 0.05, "num_embeds": 4, "num_heads": 2}, True),
    "Kron": (more.Kron, {"lr": 0.05}, True),
    "Prodigy": (more.Prodigy, {"lr": 1.0}, True),
    "StableAdamW": (more.StableAdamW, {"lr": 0.05}, True),
    "LARS": (more.LARS, {"lr": 0.05}, True),
    "LAMB": (more.Lamb, {"lr": 0.05}, True),
    "Muon (heavyball)": (heavyball.Muon, {"lr": 0.05}, True),
    "SOAP (heavyball)": (heavyball.SOAP, {"lr": 0.05}, True),
    "PSGDKron (heavyball)": (heavyball.PSGDKron, {"lr": 0.05}, True),
}

TAKE_MODEL = ("AdamMini",)
"""Optimizers that are given the model in place of its parameters."""

OPS: dict[str, Callable[[Tensor], Any]] = {
    "p.sum()": lambda p: p.sum(),
    "p.mean(0)": lambda p: p.mean(0),
    "p.std()": lambda p: p.std(),
    "p.var(1)": lambda p: p.var(1),
    "p.norm(dim=1)": lambda p: p.norm(dim=1),
    "p.max()": lambda p: p.max(),
    "p.amin(0)": lambda p: p.amin(0),
    "p.abs().max()": lambda p: p.abs().max(),
    "p.count_nonzero()": lambda p: p.count_nonzero(),
    "p.isnan().any()": lambda p: p.isnan().any(),
    "torch.equal(p, p * 1)": lambda p: torch.equal(p, p * 1),
    "torch.allclose(p, p + 1)": lambda p: torch.allclose(p, p + 1),
    "p.t() @ p": lambda p: p.t() @ p,
    "p[::2]": lambda p: p[::2],
    "p[:, 1]": lambda p: p[:, 1],
    "p.flatten().sort()": lambda p: p.flatten().sort().values,
    "torch.linalg.svdvals(p)": lambda p: torch.linalg.svdvals(p),
}


class Some(nn.Module):
    """Parameters that ranks do not divide evenly, and one that is large."""

    def __init__(self) -> None:
        super().__init__()
        for index, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(_drawn(shape, index)))


def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _whole(value: Any) -> Any:
    if isinstance(value, (DTensor, shardc.ShardTensor)):
        return value.full_tensor().detach()
    return value.detach() if isinstance(value, Tensor) else value


def _trained(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The parameters after `STEPS` steps with gradients that are equal for all kinds."""
    for step in range(STEPS):
        for index, p in enumerate(model.parameters()):
            full = _drawn(tuple(p.shape), 100 * step + index)
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(full, p.device_mesh, p.placements)
            else:
                p.grad = torch.zeros_like(p).copy_(full)
        optimizer.step()
    return [_whole(p) for p in model.parameters()]


def _outcome(run: Callable[[], list[Any]], wanted: list[Any]) -> str:
    """What a run gives, in a word or two."""
    try:
        found = run()
    except Exception as error:
        return f"`{type(error).__name__}`"
    off = 0.0
    for a, b in zip(found, wanted, strict=True):
        a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
        if a.shape != b.shape:
            return f"shape {tuple(a.shape)} for {tuple(b.shape)}"
        off = max(off, ((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item())
    return "equal" if off <= 1e-5 else f"off by {off:.0e}"


def optimizer_rows(mesh: Any) -> list[list[str]]:
    """A row for each optimizer: name, how shardc runs it, what shardc and FSDP2 give."""
    rows = []
    for name, (make, settings, is_whole) in OPTIMIZERS.items():

        def trained(
            shard: Callable[[nn.Module], nn.Module],
            make: Any = make,
            settings: dict[str, Any] = settings,
            takes_model: bool = name in TAKE_MODEL,
        ) -> list[Tensor]:
            torch.manual_seed(0)
            model = shard(Some())
            return _trained(model, make(model if takes_model else model.parameters(), **settings))

        wanted = trained(lambda model: model)
        whole = partial(shardc.WholeTensorOptimizer, make) if is_whole else make
        cells = [
            _outcome(partial(trained, partial(shardc.fully_shard, mesh=mesh), whole), wanted),
            _outcome(partial(trained, partial(fsdp2, mesh=mesh)), wanted),
        ]
        rows.append([name, "`WholeTensorOptimizer`" if is_whole else "as it is", *cells])
    return rows


def op_rows(mesh: Any) -> list[list[str]]:
    """A row for each op: the op, what shardc and FSDP2 give."""
    plain, ours, theirs = Some(), shardc.fully_shard(Some(), mesh=mesh), fsdp2(Some(), mesh=mesh)
    rows = []
    for name, op in OPS.items():
        wanted = [_whole(op(plain.a.detach()))]
        cells = [
            _outcome(lambda p=model.a, op=op: [_whole(op(p.detach()))], wanted)
            for model in (ours, theirs)
        ]
        rows.append([f"`{name}`", *cells])
    return rows


def _rank(rank: int, world: int, store: str, into: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {}
    with torch.compiler.set_stance("force_eager"):
        found["state"] = state_cells(mesh)
        if world == WORLDS[0]:
            found |= {"optimizers": optimizer_rows(mesh), "ops": op_rows(mesh)}
    if world == WORLDS[0]:
        found["subclasses"] = subclass_rows(mesh)
    if rank == 0:
        Path(into).write_text(json.dumps(found))
    dist.destroy_process_group()


def tables() -> str:
    """All, as Markdown."""
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            into = f"{folder}/tables{world}"
            arguments = (world, f"{folder}/store{world}", into)
            torch.multiprocessing.spawn(_rank, arguments, nprocs=world)
            found[world] = json.loads(Path(into).read_text())
    first = found[WORLDS[0]]
    state = [
        [name, how, *(found[world]["state"][name][1] for world in WORLDS)]
        for name, (how, _) in first["state"].items()
    ]
    made = [
        (first["optimizers"], ["optimizer", "how", "shardc", "FSDP2"]),
        (state, ["state of", "how", *(f"W={world}" for world in WORLDS)]),
        (first["ops"], ["op", "shardc", "FSDP2"]),
        (first["subclasses"], ["subclass", "compared with", "uncompiled", "compiled"]),
    ]
    return (
        "\n\n".join(tabulate(rows, head, "pipe", disable_numparse=True) for rows, head in made)
        + "\n"
    )


def main() -> None:
    """Print them, or write them."""
    made = tables()
    if "--write" not in sys.argv[1:]:
        print(made, end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{made}{END}{after}")


if __name__ == "__main__":
    main()
