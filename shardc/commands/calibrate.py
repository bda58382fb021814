"""`shardc calibrate`: measure this machine for the cost model, alone or on every rank."""

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardc.commands.errors import FoundProblem, UsageError
from shardc.reports.terminal import pairs, wrap
from shardc.runtime.checks.words import plural

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardc.passes.estimate.hardware import Profile

NAME = "calibrate"
SUMMARY = "measure this machine, so that collectives are planned for it"
DESCRIPTION = """\
Measure matmuls, copies and all-gathers for about a second, and keep the figures. shardc decides
with them how buckets are split and which collectives travel when.

Alone it measures the device only. Under torchrun it measures the links between all ranks as well;
every rank must run it.
"""
EPILOG = """\
examples:
  shardc calibrate
  torchrun --nproc-per-node 8 -m shardc calibrate

A training script takes the figures over with shardc.calibrate(mesh), called on every rank before
fully_shard; it finds them where device, backend and number of ranks are the same.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardc calibrate`."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="what to measure (default: cuda where every rank "
        "has a GPU of its own, else cpu)")  # fmt: skip
    add("--refresh", action="store_true", help="measure again where figures are kept already")
    add("--json", action="store_true", help="print JSON, in seconds, bytes/s and FLOP/s")


def run(args: argparse.Namespace) -> int:
    """Measure, and print the profile on the first rank."""
    from shardc.calibration import calibrate, calibration_file, is_calibration

    with _mesh(args.device) as mesh:
        path = calibration_file(mesh)
        before = _written(path)
        try:
            profile = calibrate(mesh, refresh=args.refresh)
        except RuntimeError as error:
            raise FoundProblem(f"measuring failed: {error}") from error
        if not is_calibration(path):
            raise FoundProblem(
                f"the figures cannot be kept in {path}: set XDG_CACHE_HOME to a folder that can be "
                "written"
            )
        if mesh.get_rank() == 0:
            show = _json if args.json else _text
            print(show(profile, path, _written(path) == before, mesh.size()))
    return 0


def _written(path: Path) -> int:
    """The time of the last write of a file, in ns; 0 without a file."""
    return path.stat().st_mtime_ns if path.exists() else 0


@contextmanager
def _mesh(device: str | None) -> Iterator["DeviceMesh"]:
    """A mesh of all ranks of torchrun, or of this process; its group ends with the context.

    Raises:
        UsageError: `device` is "cuda", and there is no NCCL or not a GPU for every rank.
        FoundProblem: the process group cannot be made.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    has_gpu = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= gpus and dist.is_nccl_available()
    if device == "cuda" and not has_gpu:
        nccl = "with" if dist.is_nccl_available() else "without"
        raise UsageError(
            f"--device cuda: every rank needs NCCL and a GPU of its own, and this torch is {nccl} "
            f"NCCL and finds {plural(gpus, 'GPU')} here; start fewer ranks, or give --device cpu"
        )
    device = device or ("cuda" if has_gpu else "cpu")
    if device == "cuda":
        torch.cuda.set_device(local)
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        if launched:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        raise FoundProblem(
            f"no process group with {backend}: {error} (shardc doctor finds out more)"
        ) from error
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


def _json(profile: "Profile", path: Path, kept: bool, world_size: int) -> str:
    record = {"world_size": world_size, "file": str(path), "measured_now": not kept}
    return json.dumps({**record, "profile": dataclasses.asdict(profile)}, indent=2)


def _text(profile: "Profile", path: Path, kept: bool, world_size: int) -> str:
    rows = [
        *((f"matmul, {dtype}", f"{flops / 1e12:.3g} TFLOP/s") for dtype, flops in profile.flops),
        ("memory", f"{profile.memory_bandwidth / 1e9:.3g} GB/s"),
        ("smallest op", f"{1e6 * profile.overhead:.3g} us"),
    ]
    if world_size > 1:
        rows += [
            ("all-gather, a message", f"{1e6 * profile.message:.3g} us"),
            ("all-gather, bandwidth", f"{profile.inside.bandwidth / 1e9:.3g} GB/s"),
        ]
    else:
        rows.append(("links", "not measured: one process (torchrun ... -m shardc calibrate)"))
    when = "kept from an earlier run (--refresh measures again)" if kept else "measured now"
    return f"{wrap(f'{profile.name}, {when}')}\n\n{pairs(rows)}\n\nkept in {path}"
