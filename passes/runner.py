"""The runner of passes: it lints, times and dumps a graph after each pass, and recompiles it last.

A pass owns only its rewrite. `dump` states the content of dumps.
"""

import logging
import time
from collections.abc import Sequence

from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import PairPass, Pass, name_of
from shardc.passes.dump import dump_change, dump_input
from shardc.runtime import compat

log = logging.getLogger("shardc.passes")


def run_passes(
    gm: GraphModule, ctx: PassContext, passes: Sequence[Pass], done: int = 0
) -> GraphModule:
    """Apply `passes` in order; lint the graph after each, and recompile the result.

    Args:
        ctx: the context of all passes. A graph without a number is the graph of a trial: no lint,
            no dump.
        done: the number of passes that the graph has gone through with this context.
    """
    if ctx.number is None:
        for step in passes:
            gm = step(gm, ctx)
        return gm
    text = dump_input(gm, ctx.stem, written=done > 0)
    for index, step in enumerate(passes, done + 1):
        name, start = name_of(step), time.perf_counter()
        gm = step(gm, ctx)
        gm.graph.lint()
        elapsed = 1e3 * (time.perf_counter() - start)
        log.debug("%s graph %d: %s took %.1f ms", ctx.phase, ctx.number, name, elapsed)
        text = dump_change(gm, f"{ctx.stem}_{index}_{name}", text)
    gm.recompile()
    return gm


def run_on_halves(
    forward: GraphModule, backward: GraphModule, ctx: PassContext, passes: Sequence[PairPass]
) -> None:
    """Apply, in order, passes that edit forward and backward together."""
    for step in passes:
        step(forward, backward, ctx)


def copy_graph(gm: GraphModule) -> GraphModule:
    """Copy a graph, for passes or Inductor to edit."""
    copied = compat.compiled_when_called(gm, compat.copied_graph(gm.graph))
    copied.meta.update(gm.meta)
    return copied
