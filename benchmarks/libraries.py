"""The table of docs/integrations/index.md: what the loops of five libraries give on two ranks.

    python benchmarks/libraries.py         # prints it, minutes; needs the extra `test`
    python benchmarks/libraries.py --write # puts it into the page

The loops are those of the tests (tests/loops.py). "yes" is: every parameter equal to one process
after four steps (1e-3, in float16 2% of the way); equal to the last bit where training resumes; and
equal to the last bit where the library's export is read back. A library shards by FSDP2 on CPUs or
the cell says why it was not tried.
"""

import datetime
import itertools
import logging
import os
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from loops import LOOPS, Run, Words, adapted, plain_run, quiet
from models import seeded
from ranks import free_port

import shardc

PAGE = Path(__file__).parent.parent / "docs" / "integrations" / "index.md"
BEGIN, END = "<!-- benchmarks/libraries.py: begin -->", "<!-- benchmarks/libraries.py: end -->"
GRID, SCALER = "test_trains_resumes_and_exports", "test_float16_with_a_scaler"
FEATURES = {
    "trains as one process": GRID,
    "the same, compiled": GRID,
    "resumes to the last bit": GRID,
    "exports": GRID,
    "float16 with a scaler": SCALER,
}
"""Each with its test in tests/test_integrations.py."""

NOT_TRIED = {
    ("Trainer", True): "not tried: accelerate has it on accelerators only",
    ("accelerate", True): "not tried: accelerate has it on accelerators only",
}
NO_LOOP = {("PEFT", "float16 with a scaler"): "the loop is yours"}


def _whole(value: Any) -> torch.Tensor:
    sharded = isinstance(value, (DTensor, shardc.ShardTensor))
    return (value.full_tensor() if sharded else value).detach().clone()


def _ran(library: str, run: Run) -> tuple[dict[str, torch.Tensor], Any]:
    with quiet():
        params, exported = LOOPS[library](run)
    values = {name: _whole(param) for name, param in params.items()}
    dist.barrier()
    return values, exported


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    equal = all(torch.equal(_whole(found[name]), value) for name, value in wanted.items())
    return "yes" if found.keys() == wanted.keys() and equal else "differs"


def _near(found: dict[str, Any], wanted: dict[str, Any], start: dict[str, Any], part: float) -> str:
    moved = {name: (wanted[name] - start[name]).abs().max() for name in wanted}
    off = max(
        ((found[name] - wanted[name]).abs().max() / moved[name]).item()
        for name in wanted
        if moved[name] > 0
    )
    return "yes" if off <= part else f"off by {off:.0e}"


def measured(mesh: Any, library: str, fsdp2: bool, folder: str) -> dict[str, str]:
    """What each feature gives; a failure ends the row."""
    build = adapted if library == "PEFT" else Words
    world = mesh.size()
    start = {name: _whole(p) for name, p in seeded(build).named_parameters()}
    wanted = {name: _whole(p) for name, p in plain_run(seeded(build), world).items()}
    cells: dict[str, str] = {}
    names = iter(FEATURES)
    name = next(names)
    try:
        first = Run(mesh, f"{folder}/plain", None, fsdp2=fsdp2)
        values, exported = _ran(library, first)
        cells[name], name = _near(values, wanted, start, 1e-3), next(names)
        options = {"executor": "eager"}
        compiled, _ = _ran(library, Run(mesh, f"{folder}/compiled", options, fsdp2=fsdp2))
        cells[name], name = _near(compiled, wanted, start, 1e-3), next(names)
        again, _ = _ran(library, Run(mesh, first.folder, None, resumed=True, fsdp2=fsdp2))
        cells[name], name = _same(again, values), next(names)
        cells[name] = _same(exported(), values) if mesh.get_rank() == 0 else ""
        name = next(names)
        if (library, name) not in NO_LOOP:
            wanted = {
                key: _whole(p) for key, p in plain_run(seeded(build), world, fp16=True).items()
            }
            low, _ = _ran(library, Run(mesh, f"{folder}/low", None, fp16=True, fsdp2=fsdp2))
            cells[name] = _near(low, wanted, start, 0.02)
    except Exception as error:
        cells[name] = f"`{type(error).__name__}`"
    return cells


def _rank(rank: int, port: int, library: str, fsdp2: bool, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # As torchrun says it: else Lightning starts this script again, for the other ranks.
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE="2", SHARDC_PROGRESS="0",
    )  # fmt: skip
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    cells = measured(init_device_mesh("cpu", (2,)), library, fsdp2, folder)
    if rank == 0:
        Path(folder, "cells").write_bytes(pickle.dumps(cells))
    dist.destroy_process_group()


def table() -> str:
    """As Markdown."""
    found: dict[tuple[str, bool], dict[str, str]] = {}
    for library, fsdp2 in itertools.product(LOOPS, (False, True)):
        if (library, fsdp2) in NOT_TRIED:
            continue
        print(library, "by FSDP2" if fsdp2 else "by shardc", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (free_port(), library, fsdp2, folder), nprocs=2)
            found[library, fsdp2] = pickle.loads(Path(folder, "cells").read_bytes())
    rows = [
        [library, feature, *(_cell(found, library, feature, side) for side in (False, True)),
         f"`test_integrations.py::{test}`"]
        for library in LOOPS for feature, test in FEATURES.items()
        if (library, feature) not in NO_LOOP
    ]  # fmt: skip
    return tabulate(rows, ["library", "feature", "shardc", "FSDP2", "test"], "pipe")


def _cell(found: dict[Any, dict[str, str]], library: str, feature: str, fsdp2: bool) -> str:
    if (library, fsdp2) in NOT_TRIED:
        return NOT_TRIED[library, fsdp2]
    return found[library, fsdp2].get(feature, "not reached")


def main() -> None:
    """Print it, or write it."""
    made = table()
    if "--write" not in sys.argv[1:]:
        print(made)
        return
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
