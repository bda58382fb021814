"""`calibrate`: measure this device and the group's links once, for the cost model.

Ranks compare their figures through the store, and the slowest figures count, so every rank plans
with the same profile. A file per device, world size and backend keeps the figures. The file is used
only where every rank finds the same figures.
"""

import functools
import json
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardc.passes.estimate.hardware import Link, Profile, current_profile, set_profile
from shardc.runtime import compat
from shardc.runtime.checks.arguments import checked
from shardc.runtime.checks.telling import warn
from shardc.runtime.checks.words import dtype_name
from shardc.runtime.comm import collectives
from shardc.runtime.groups.backends import backend_of
from shardc.runtime.groups.devices import device_board
from shardc.runtime.watch.agreement import Statement, agree


@dataclass(frozen=True)
class _Probes:
    """The probes of a kind of device.

    Attributes:
        dtypes: the dtypes of the matmuls.
        attends: the place in `dtypes` of attention's dtype; attention is compared with its matmul.
        matmul: rows and columns of the matrices of a matmul.
        attention: (batch, heads, length, head dim), causal.
        angles: elements whose GELU is measured. (`torch.tanh` itself comes from a vector library
            that no fused kernel uses.) On a CPU the elements stay in a cache; on a GPU the time
            beyond the time of a copy counts.
        copied: bytes of a copy: on a CPU, as many as a kernel of a step touches; on a GPU, more
            than the caches hold.
        messages: bytes of the gathered buckets: the first shows the fixed cost, the others the
            bandwidth.
        calls: calls before the host waits; on a GPU, a wait takes as long as a small kernel.
    """

    dtypes: tuple[torch.dtype, ...]
    attends: int
    matmul: int
    attention: tuple[int, int, int, int]
    angles: int
    copied: int
    messages: tuple[int, int, int]
    calls: int

    @property
    def count(self) -> int:
        """The number of figures."""
        return len(self.dtypes) + 4 + len(self.messages)


_PROBES = {
    "cpu": _Probes(
        (torch.float32, torch.bfloat16), 0, 1024, (4, 8, 128, 64), 2**18, 2**24,
        (2**14, 2**22, 2**24), 1,
    ),
    "accelerator": _Probes(
        (torch.float32, torch.bfloat16, torch.float16), 1, 4096, (2, 32, 2048, 64), 2**27, 2**29,
        (2**14, 2**26, 2**28), 10,
    ),
}  # fmt: skip
_ROUNDS, _IN_A_ROW = 5, 3
_ENOUGH = 1.0
"""Seconds in all after which a probe is not measured again. A matmul in a dtype for which a CPU has
no instructions takes seconds."""


@checked
def calibrate(mesh: DeviceMesh, *, refresh: bool = False) -> Profile:
    """Measure matmuls, copies and all-gathers on `mesh`, and plan with the result from now on.

    Call it on every rank of `mesh`, before `fully_shard`. It takes about a second where no
    earlier call has kept its figures.

    Args:
        mesh: a 1-D mesh.
        refresh: measure even if an earlier call has kept its figures.

    Returns:
        The profile, equal on all ranks. A warning tells where its figures cannot be kept.
    """
    group, device = mesh.get_group(), torch.device(mesh.device_type)
    path = calibration_file(mesh)
    name = path.stem
    kept = "" if refresh else _read(path)
    found = agree(
        group, Statement("the calibration that ranks keep", [name], kept), every_time=True
    )
    figures = kept
    if found != {kept} or not kept:
        measured = json.dumps(_measure(mesh, device))
        notes = agree(group, Statement("a calibration", [name], measured), every_time=True)
        figures = json.dumps([max(each) for each in zip(*map(json.loads, notes), strict=True)])
        _keep(figures, path)
    profile = _profile(name, json.loads(figures), device.type, group.size())
    set_profile(profile)
    return profile


def calibration_file(mesh: DeviceMesh) -> Path:
    """The file of the figures of `calibrate(mesh)`: one per device, backend and world size."""
    group = mesh.get_group()
    backend = backend_of(group, mesh.device_type)
    name = f"{_device_key(mesh.device_type)}-{backend.name}-{group.size()}"
    return calibration_folder() / f"{name.replace(' ', '_')}.json"


def calibrations_kept(device_type: str) -> list[Path]:
    """The files that `calibrate` has written for this machine's devices of a type."""
    key = _device_key(device_type).replace(" ", "_")
    return sorted(calibration_folder().glob(f"{key}-*.json"))


def is_calibration(path: Path) -> bool:
    """Whether the file exists and holds figures of `calibrate`."""
    return bool(_read(path))


def _read(path: Path) -> str:
    """The text of a file of `calibrate`, the seconds of each probe; "" for any other file."""
    try:
        text = path.read_text()
        figures = json.loads(text)
    except (OSError, ValueError):
        return ""
    counts = {probes.count for probes in _PROBES.values()}
    is_whole = isinstance(figures, list) and len(figures) in counts
    is_whole = is_whole and all(isinstance(f, float) and 0 < f < math.inf for f in figures)
    return text if is_whole else ""


