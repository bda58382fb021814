"""The tables of docs/optimizers.md: what shardc and FSDP2 give, beside an unsharded run.

    python benchmarks/tables.py         # prints them, a minute; needs the extra `test`
    python benchmarks/tables.py --write # puts them into the page

Two processes with gloo train the same parameters with the same gradients, and run the same ops on
the same parameter. "equal" is to 1e-5 of the largest value, after five steps.
"""

import datetime
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.optim as eight_bit
import pytorch_optimizer as more
import torch
import torch.distributed as dist
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
    "Kron": (more.Kron, {"lr": 0.05}, True),
    "Prodigy": (more.Prodigy, {"lr": 1.0}, True),
    "StableAdamW": (more.StableAdamW, {"lr": 0.05}, True),
    "LARS": (more.LARS, {"lr": 0.05}, True),
    "LAMB": (more.Lamb, {"lr": 0.05}, True),
}

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
        torch.manual_seed(0)
        plain = Some()
        wanted = _trained(plain, make(plain.parameters(), **settings))

        def ours(make: Any = make, settings: Any = settings, is_whole: bool = is_whole) -> Any:
            torch.manual_seed(0)
            model = shardc.fully_shard(Some(), mesh=mesh)
            if is_whole:
                return _trained(
                    model, shardc.WholeTensorOptimizer(make, model.parameters(), **settings)
                )
            return _trained(model, make(model.parameters(), **settings))

        def theirs(make: Any = make, settings: Any = settings) -> Any:
            torch.manual_seed(0)
            model = fsdp2(Some(), mesh=mesh)
            return _trained(model, make(model.parameters(), **settings))

        how = "`WholeTensorOptimizer`" if is_whole else "as it is"
        rows.append([name, how, _outcome(ours, wanted), _outcome(theirs, wanted)])
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


def _rank(rank: int, store: str, into: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout
    )
    mesh = init_device_mesh("cpu", (2,))
    with torch.compiler.set_stance("force_eager"):
        optimizers, ops = optimizer_rows(mesh), op_rows(mesh)
    if rank == 0:
        tables = [
            tabulate(optimizers, ["optimizer", "how", "shardc", "FSDP2"], "pipe"),
            tabulate(ops, ["op", "shardc", "FSDP2"], "pipe"),
        ]
        Path(into).write_text("\n\n".join(tables) + "\n")
    dist.destroy_process_group()


def tables() -> str:
    """Both, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        into = f"{folder}/tables"
        torch.multiprocessing.spawn(_rank, (f"{folder}/store", into), nprocs=2)
        return Path(into).read_text()


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
