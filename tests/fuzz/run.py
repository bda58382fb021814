"""Run a case's program on ranks: on this one, or on processes that are kept for the next case."""

import gc
import itertools
import linecache
import sys
import types
import warnings

import ranks
import torch
from torch.distributed.device_mesh import DeviceMesh

from fuzz.case import Case, mesh_shape
from fuzz.script import RECOMPILES, script

_numbers = itertools.count()

TIMEOUT = 600.0
"""Seconds that the ranks have for a case; one that hangs has failed."""


def run_text(mesh: DeviceMesh, text: str, shape: tuple[int, ...]) -> None:
    """On a rank: run a program's `main`."""
    shape = tuple(shape)
    if len(shape) == 2:
        mesh = ranks.mesh_of("cpu", shape, mesh_dim_names=("replicate", "shard"))
    name = f"fuzz_case_{next(_numbers)}"  # Dynamo keeps what it imported by a name
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = types.ModuleType(name)
    space = vars(module)
    sys.modules[name] = module  # Dynamo looks there
    if not gc.get_freeze_count():
        gc.freeze()  # collecting what a case leaves then takes less than running it
    try:
        limit = torch._dynamo.config.patch(recompile_limit=RECOMPILES)
        with warnings.catch_warnings(), limit:
            warnings.simplefilter("ignore")
            exec(compile(text, name, "exec"), space)
            space["main"](mesh)
    finally:
        del linecache.cache[name]
        torch.set_default_dtype(torch.float32)
        del sys.modules[name]
        gc.collect()


def short(error: str, lines: int = 40) -> str:
    """The end of an error's text, without torch's own frames but the last."""
    kept, skipped, all_lines = [], False, error.splitlines()
    for number, line in enumerate(all_lines):
        if line.startswith('  File "'):
            later = any(other.startswith('  File "') for other in all_lines[number + 1 :])
            skipped = "site-packages" in line and later
        elif not line.startswith("    "):
            skipped = False
        if not skipped:
            kept.append(line)
    return "\n".join(kept[-lines:])


def failure_of(case: Case, timeout: float = TIMEOUT) -> str | None:
    """What `case` ends with on ranks, None if all is well."""
    try:
        ranks.run_on_ranks(
            case.world,
            "fuzz.run",
            "run_text",
            {"text": script(case), "shape": mesh_shape(case)},
            timeout,
        )
    except AssertionError as error:
        return short(str(error))
    return None