def _keep(figures: str, path: Path) -> None:
    """Write the file atomically; warn where it cannot be written."""
    new = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(figures)
        new.replace(path)
    except OSError as error:
        warn(
            f"the calibration cannot be kept in {path} ({error}): this run plans with it all the "
            "same, the next one measures again. XDG_CACHE_HOME names another folder"
        )


def _device_key(device_type: str) -> str:
    """The name of the device, with the number of threads where it is the CPU."""
    if device_type == "cpu":
        return f"cpu-{torch.get_num_threads()}"
    return f"{device_board(device_type) or device_type}-1"


def _probes_for(device_type: str) -> _Probes:
    return _PROBES["cpu" if device_type == "cpu" else "accelerator"]


def _measure(mesh: DeviceMesh, device: torch.device) -> list[float]:
    """Seconds of each probe: the least of several rounds.

    A round runs all probes, so the rounds of a probe are spread over the whole time: the load of
    others on a shared machine comes in bursts, and is no property of the machine. All ranks run the
    probes with collectives equally often.
    """
    alone, together = _probes(device), _gathers(mesh, device)
    times: list[list[float]] = [[] for _ in (*alone, *together)]
    for _ in range(_ROUNDS):
        for probe, taken in zip((*alone, *together), times, strict=True):
            _time(probe, device, taken, _ENOUGH if probe in alone else math.inf)
    return list(map(min, times))


def _probes(device: torch.device) -> list[Callable[[], object]]:
    """A matmul in each dtype, attention, GELU, a copy, a tiny op."""
    sizes = _probes_for(device.type)
    matmuls: list[Callable[[], object]] = []
    for dtype in sizes.dtypes:
        a, b = (torch.randn(sizes.matmul, sizes.matmul, device=device).to(dtype) for _ in range(2))
        matmuls.append(functools.partial(torch.matmul, a, b))
    query = torch.randn(sizes.attention, device=device).to(sizes.dtypes[sizes.attends])
    angles = torch.randn(sizes.angles, device=device)
    attend = torch.nn.functional.scaled_dot_product_attention
    data, copied = (torch.zeros(sizes.copied // 4, device=device) for _ in range(2))
    return [
        *matmuls,
        functools.partial(attend, query, query, query, is_causal=True),
        functools.partial(torch.nn.functional.gelu, angles, approximate="tanh"),
        functools.partial(copied.copy_, data),
        functools.partial(torch.add, data[:16], 1),
    ]


def _gathers(mesh: DeviceMesh, device: torch.device) -> list[Callable[[], object]]:
    """All-gathers, one for each size of message."""
    world, group = mesh.size(), compat.group_name(mesh.get_group())
    messages = _probes_for(device.type).messages
    segments = [torch.zeros(message // 4 // world, device=device) for message in messages]
    return [functools.partial(_gather, part, world, group) for part in segments]


def _gather(part: torch.Tensor, world: int, group: str) -> torch.Tensor:
    return collectives.start_all_gather(part, world, group).wait()


def _profile(name: str, figures: list[float], device_type: str, world: int) -> Profile:
    *matmuls, attention, gelu, copy, tiny, first, middle, last = figures
    sizes, before = _probes_for(device_type), current_profile(device_type)
    rates = [2 * sizes.matmul**3 / seconds for seconds in matmuls]
    batch, heads, length, dim = sizes.attention
    attended = 4 * batch * heads * length**2 * dim / attention
    ring = (world - 1) / world
    bandwidth = ring * (sizes.messages[2] - sizes.messages[1]) / max(last - middle, 1e-9)
    fixed = max(first - ring * sizes.messages[0] / bandwidth, 0.0) if world > 1 else 0.0
    link = Link(0.0, bandwidth if world > 1 else 1e15)
    memory = 2 * sizes.copied / copy
    if device_type != "cpu":  # a GPU computes while it loads and stores
        gelu = max(gelu - 8 * sizes.angles / memory, sizes.angles / before.transcendental)
    return replace(
        before,
        name=name,
        source="calibrate()",
        flops=tuple(zip(map(dtype_name, sizes.dtypes), rates, strict=True)),
        memory_bandwidth=memory,
        node_size=world,
        inside=link,
        across=link,
        overhead=tiny,
        message=fixed,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        transcendental=sizes.angles / gelu,
        overlaps=device_type != "cpu",
        attention_efficiency=attended / rates[sizes.attends],
    )


def _time(
    call: Callable[[], object], device: torch.device, taken: list[float], enough: float
) -> None:
    """Add the seconds of a few calls in a row, up to `enough`: the first finds cold caches."""
    calls = _probes_for(device.type).calls
    for _ in range(_IN_A_ROW):
        if sum(taken) >= enough:
            return
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append((time.perf_counter() - start) / calls)


def calibration_folder() -> Path:
    """The folder of the files of calibrations."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardc"
