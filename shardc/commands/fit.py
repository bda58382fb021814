"""`shardc fit`: the largest batch or longest sequence that fits, and the fewest ranks."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardc.commands.arguments import (
    add_precision,
    add_profile,
    add_target,
    amount,
    example_inputs,
    mesh_sizes,
    read_precision,
    read_profile,
)
from shardc.commands.errors import finding_problems
from shardc.commands.progress_line import ProgressLine, showing_progress
from shardc.commands.target import EXAMPLE, load_model
from shardc.reports.terminal import Column, table, wrap
from shardc.runtime.checks.words import bytes_like, format_seconds, plural

if TYPE_CHECKING:
    from shardc.planning.fit import Fit

NAME = "fit"
SUMMARY = "find the largest batch or sequence that fits a GPU, and the fewest ranks"
DESCRIPTION = """\
Find the largest batch (or the longest sequence) whose step fits the memory of a device, and the
fewest ranks that hold a step of the example inputs. Each size is planned with that memory as its
budget: what stays gathered and what is computed again is chosen for the shortest step that fits.
Needs no GPU. About a dozen plans are made. For 8 billion parameters each takes 20 s of a CPU core,
or up to 90 s where much must be computed again to fit.

The target names a function that takes no arguments and returns (model, example inputs); the inputs
are repeated along their first dim (the batch), or with --grow length along their second.
"""
EPILOG = f"""\
examples:
  shardc fit {EXAMPLE} --memory 80GB --world-size 64 --mp bf16
  shardc fit {EXAMPLE} --memory 80GB --world-size 8 --mp bf16 --grow length

exit code: 0, or 1 where not even the example inputs fit
"""
_DIMS = {"batch": 0, "length": 1}
_PLANS = 13
"""The number of stages, about: the model is built, then 7 or 8 sizes, then 4 numbers of ranks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardc fit`."""
    add = parser.add_argument
    add_target(parser)
    add("--memory", type=amount, required=True, metavar="BYTES", help="of a device: 80GB, "
        "64GiB, or 0.9 for that share of the profile's")  # fmt: skip
    add("--grow", choices=_DIMS, default="batch", help="what grows (default batch)")
    add_precision(parser)
    add_profile(parser, "the hardware that times are for")
    add("--json", action="store_true", help="print JSON: seconds and bytes")


def run(args: argparse.Namespace) -> int:
    """Search, and print both answers."""
    mesh_sizes(1, args.world_size)
    with showing_progress(ProgressLine("fit", _PLANS)) as progress:
        size, ranks = _search(args, progress)
    if args.json:
        print(json.dumps({args.grow: _record(size), "ranks": _record(ranks)}, indent=2))
    else:
        print(_text(args, size, ranks))
    return 0 if size.size else 1


def _search(args: argparse.Namespace, progress: ProgressLine) -> tuple["Fit", "Fit"]:
    """The largest size, and the fewest ranks."""
    progress("building the model")
    model, inputs = load_model(args.target)
    positional, named = example_inputs(inputs, args.target)
    from shardc.planning.fit import fewest_ranks, fit

    given: dict[str, Any] = {
        "kwargs": named,
        "memory": args.memory,
        "profile": read_profile(args),
        "mp_policy": read_precision(args),
        "progress": progress,
    }
    with finding_problems(args.target, "planned"):
        dim = _DIMS[args.grow]
        size = fit(model, *positional, world_size=args.world_size, dim=dim, **given)
        return size, fewest_ranks(model, *positional, **given)


def _text(args: argparse.Namespace, size: "Fit", ranks: "Fit") -> str:
    more = f"; {bytes_like(size.least, args.memory)} would hold a larger one" if size.least else ""
    largest = f"largest {args.grow} on {plural(args.world_size, 'rank')}"
    rows = [
        _row(largest, f"{size.size} x the example inputs", size, args.memory),
        _row("fewest ranks for the example inputs", plural(ranks.size, "rank"), ranks, args.memory),
    ]
    heading = wrap(f"{args.target} in {args.memory} a device{more}")
    return f"{heading}\n\n{table(_COLUMNS, rows, elsewhere='--json')}"


_COLUMNS = (
    Column(""),
    Column("", least=16),
    Column("memory", "right"),
    Column("step", "right"),
    Column("tokens/s a rank", "right", goes=1),
)


def _row(what: str, size: str, found: "Fit", memory: str) -> list[str]:
    report = found.report
    if report is None:
        least = f"needs {bytes_like(found.least, memory)}" if found.least else ""
        return [what, "none fits", least, "", ""]
    rate = f"{report.tokens / report.step_seconds:,.0f}"
    peak = bytes_like(report.peak.total, memory)
    return [what, size, peak, format_seconds(report.step_seconds), rate]


def _record(found: "Fit") -> dict[str, Any]:
    summary = found.report.summary() if found.report else None
    return {"size": found.size, "least_of_next": found.least, "step": summary}
