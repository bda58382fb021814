"""Runs a list of passes over a graph: lint, recompile, time and dump around each.

A pass owns only its rewrite. `SHARDC_DUMP=dir` writes the graph as readable Python before the first
pass and after each.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.fx import GraphModule

from shardc.passes.context import PassContext

Pass = Callable[[GraphModule, PassContext], GraphModule]

log = logging.getLogger("shardc.passes")
_graph_numbers = itertools.count()


def run_passes(gm: GraphModule, ctx: PassContext, passes: Sequence[Pass]) -> GraphModule:
    """Apply `passes` in order; what comes back is linted and recompiled."""
    number = next(_graph_numbers)
    _dump(gm, f"{number:03d}_{ctx.phase}_0_input")
    for index, step in enumerate(passes, 1):
        start = time.perf_counter()
        gm = step(gm, ctx)
        gm.graph.lint()
        gm.recompile()
        elapsed = 1e3 * (time.perf_counter() - start)
        log.debug("%s graph %d: %s took %.1f ms", ctx.phase, number, step.__name__, elapsed)
        _dump(gm, f"{number:03d}_{ctx.phase}_{index}_{step.__name__}")
    return gm


def _dump(gm: GraphModule, name: str) -> None:
    folder = os.environ.get("SHARDC_DUMP")
    if folder:
        path = Path(folder) / f"rank{os.environ.get('RANK', '0')}"
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{name}.py").write_text(gm.print_readable(print_output=False))
