"""`shardc compare`: reports side by side."""

import argparse
import json
from pathlib import Path

from shardc.commands.arguments import add_step, count
from shardc.commands.errors import FoundProblem, UsageError
from shardc.commands.explain import explain_target
from shardc.commands.target import EXAMPLE
from shardc.reports.compare import compare
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
    """Read or make the reports, and print the table."""
    reports = [report for source in args.reports for report in _reports(source, args)]
    if len(reports) < 2:
        raise UsageError("there is one report only: name another, or several --world-size")
    if args.json:
        print(json.dumps(compare(reports), indent=2))
    else:
        print(reports[0].compare(*reports[1:]))
    return 0


def _reports(source: str, args: argparse.Namespace) -> list[Report]:
    if not source.endswith(".json"):
        if ":" not in source and Path(source).suffix:
            raise UsageError(
                f"{source} cannot be compared: give the .json file that `shardc explain --save` "
                "writes, or package.module:function"
            )
        return [explain_target(args, source, world_size) for world_size in args.world_size]
    try:
        return [Report.load(source)]
    except OSError as error:
        raise FoundProblem(f"{source} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FoundProblem(str(error)) from error
