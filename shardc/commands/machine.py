"""The checks of `shardc doctor`: each function looks for a part, tries it, and gives advice."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from shardc.calibration import calibration_folder, calibrations_kept, is_calibration
from shardc.commands.probes import HOST, try_compile, try_gather
from shardc.runtime import compat
from shardc.runtime.checks.words import plural

Status = Literal["ok", "missing", "broken"]
_SLOWER = (
    "without it shardc runs its graphs op by op, which is slower: options={'executor': 'eager'}"
)


@dataclass(frozen=True)
class Checked:
    """The finding of one check.

    Attributes:
        status: "ok", or "missing" (not there), or "broken" (there, but it does not work).
        detail: the observation, in words.
        advice: the remedy, if the status is not "ok".
    """

    status: Status
    detail: str
    advice: str = ""


class Check(Protocol):
    """A check; `timeout` is the seconds that a process of the check may take."""

    def __call__(self, timeout: float) -> Checked: ...


def checks() -> Iterator[tuple[str, Check]]:
    """The checks by name, in the order in which they build on each other."""
    gpus = torch.cuda.device_count()
    yield "torch", check_torch
    yield "C++ compiler", check_cpp_compiler
    yield "compile for CPU", partial(check_compile, "cpu")
    yield "GPU", check_gpu
    yield "Triton", check_triton
    if gpus:
        yield "compile for GPU", partial(check_compile, "cuda")
    yield "gloo", partial(check_backend, "gloo")
    yield "nccl", partial(check_backend, "nccl")
    yield "all-gather on CPU", partial(check_gather, "gloo", 2)
    if gpus:
        yield "all-gather on GPU", partial(check_gather, "nccl", min(gpus, 2))
    yield "calibration", check_calibration


def check_torch(timeout: float) -> Checked:
    """Check whether shardc supports this torch."""
    span = " to ".join(compat.supported())
    major, minor = torch.__version__.split(".")[:2]
    if (int(major), int(minor)) in compat.VERSIONS:
        return Checked("ok", f"{torch.__version__} (supported: {span})")
    return Checked(
        "broken",
        f"{torch.__version__} is not supported (only {span})",
        f"pip install 'torch{compat.specifier()}'",
    )


def check_cpp_compiler(timeout: float) -> Checked:
    """Check whether Inductor finds a C++ compiler."""
    try:
        return Checked("ok", compat.cpp_compiler())
    except RuntimeError:
        return Checked(
            "missing",
            "Inductor finds none",
            "install g++ (apt install g++, dnf install gcc-c++), or set CXX to a compiler; "
            + _SLOWER,
        )


def check_compile(device: str, timeout: float) -> Checked:
    """Check whether Inductor compiles and runs a small function."""
    why = try_compile(device, timeout)
    if not why:
        return Checked("ok", "Inductor compiled and ran a small function")
    needs = "a C++ compiler and Python's headers (python3-dev)"
    if device == "cuda":
        needs = "Triton, a C compiler and the GPU's driver"
    return Checked("broken", why, f"Inductor needs {needs}, or more time (--timeout); {_SLOWER}")


def check_gpu(timeout: float) -> Checked:
    """Check which GPUs torch can use."""
    if torch.cuda.is_available():
        count, memory = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
        return Checked(
            "ok", f"{count} x {torch.cuda.get_device_name()}, {memory / 2**30:.0f} GiB each"
        )
    if torch.version.cuda is None:
        return Checked(
            "missing",
            "this build of torch has no CUDA",
            "none is needed on CPU; with a GPU install a CUDA build (https://pytorch.org)",
        )
    return Checked(
        "missing",
        "torch finds none",
        "none is needed on CPU; with a GPU see that nvidia-smi lists it",
    )


def check_triton(timeout: float) -> Checked:
    """Check whether Triton is installed: Inductor compiles for GPUs with Triton."""
    if importlib.util.find_spec("triton") is None:
        advice = "only GPUs need it; it comes with CUDA builds of torch"
        return Checked("missing", "not installed", advice)
    try:
        return Checked("ok", metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return Checked("ok", "installed, of unknown version")


def check_backend(backend: str, timeout: float) -> Checked:
    """Check whether torch was built with a backend of collectives."""
    if dist.is_backend_available(backend):
        return Checked("ok", "built into torch")
    where = "GPUs" if backend == "nccl" else "CPUs"
    return Checked(
        "missing", "not in this build of torch", f"only {where} need it; install another build"
    )


def check_gather(backend: str, world_size: int, timeout: float) -> Checked:
    """Check whether processes of this machine can gather."""
    if not dist.is_backend_available(backend):
        return Checked("missing", f"no {backend}", f"install a build of torch with {backend}")
    why = try_gather(backend, world_size, timeout)
    if not why:
        several = plural(world_size, "process", "processes")
        return Checked("ok", f"{several} over {backend}, joined on {HOST}")
    if backend == "gloo":
        advice = "let programs listen on 127.0.0.1; where this host's name has no address: export "
        return Checked("broken", why, advice + "GLOO_SOCKET_IFNAME=lo")
    return Checked("broken", why, "export NCCL_DEBUG=INFO and run it again: NCCL says more")


def check_calibration(timeout: float) -> Checked:
    """Check which calibrations of this machine are kept."""
    folder = calibration_folder()
    kept = calibrations_kept("cuda" if torch.cuda.is_available() else "cpu")
    damaged = [path for path in kept if not is_calibration(path)]
    if damaged:
        return Checked("broken", f"{damaged[0]} cannot be read", "delete it, or calibrate anew")
    if not kept:
        return Checked(
            "missing",
            f"none in {folder}",
            "optional: shardc calibrate; without it shardc plans by the device's data sheet",
        )
    return Checked("ok", f"{', '.join(path.stem for path in kept)} in {folder}")
