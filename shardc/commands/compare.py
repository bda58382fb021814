"""`shardc compare`: reports side by side."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardc.commands.arguments import add_step, count
from shardc.commands.errors import FoundProblem, UsageError
from shardc.commands.explain import explain_target, explaining
from shardc.commands.progress_line import ProgressLine, showing_progress
from shardc.commands.target import EXAMPLE

if TYPE_CHECKING:
    from shardc.reports.report import Report

NAME = "compare"
SUMMARY = "put the costs of several steps side by side: numbers of ranks, options, models"
DESCRIPTION = """\
Put reports side by side, each with its ratio to the first: those that `shardc explain --save` wrote
as .json, those of a model on several numbers of ranks, or both.
"""
EPILOG = f"""\
examples:
  shardc compare {EXAMPLE} --world-size 64 1024 --mp bf16
  shardc compare fp32.json bf16.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardc compare`."""
    add = parser.add_argument
    add("reports", nargs="+", metavar="REPORT", help="a .json file, or package.module:function to "
        "explain")  # fmt: skip
    add("--world-size", type=count, nargs="+", default=[8], metavar="W", help="ranks to explain "
        "models for (default 8)")  # fmt: skip
    add_step(parser)
    add("--json", action="store_true", help="print JSON: seconds and bytes")


def run(args: argparse.Namespace) -> int:
    """Read or make the reports, and print the table, or JSON."""
    makers = [maker for source in args.reports for maker in _makers(source, args)]
    if len(makers) < 2:
        raise UsageError("there is one report only: name another, or several --world-size")
    made = sum(not source.endswith(".json") for source in args.reports) * len(args.world_size)
    with showing_progress(explaining(args, "compare", max(1, made))) as progress:
        reports = [maker(progress) for maker in makers]
    if args.json:
        from shardc.reports.compare import compare

        print(json.dumps(compare(reports), indent=2))
    else:
        print(reports[0].compare(*reports[1:]))
    return 0


def _makers(source: str, args: argparse.Namespace) -> list[Callable[[ProgressLine], "Report"]]:
    """The functions that make the reports of a file, or of a model.

    Raises:
        UsageError: `source` is a file of another kind.
    """
    if source.endswith(".json"):
        return [lambda progress: _load(source)]
    if ":" not in source and Path(source).suffix:
        raise UsageError(
            f"{source} cannot be compared: give the .json file that `shardc explain --save` "
            "writes, or package.module:function"
        )
    return [partial(explain_target, args, source, world_size) for world_size in args.world_size]


def _load(source: str) -> "Report":
    from shardc.reports.report import Report

    try:
        return Report.load(source)
    except OSError as error:
        raise FoundProblem(f"{source} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FoundProblem(str(error)) from error
