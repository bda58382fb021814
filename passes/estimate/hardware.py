"""Hardware profiles: the figures of a device and its links that the cost model uses, as data.

Peaks are the vendors' (dense, no sparsity). A real matmul or copy reaches a share of a peak:
`matmul_efficiency`, `memory_efficiency`. Link bandwidth is the rate at which one rank receives in a
ring (NCCL's "bus bandwidth"): across nodes, all network cards of a node carry one ring together.
Host links are PCIe x16, generation 4 on A100, else 5, at 80% of nominal.
`calibrate` replaces these figures by measured ones.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from shardc.runtime import compat
from shardc.runtime.checks.arguments import Must, checked, shown
from shardc.runtime.checks.values import read_amount
from shardc.runtime.checks.words import dtype_name
from shardc.runtime.groups.devices import device_board, device_named


@dataclass(frozen=True)
class Link:
    """The cost of one step of a ring: `latency` in seconds, `bandwidth` in bytes/s."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Profile:
    """One device type and its links.

    Attributes:
        name: the name for `get_profile` and for options.
        source: the source of the figures.
        flops: peak FLOP/s of matmuls by dtype name; other dtypes count as float32.
        memory_bandwidth: peak bytes/s of the device's memory.
        memory: bytes of the device's memory.
        node_size: ranks that `inside` connects.
        inside: the link within a node.
        across: the link between nodes.
        overhead: seconds that every kernel costs at least.
        message: seconds that every collective costs beside its steps.
        matmul_efficiency, memory_efficiency: the share of the peak that real kernels reach.
        transcendental: elements/s of tanh and similar ops, which are slow on CPUs.
        overlaps: whether a kernel loads and stores while it computes; if not, the times add up.
        attention_efficiency: the share of a matmul's rate that fused causal attention reaches, with
            skipped FLOPs counted as done; attention that skips no FLOPs reaches half of that.
        host_bandwidth: bytes/s of a copy from pinned memory of the host; 0 if host and device share
            one memory.
        workspace: bytes of the matmul library's workspace for each computing thread.
        board: part of torch's name for the GPUs with this profile; "": no GPU has it by default.
    """

    name: str
    source: str
    flops: tuple[tuple[str, float], ...]
    memory_bandwidth: float
    memory: float
    node_size: int
    inside: Link
    across: Link
    overhead: float = 4e-6
    message: float = 1e-5
    matmul_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    transcendental: float = 1e13
    overlaps: bool = True
    attention_efficiency: float = 0.6
    host_bandwidth: float = 5e10
    workspace: int = 0
    board: str = ""

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s that a real matmul in `dtype` reaches."""
        return self.matmul_efficiency * self.rate(dtype_name(dtype))

    def rate(self, dtype: str) -> float:
        """Nominal FLOP/s of a matmul in `dtype`; float32 is TF32 if the program allows TF32."""
        table = dict(self.flops)
        allowed = torch.get_float32_matmul_precision() != "highest"  # which is the default
        full = table["tf32"] if allowed and "tf32" in table else table["float32"]
        return table.get(dtype, full) if dtype != "float32" else full


_NVLINK_STEP, _NETWORK_STEP = 3.4e-6, 14e-6
"""Seconds of a step of a ring with the Simple protocol (NCCL, src/graph/tuning.cc, hwLat)."""

_GB = 1e9


def _nvidia(
    name: str, source: str, bf16: float, tf32: float, fp32: float, bandwidth: float, memory: float,
    nvlink: float, network: float, host: float, workspace: int = 8_519_680,
) -> list[Profile]:  # fmt: skip
    """The two profiles of a board.

    `nvlink` and `network` are GB/s that a rank receives in a ring, `host` is GB/s of a copy from
    pinned memory. `workspace` is the number of bytes that torch sets for cuBLAS
    (aten/src/ATen/cuda/CublasHandlePool.cpp; more on compute capability 9.0).
    """
    flops = (("bfloat16", bf16), ("float16", bf16), ("float32", fp32), ("tf32", tf32))
    node = Profile(
        f"{name}-nvlink", source, flops, bandwidth, memory, 8,
        Link(_NVLINK_STEP, nvlink * _GB), Link(_NETWORK_STEP, network * _GB),
        host_bandwidth=host * _GB, workspace=workspace, board=name.upper(),
        matmul_efficiency=0.8, attention_efficiency=0.75,  # an H100 with 16 blocks of 2048
    )  # fmt: skip
    # Every rank on a node of its own, with one network card.
    card = Link(_NETWORK_STEP, network / 8 * _GB)
    return [node, replace(node, name=f"{name}-ib", node_size=1, across=card, board="")]


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in [
        *_nvidia("a100", "NVIDIA A100 80GB SXM data sheet (2021); NVLink 3, 8 x HDR 200 Gb/s; "
                 "ring bandwidth as nccl-tests report, about 80% of nominal",
                 312e12, 156e12, 19.5e12, 2.039e12, 80e9, 230, 160, 25),
        *_nvidia("h100", "NVIDIA H100 SXM data sheet (2023); NVLink 4, 8 x NDR 400 Gb/s; "
                 "ring bandwidth as nccl-tests report, about 80% of nominal",
                 989e12, 494e12, 67e12, 3.35e12, 80e9, 360, 320, 50, 2**25),
        *_nvidia("h200", "NVIDIA H200 SXM data sheet (2024); NVLink 4, 8 x NDR 400 Gb/s; "
                 "ring bandwidth as nccl-tests report, about 80% of nominal",
                 989e12, 494e12, 67e12, 4.8e12, 141e9, 360, 320, 50, 2**25),
        *_nvidia("b200", "NVIDIA DGX and HGX B200 data sheets (2024); NVLink 5, 8 x NDR 400 Gb/s; "
                 "ring bandwidth assumed at 80% of nominal",
                 2250e12, 1125e12, 75e12, 8e12, 180e9, 720, 320, 50),
        Profile("cpu", "one core of a server CPU with AVX2 and gloo over loopback, as measured on "
                "the machines this was developed on; calibrate() measures yours",
                (("float32", 100e9), ("bfloat16", 50e9), ("float64", 50e9)), 10e9, 16e9, 1,
                Link(1e-4, 1e9), Link(1e-4, 1e9), overhead=2e-6, message=2e-4,
                transcendental=6e8, overlaps=False, host_bandwidth=0.0),
    ]
}  # fmt: skip

_chosen: list[Profile] = []


@checked
def get_profile(name: str) -> Profile:
    """The profile with the name `name`.

    Raises:
        ValueError: no profile has this name; the message lists the known names.
    """
    if name not in PROFILES:
        raise ValueError(f"unknown profile '{name}' (known: {', '.join(PROFILES)})")
    return PROFILES[name]


@checked
def set_profile(profile: Profile | str | None) -> None:
    """Plan with `profile` from now on; None: the device's name selects the profile.

    All ranks must set the same profile.

    Raises:
        TypeError, ValueError: `profile` is neither a profile nor the name of one.
    """
    _chosen[:] = [] if profile is None else [as_profile(profile)]


@contextmanager
def planning_for(profile: Profile) -> Iterator[None]:
    """Plan with `profile` inside the `with` block."""
    before = list(_chosen)
    set_profile(profile)
    try:
        yield
    finally:
        _chosen[:] = before


def as_profile(profile: Profile | str) -> Profile:
    """Look up a profile that is given by name. Raises ValueError for an unknown name."""
    return get_profile(profile) if isinstance(profile, str) else profile


def current_profile(device_type: str) -> Profile:
    """The profile that `set_profile` or `calibrate` set, else the profile of this device.

    Raises:
        NotImplementedError: `device_type` has no entry in the table of devices.
    """
    if _chosen:
        return _chosen[0]
    device, board = device_named(device_type), device_board(device_type)
    known = (profile for profile in PROFILES.values() if profile.board and profile.board in board)
    return next(known, None) or get_profile(device.profile)


def workspace_bytes(profile: Profile) -> int:
    """Bytes that the matmul library keeps, for the forward's thread and for autograd's thread."""
    return 2 * profile.workspace if compat.keeps_workspaces() else 0


def matmul_bytes(profile: Profile) -> int:
    """Bytes that each queued matmul takes; 0 if the matmul library keeps its workspaces."""
    return 0 if compat.keeps_workspaces() else profile.workspace


_AMOUNT = "bytes, a text such as '70GB' or '16GiB', or a fraction of the {}'s memory in (0, 1]"
Amount = Annotated[int | float | str, Must(_AMOUNT.format("device"))]


def budget_bytes(budget: Amount, profile: Profile, option: str = "memory_budget") -> int:
    """Convert a memory budget, the value of an option, to bytes.

    A budget is a count, a text such as "70GB" or "0.9", or a fraction of `profile.memory`.

    Raises:
        ValueError: `budget` has none of these forms.
    """
    return _bytes(budget, profile.memory, f"{option} must be {_AMOUNT.format('device')}")


def host_bytes(amount: Amount) -> int:
    """Convert an amount of the host's memory to bytes, in the forms of `budget_bytes`.

    A fraction is taken of this rank's share of the memory of the machine or container. The share is
    rounded down to two digits, so that similar machines have equal shares: compiled code depends on
    the share.

    Raises:
        ValueError: `amount` has none of these forms.
    """
    whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # no such file, or "max"
        whole = min(whole, float(_CONTAINER.read_text()))
    share = whole / int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    digit = 10 ** (int(math.log10(share)) - 1)
    return _bytes(amount, share // digit * digit, f"host_memory must be {_AMOUNT.format('host')}")


_CONTAINER = Path("/sys/fs/cgroup/memory.max")
"""The most bytes that processes of this container may use, or "max"."""


def _bytes(amount: Amount, whole: float, wanted: str) -> int:
    if isinstance(amount, str):
        read = read_amount(amount)
        if read is not None:
            number, unit = read
            return int(number * (whole if unit is None else unit))
    elif isinstance(amount, float) and 0 < amount <= 1:
        return int(amount * whole)
    elif isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
        return amount
    raise ValueError(f"{wanted}, got {shown(amount)}")
