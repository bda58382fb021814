"""`shardc precompile`: compile a job's graphs before the job, in one process."""

import argparse
import json
import math
import os
from dataclasses import asdict

from shardc.commands.arguments import (
    add_copies,
    add_precision,
    add_target,
    count,
    example_inputs,
    mesh_sizes,
    read_precision,
)
from shardc.commands.errors import UsageError, finding_problems
from shardc.commands.progress_line import ProgressLine, showing_progress
from shardc.commands.target import EXAMPLE, find_target, load_model
from shardc.runtime.checks.words import plural

NAME = "precompile"
SUMMARY = "compile a model's graphs for any number of ranks, for a job that starts later"
DESCRIPTION = """\
Compile the forward, the backward and the evaluation of a model as the ranks of a job would, in one
process, without the other ranks and without memory for the model. A job that starts with the same
cache folder, model, options, batch shapes and versions loads them and compiles nothing.

The target names a function that takes no arguments and returns (model, example inputs); build them
under torch.device("meta"). Inputs are one rank's: a tuple if the job gives them by position, a dict
if it gives them by name.
"""
EPILOG = f"""\
examples:
  shardc precompile {EXAMPLE} --world-size 8 --mp bf16 --cache compiled
  TORCHINDUCTOR_CACHE_DIR=compiled torchrun --nproc-per-node 8 train.py

The job must call fully_shard(model, units="auto") with the same mp_policy; other settings are
compiled with shardc.precompile(...) in Python.

exit code: 0, or 1 where the model cannot be compiled
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardc precompile`."""
    add = parser.add_argument
    add_target(parser)
    add_copies(parser)
    add_precision(parser)
    add("--cache", metavar="DIR", help="the folder for compiled graphs; the job has it in "
        "TORCHINDUCTOR_CACHE_DIR (default: that variable, else torch's own)")  # fmt: skip
    add("--device", choices=["cpu", "cuda"], help="where the job computes (default: on GPUs where "
        "there is one, which compiling for them needs)")  # fmt: skip
    add("--threads", type=count, default=1, metavar="N", help="threads of a rank, which code for "
        "CPUs is made for (default 1, as torchrun sets OMP_NUM_THREADS)")  # fmt: skip
    add("--wrapped", action="store_true", help="the job calls torch.compile(model, ...) and not "
        "model.compile(...)")  # fmt: skip
    add("--accumulation", action="store_true", help="compile steps under no_sync too, and the step "
        "that reduces their sum")  # fmt: skip
    add("--json", action="store_true", help="print JSON: folder, compiled, found")


def run(args: argparse.Namespace) -> int:
    """Compile the graphs, and print how many were compiled and found, and their folder."""
    mesh = mesh_sizes(args.copies, args.world_size)
    find_target(args.target)
    import torch

    from shardc.backend.precompile import device_to_compile_for, precompile

    try:
        device = device_to_compile_for(args.device)
    except ValueError as error:
        raise UsageError(f"--device {args.device}: {error}") from error
    torch.set_num_threads(args.threads)
    if args.cache:
        try:
            os.makedirs(args.cache, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--cache {args.cache}: {error.strerror}") from error
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(args.cache)
    model, inputs = load_model(args.target)
    positional, named = example_inputs(inputs, args.target)
    title = f"precompile for {plural(math.prod(mesh), 'rank')}"
    with (
        showing_progress(ProgressLine(title)) as progress,
        finding_problems(args.target, "compiled"),
    ):
        done = precompile(
            model,
            *positional,
            kwargs=named,
            mesh=mesh,
            device_type=device,
            accumulation=args.accumulation,
            in_place=not args.wrapped,
            progress=progress,
            mp_policy=read_precision(args),
        )
    if args.json:
        print(json.dumps(asdict(done)))
        return 0
    print(f"compiled {plural(done.compiled, 'graph')}, found {done.found}, in {done.folder}")
    return 0
