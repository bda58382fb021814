"""Backends of collectives: the facts of each that other code depends on, one entry a backend.

All code that depends on the backend of a group reads the facts here. Facts that a process group
can tell, such as its timeout or whether it has an allocator, are asked of the group. A backend
without an entry only sums, works in place, and takes several tensors in one message.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist

from shardc.runtime import compat
from shardc.runtime.groups.devices import device_named


@dataclass(frozen=True)
class CommBackend:
    """Facts of a backend of `torch.distributed`.

    Attributes:
        name: the name that `init_process_group` takes.
        averages: whether it reduces by "avg", too; else sums are divided.
        coalesces: whether several tensors travel in one message.
        clones: whether it reduces a clone of its input; the clone lives until the wait.
        on_host: whether tensors of an accelerator travel through the host: by default such a group
            shards on the CPU.
        errors: words in its error messages, in lower case.
        events: kinds of collectives, and their names on the host in a trace of `torch.profiler`.
        kernels: the prefix of the names of its kernels; "" where it has none.
        high_priority: makes options of a group whose kernels run on a stream of high priority.
        end_waits: makes all waits on a group fail, here and on the peers.
        flight_record: the file with the last collectives of this process, if there is one.
    """

    name: str
    averages: bool = False
    coalesces: bool = True
    clones: bool = False
    on_host: bool = False
    errors: tuple[str, ...] = ()
    events: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    kernels: str = ""
    high_priority: Callable[[], object] | None = None
    end_waits: Callable[[dist.ProcessGroup], None] = lambda group: None
    flight_record: Callable[[], str | None] = lambda: None


_GLOO = CommBackend(
    "gloo",
    coalesces=False,
    clones=True,
    on_host=True,
    errors=("gloo", "pair closure", "connection closed by peer", "connection reset by peer"),
    events=(  # gloo reduce-scatters by an all-reduce
        (("all_gather",), ("gloo:all_gather",)),
        (("reduce_scatter", "all_reduce"), ("gloo:reduce_scatter", "gloo:all_reduce")),
    ),
    end_waits=compat.end_gloo_waits,
    flight_record=compat.gloo_flight_record,
)
_NCCL = CommBackend(
    "nccl",
    averages=True,
    errors=("nccl",),
    kernels="nccl",
    high_priority=compat.nccl_high_priority,
    flight_record=compat.nccl_flight_record,
)
BACKENDS: dict[str, CommBackend] = {backend.name: backend for backend in (_GLOO, _NCCL)}


def register_backend(backend: CommBackend) -> None:
    """Register `backend` under its name; every rank does the same, before `fully_shard`."""
    BACKENDS[backend.name] = backend


@contextmanager
def fake_group_as_on(device_type: str) -> Iterator[None]:
    """Treat torch's fake process group, inside, as one of the backend of `device_type`."""
    before = BACKENDS.get("fake")
    name = device_named(device_type).backend
    BACKENDS["fake"] = replace(BACKENDS.get(name, CommBackend(name)), name="fake")
    try:
        yield
    finally:
        del BACKENDS["fake"]
        if before is not None:
            BACKENDS["fake"] = before


def backend_of(group: dist.ProcessGroup | str, device_type: str) -> CommBackend:
    """The backend that carries a group's tensors of a device."""
    members = compat.resolve_group(group) if isinstance(group, str) else group
    name = compat.group_backends(members).get(device_type, "")
    return BACKENDS.get(name, CommBackend(name))


def _all_of(group: dist.ProcessGroup) -> Iterable[CommBackend]:
    """The backends of a group, those of accelerators first."""
    return (backend_of(group, d) for d in sorted(compat.group_backends(group), key="cpu".__eq__))


def high_priority_options(group: dist.ProcessGroup) -> object:
    """Options for a group like `group` on a high-priority stream; None where there is none."""
    makers = (backend.high_priority for backend in _all_of(group) if backend.high_priority)
    return next((make() for make in makers), None)


def flight_record(group: dist.ProcessGroup) -> str | None:
    """The file with the last collectives of this process; None where there is none."""
    return next(filter(None, (backend.flight_record() for backend in _all_of(group))), None)


def end_waits(group: dist.ProcessGroup) -> None:
    """Fail every wait on the host among these ranks, here and on the peers."""
    for other in compat.groups_within(group):
        backend_of(other, "cpu").end_waits(other)
