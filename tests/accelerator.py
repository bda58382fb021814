"""A simulated accelerator, "sim", for tests of streams, copies and collectives without a GPU.

    accelerator.load()                          # once a process; builds `accelerator.cpp` if needed
    dist.init_process_group("cpu:gloo,sim:simccl", ...)
    accelerator.configure(copy=4.0, comm=2.0, compute=1.0)
    with accelerator.recording() as log:
        ...                                     # log: what the host queued, and when it ran

The device's memory is host memory. Copies from and to pinned memory and the collectives of "simccl"
are queued on streams, and run when something waits for them; every other operator waits on the host
for its stream, then runs on the CPU. Fresh and freed memory holds NaN: a missing wait, or a tensor
freed while another stream uses it, gives wrong numbers, always. Time is simulated: it hangs on the
costs given alone. Left out: several devices, random numbers of its own (they come from the CPU's
generator), Inductor, graph capture, asynchronous kernels.

This module is `torch.sim` as well; what torch asks of a device's module is in the last part.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardc.extending import DeviceType, register_device

_NAME = "sim_accelerator"
_SOURCE = Path(__file__).with_name("accelerator.cpp")


def load() -> None:
    """Make the device "sim", the module `torch.sim` and the backend "simccl" known to torch; the
    device to shardc, too."""
    if _NAME in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(_NAME, _build())
    assert spec is not None and spec.loader is not None
    torch.utils.rename_privateuse1_backend("sim")
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    sys.modules[_NAME] = library
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("simccl", _new_backend, extended_api=True, devices=["sim"])
    register_device(DeviceType("sim", backend="simccl", profile="cpu"))


def _build() -> Path:
    """The compiled library; built unless this user has it for this torch and source."""
    key = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"sim-{os.getuid()}-{torch.__version__}-{key}")
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            subprocess.run(_command(partial), check=True)
            partial.rename(library)
    return library


def _command(output: Path) -> list[str]:
    home = Path(torch.__file__).parent
    includes = [home / "include", sysconfig.get_paths()["include"]]
    return [
        *("g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-w", str(_SOURCE), "-o", str(output)),
        *(argument for folder in includes for argument in ("-isystem", str(folder))),
        *("-DUSE_DISTRIBUTED", f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]


def _library() -> ModuleType:
    if _NAME not in sys.modules:
        raise RuntimeError("call accelerator.load() first")
    return sys.modules[_NAME]


def _new_backend(options: Any, own: Any) -> Any:
    """A "simccl" backend for a new group: gloo for the data, under a prefix of its own.

    `own` are options of the group; of NCCL's, `is_high_priority_stream` counts.
    """
    store = dist.PrefixStore("simccl", options.store)
    gloo = dist.ProcessGroupGloo(
        store, options.group_rank, options.group_size, timeout=options.timeout
    )
    priority = -1 if getattr(own, "is_high_priority_stream", False) else 0
    return _library().wrap(gloo, str(options.group_id), priority)


# Knobs and counters.


def configure(
    copy: float = 0.0, comm: float = 0.0, compute: float = 0.0, late: bool = True
) -> None:
    """What a queued copy, a collective and any other operator cost, in simulated seconds.

    With `late`, what is queued runs when something waits for it, else when its time has come. All
    that is queued now runs first: every rank must call it.
    """
    _library().configure(copy, comm, compute, late)


def now() -> float:
    """Where the host is, in simulated seconds."""
    return _library().now()


class Entry(NamedTuple):
    """Something that the host did with the device.

    Attributes:
        kind: "copy", "collective", "compute", "record", "wait", "synchronize", "allocate", "free"
            or "note".
        name: the direction of a copy, the collective, the operator, what was noted.
        group: the process group's name.
        stream: on which stream.
        priority: the stream's; below zero is urgent.
        bytes: how many it moves or takes.
        point: which event is recorded or waited for, or is the end of a collective.
        block: which memory is taken, given back or filled by a collective.
        start: when it runs, in simulated seconds.
        end: when it has run.
    """

    kind: str
    name: str
    group: str
    stream: int
    priority: int
    bytes: int
    point: int
    block: int
    start: float
    end: float


@contextlib.contextmanager
def recording() -> Iterator[list[Entry]]:
    """A list that has, after the block, what the host did in it, in that order."""
    log: list[Entry] = []
    _library().take_log()
    _library().record(True)
    try:
        yield log
    finally:
        _library().record(False)
        log += (Entry(*row) for row in _library().take_log())


def note(text: str) -> None:
    """Put a line into the log."""
    _library().note(text)


def live_bytes() -> int:
    """Bytes of device memory in use, those included that a recorded stream still needs."""
    return _library().live_bytes()


def peak_bytes() -> int:
    """The most bytes of device memory ever in use, or since `reset_peak`."""
    return _library().peak_bytes()


def reset_peak() -> None:
    """Make the bytes in use now the peak."""
    _library().reset_peak()


def pending_tasks() -> int:
    """Copies, collectives, waits and marks queued or running, over all streams."""
    return _library().pending_tasks()


def collectives() -> list[tuple[str, bool, bool]]:
    """Each collective queued: its name, whether its input and its output lie in group memory."""
    return _library().collectives()


def reset_counters() -> None:
    """Forget the collectives."""
    _library().reset_counters()


# What torch expects of `torch.sim`.

Stream = torch.Stream
Event = torch.Event


class device:
    """`with torch.sim.device(index)`: nothing to do, there is one."""

    def __init__(self, index: Any) -> None:
        self.index = index

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None: ...


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(index: Any) -> None: ...


def synchronize(index: Any = None) -> None:
    torch.accelerator.synchronize()


def current_stream(index: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream()


def default_stream(index: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=0, device_type=_device_type())


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def _device_type() -> int:
    return torch.accelerator.current_stream().device_type


def memory_allocated(index: Any = None) -> int:
    return live_bytes()


def max_memory_allocated(index: Any = None) -> int:
    return peak_bytes()


def reset_peak_memory_stats(index: Any = None) -> None:
    reset_peak()


def empty_cache() -> None: ...


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# Random operators run on the CPU: its generator is this device's.


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(index: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, index: Any = None) -> None:
    torch.default_generator.set_state(state)
