"""`shardc explain`: the plan and the costs of a step on any number of ranks."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from shardc.commands.arguments import (
    add_step,
    add_target,
    check_reshard_size,
    example_inputs,
    mesh_sizes,
    read_precision,
    read_profile,
)
from shardc.commands.errors import FoundProblem, UsageError, finding_problems
from shardc.commands.progress_line import ProgressLine, showing_progress
from shardc.commands.target import EXAMPLE, find_target, load_model
from shardc.reports.pictures.endings import check_ending
from shardc.runtime.checks.words import plural

if TYPE_CHECKING:
    from shardc.reports.report import Report

NAME = "explain"
SUMMARY = "show what a step would do and cost on any number of ranks, without running it"
DESCRIPTION = """\
Compile a training step of a model for any number of ranks, without a GPU or other processes, and
show what it would do: every collective with what hides it, where memory peaks and what it is made
of, how long a step takes, and what to change. Takes about 15 s of one CPU core for 8 billion
parameters, 20 to 90 s with a memory budget, and some seconds for small models.

The target names a function that takes no arguments and returns (model, example inputs); build them
under torch.device("meta"). Inputs are a tuple, or a dict by name, of one rank's tensors.
"""
EPILOG = f"""\
examples:
  shardc explain {EXAMPLE} --world-size 1024 --mp bf16
  shardc explain {EXAMPLE} --world-size 64 --save step.html --save step.json
  shardc explain {EXAMPLE} --world-size 64 --mp bf16 --memory curve

Times come from a cost model of the hardware; docs/guides/planning.md says how far it was off.

exit code: 0, or 1 where the model cannot be compiled or does not fit the device's memory
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardc explain`."""
    add = parser.add_argument
    add_target(parser)
    add_step(parser)
    add("--whole-step", action="store_true", help="plan the step as one graph (compile_step): the "
        "last reductions run while the optimizer updates other parameters")  # fmt: skip
    add("--gather-ahead", action="store_true", help="with --whole-step: keep the buckets of the "
        "first gather from step to step, and gather them again behind their updates")  # fmt: skip
    add("--micro-batches", type=int, metavar="N", help="with --whole-step: so many forwards and "
        "backwards before the update")  # fmt: skip
    add("--gathered-bytes", metavar="BYTES", help="with --micro-batches: buckets may stay gathered "
        "between micro-batches, of so many bytes: a count, 2GiB, or a fraction of the device's "
        "memory")  # fmt: skip
    add("--save", type=Path, action="append", default=[], metavar="FILE", help="also write the "
        "report to a file: .json (for shardc compare), .html (a page with the timeline) or "
        ".trace.json (for https://ui.perfetto.dev); may be given several times")  # fmt: skip
    add("--all", action="store_true", help="print every row, not only the first and last of those "
        "that repeat from block to block")  # fmt: skip
    add("--symbolic", action="store_true", help="also give totals as formulas of the number of "
        "ranks and of tokens (compiles twice)")  # fmt: skip
    add("--json", action="store_true", help="print JSON: seconds, bytes, every row")


def run(args: argparse.Namespace) -> int:
    """Explain the model, print the report, write the files."""
    for path in args.save:
        check_path(path)
    if args.gather_ahead and not args.whole_step:
        raise UsageError("--gather-ahead needs --whole-step: a step of separate calls gathers none")
    if args.micro_batches is not None and not (args.whole_step and args.micro_batches > 0):
        raise UsageError("--micro-batches needs --whole-step, and a number of at least 1")
    if args.gathered_bytes is not None and args.micro_batches is None:
        raise UsageError("--gathered-bytes needs --micro-batches")
    title = f"explain for {plural(args.copies * args.world_size, 'rank')}"
    with showing_progress(explaining(args, title, 1 + args.symbolic)) as progress:
        report = explain_target(args, args.target, args.world_size, progress, args.symbolic)
        if args.whole_step:
            nbytes = _gathered_bytes(args)
            report = report.whole_step(args.gather_ahead, args.micro_batches or 1, nbytes)
    for path in args.save:
        try:
            report.save(path)
        except OSError as error:
            raise FoundProblem(f"{path} cannot be written: {error.strerror}") from error
    print(json.dumps(report.to_dict()) if args.json else report.text(every_row=args.all))
    return 1 if any(finding.kind == "memory" for finding in report.findings) else 0


def _gathered_bytes(args: argparse.Namespace) -> int:
    """The bytes that `--gathered-bytes` gives; 0 without it."""
    if args.gathered_bytes is None:
        return 0
    from shardc.passes.estimate.hardware import budget_bytes

    try:
        return budget_bytes(args.gathered_bytes, read_profile(args), "--gathered-bytes")
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_path(path: Path) -> None:
    """Raise UsageError if no report can be saved at `path`: better now than in a minute."""
    try:
        check_ending(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder '{path.parent}'")


_BEFORE = {"sharding": 0.0, "tracing": 0.02, "planning": 0.4}
_BEFORE_WITHIN = {"sharding": 0.0, "tracing": 0.02, "planning": 0.22}
"""The share of the time of `explain` before each stage, without and with a memory budget, as
measured for Llama 3 8B."""


def explaining(args: argparse.Namespace, title: str, parts: int) -> ProgressLine:
    """The progress of `parts` calls of `explain_target`."""
    return ProgressLine(title, parts, _BEFORE_WITHIN if args.memory_budget else _BEFORE)


def explain_target(
    args: argparse.Namespace,
    target: str,
    world_size: int,
    progress: ProgressLine,
    symbolic: bool = False,
) -> "Report":
    """The report of the model that `target` names, on `world_size` ranks a copy.

    Raises:
        UsageError: there are no example inputs, or numbers of ranks contradict each other.
        FoundProblem: the model cannot be sharded or compiled.
    """
    mesh = mesh_sizes(args.copies, world_size)
    check_reshard_size(args.reshard, world_size)
    progress("importing torch")
    find_target(target)
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    from shardc.planning.explain import explain

    profile = read_profile(args)
    if args.hierarchical and math.prod(mesh) % profile.node_size:
        raise UsageError(
            f"--hierarchical: {plural(math.prod(mesh), 'rank')} cannot be split into nodes of "
            f"{profile.node_size}, as {profile.name} has: give a multiple, or leave it out"
        )
    progress("building the model")
    model, inputs = load_model(target)
    positional, named = example_inputs(inputs, target)
    with finding_problems(target, "explained"):
        return explain(
            model,
            *positional,
            kwargs=named,
            mesh=mesh,
            devices_per_node=profile.node_size if args.hierarchical else None,
            profile=profile,
            memory_budget=args.memory_budget,
            progress=progress,
            symbolic=symbolic,
            reshard_after_forward=args.reshard,
            mp_policy=read_precision(args),
            offload_policy=CPUOffloadPolicy() if args.offload else OffloadPolicy(),
        )
