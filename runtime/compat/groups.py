"""Process groups, their backends and memory, and meshes."""

import atexit
import functools
import itertools
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def flat_dims(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    """The named dims of a mesh as one dim; None for no names. All ranks of `mesh` must call it."""
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def with_last_dim_of_one(mesh: DeviceMesh) -> DeviceMesh:
    """A 1-D mesh as a mesh of shape `(size, 1)`. All ranks of `mesh` must call it."""
    return mesh._unflatten(0, (mesh.size(), 1), ("replicate", "shard"))


def concatenate_meshes(*meshes: DeviceMesh) -> DeviceMesh:
    """A mesh of the dims of sub-meshes of one mesh, in the order given.

    Raises:
        ValueError: the meshes are not sub-meshes of one mesh, or dims of a mesh have no names.
    """
    try:
        return DeviceMesh._concatenate(list(meshes))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{meshes} are not sub-meshes of one mesh with named dims") from error


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which functional collectives find a process group."""
    return group.group_name


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name.

    Raises:
        RuntimeError: the group is gone, or was never made.
    """
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise RuntimeError(
            f"process group '{name}', over which the model is sharded, does not exist: call "
            "torch.distributed.init_process_group before fully_shard and keep the group until the "
            "last step"
        ) from error


def also_named(group: dist.ProcessGroup, name: str) -> str:
    """Register `group` for graphs under `name`, or under `name` with a number; gives that name.

    torch names groups so that ranks of different groups know their groups by different names, and
    then have different graphs. A name that belongs to another group stays with that group.
    """
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    for number in itertools.count(1):
        numbered = name if number == 1 else f"{name}_{number}"
        try:
            known = resolve_group(numbered)
        except RuntimeError:  # it is free, or its group is gone
            _unregister_process_group(numbered)  # type: ignore[arg-type]
            _register_process_group(numbered, group)  # type: ignore[arg-type]
            return numbered
        if known is group:
            return numbered
    raise AssertionError


def place_in_mesh(mesh: DeviceMesh, dim: int) -> str:
    """A text that identifies one dim of a mesh, equal on all ranks of the mesh's root mesh."""
    return f"{mesh._rank_map.tolist()} {mesh._layout[dim]}"


def new_group(
    ranks: list[int], purpose: str, keeps_order: bool = False, **options: Any
) -> dist.ProcessGroup:
    """A process group of some global ranks; each of these ranks calls it, and no other rank.

    Ranks are numbered in ascending order, as torch does by default, or in the order given.

    torch names such a group after its ranks and the number of groups that this process is in, so
    ranks in different numbers of groups would wait for each other without an end. Our group is
    named after its ranks and its purpose; no two groups may have equal ranks and purpose.

    Where the default group is bound to a device (2.15: always), torch splits the default group's
    communicator. All ranks of the world must take part in a split: the ranks that call would wait
    for the others without an end. Our group gets a communicator of its own.
    """
    from torch.distributed import distributed_c10d

    name = "_".join(["shardc", purpose, *map(str, ranks)])
    put_in_order = list if keeps_order else sorted  # 2.11 has no option for it
    with (
        mock.patch.object(distributed_c10d, "_hash_ranks_to_str", lambda ranks: name),
        mock.patch.object(distributed_c10d, "_get_split_source", lambda *args: None),
        mock.patch.object(distributed_c10d, "sorted", put_in_order, create=True),
    ):
        return dist.new_group(ranks, use_local_synchronization=True, **options)


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store of a process group's rendezvous.

    Raises:
        ValueError: the group has been destroyed.
    """
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_process_group_store(group)
    except KeyError as error:
        raise ValueError("the process group has been destroyed") from error


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout of the group's collectives; the backend of CPU tensors is asked first."""
    from torch.distributed import constants

    for device_type in sorted(group_backends(group), key="cpu".__ne__):
        with suppress(RuntimeError):  # a group written in Python
            options = getattr(group._get_backend(torch.device(device_type)), "options", None)
            if timeout := getattr(options, "_timeout", None):
                return timeout
    return constants.default_pg_timeout


def groups_within(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """All groups of two or more ranks of `group`, itself included."""
    from torch.distributed import distributed_c10d

    own, groups = set(dist.get_process_group_ranks(group)), distributed_c10d._world.pg_group_ranks
    return [one for one, ranks in list(groups.items()) if len(ranks) > 1 and own.issuperset(ranks)]


def call_when_waited_for(value: Tensor, wait: Callable[[], object]) -> None:
    """Call `wait` once, at the wait for `value`."""
    c10d: Any = torch._C._distributed_c10d  # the stubs lack it

    def finish(timeout: timedelta) -> bool:
        wait()
        return True

    c10d._register_work(value, c10d.PythonCallbackWork(finish))


def flight_record_path(default: str = "") -> str | None:
    """The file to which this process writes its last collectives; None if it writes none.

    The user's setting gives the path, else `default`; the rank is appended.
    """
    known = os.environ.get
    asked = known("TORCH_FR_DUMP_TEMP_FILE") or known("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") or default
    size = known("TORCH_FR_BUFFER_SIZE") or known("TORCH_NCCL_TRACE_BUFFER_SIZE")
    return f"{asked}{dist.get_rank()}" if asked and size != "0" else None


def nccl_flight_record() -> str | None:
    """The file that NCCL's watchdog writes when a collective times out."""
    return flight_record_path(f"{Path.home()}/.cache/torch/comm_lib_trace_rank_")


def free_cuda_graphs_before(groups: Iterable[str]) -> None:
    """Free Inductor's CUDA graphs before one of `groups` is shut down.

    The graphs replay collectives of the groups. NCCL waits for such graphs before it destroys a
    communicator, without an end.
    """
    _watch_shutdowns()
    _captured.update(resolve_group(name).group_name for name in groups)


_captured: set[str] = set()


class HasCudaGraph(Protocol):
    """An object with a CUDA graph that may hold communicators."""

    def free(self) -> None:
        """Free the CUDA graph."""


def free_before_shutdowns(holder: HasCudaGraph) -> None:
    """Call `holder.free()` before any group is shut down."""
    _watch_shutdowns()
    _holders.add(holder)


_holders: "weakref.WeakSet[HasCudaGraph]" = weakref.WeakSet()


@functools.cache
def _watch_shutdowns() -> None:
    shutdown = dist.ProcessGroup.shutdown

    @functools.wraps(shutdown)
    def free_and_shut_down(group: dist.ProcessGroup) -> None:
        if group.group_name in _captured:
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            torch.cuda.synchronize()
            reset_cudagraph_trees()
            _captured.discard(group.group_name)
        for holder in list(_holders):
            torch.cuda.synchronize()
            holder.free()
        shutdown(group)

    dist.ProcessGroup.shutdown = free_and_shut_down  # type: ignore[method-assign, assignment]


def nccl_high_priority() -> object:
    """Options for a group of NCCL on a high-priority stream."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


class Recorded(NamedTuple):
    """A collective in torch's flight record: its number in its group, its name, whether done."""

    number: int
    name: str
    is_done: bool


def recorded_collectives() -> dict[str, list[Recorded]]:
    """The last 64 collectives that this process gave to gloo in each group, by the group's name.

    The program's own collectives are included. Empty where torch keeps no flight record.
    """
    c10d: Any = torch._C._distributed_c10d  # the stubs lack it
    entries = pickle.loads(c10d._dump_fr_trace(includeStackTraces=False)).get("entries", ())
    found: dict[str, list[Recorded]] = {}
    for entry in entries:
        if not entry["is_p2p"]:
            number, name = entry["collective_seq_id"], entry["profiling_name"]
            record = Recorded(number, name, entry["retired"])
            found.setdefault(entry["process_group"][0], []).append(record)
    return {group: records[-64:] for group, records in found.items()}


def ranks_of(name: str) -> list[int]:
    """The ranks of the group of that name; empty where this rank has no such group."""
    with suppress(RuntimeError, KeyError):
        return dist.get_process_group_ranks(resolve_group(name))
    return []


def group_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device, such as "nccl" for "cuda".

    For a group with several backends, `torch.distributed.get_backend` gives all in one text
    ("cpu:gloo,cuda:nccl").
    """
    parts = (part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    return {device_type: backend for device_type, backend in parts}


def group_allocates(name: str, device: torch.device) -> bool:
    """Whether the group has an allocator of its own for a device."""
    try:
        return resolve_group(name)._get_backend(device).supports_tensor_alloc(device)
    except RuntimeError:  # no backend for such devices
        return False


def allocate_from_group(numel: int, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """A tensor, `(numel,)`, from the group's own allocator.

    All ranks of the group call it.
    """
    backend = _with_communicator(resolve_group(name), device)
    return backend.allocate_tensor(numel, dtype=dtype, device=device)


def use_symmetric_memory(backend: str) -> None:
    """Let `allocate_symmetric` take memory from `backend`."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(backend)  # type: ignore[arg-type]


def allocate_symmetric(numel: int, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """A tensor, `(numel,)`, of symmetric memory, after the rendezvous of the group over it.

    All ranks of the group call it.
    """
    from torch.distributed import _symmetric_memory

    group = resolve_group(name)
    _with_communicator(group, device)
    with torch.cuda.use_mem_pool(_symmetric_memory.get_mem_pool(device)):
        tensor = torch.empty(numel, dtype=dtype, device=device)
    _symmetric_memory.rendezvous(tensor, group=group)
    return tensor


def _with_communicator(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The group's backend for a device, with a communicator: memory is registered with that.

    The first collective makes the communicator, so this may run a barrier, once. A group that torch
    wraps for debugging does not tell whether it has a communicator.
    """
    backend = group._get_backend(device)
    if group not in _communicating:
        if not getattr(backend, "_is_initialized", lambda: False)():
            dist.barrier(group=group, device_ids=None if device.index is None else [device.index])
        _communicating.add(group)
    return backend


_communicating: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups that have a communicator."""


def make_fake_groups(groups: Mapping[str, tuple[int, int]]) -> None:
    """Make groups without peers, given as (rank, size), under the names that graphs use.

    The process must have no group yet.
    """
    from torch._C._distributed_c10d import _register_process_group, _unregister_all_process_groups
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers its backend)

    if not groups:
        return
    own = max(rank for rank, _ in groups.values())
    world = own + max(size for _, size in groups.values())
    dist.init_process_group("fake", rank=own, world_size=world, store=dist.HashStore())
    made = {
        name: dist.new_group(list(range(own - rank, own - rank + size)))
        for name, (rank, size) in groups.items()
    }
    _unregister_all_process_groups()
    for name, group in made.items():
        _register_process_group(name, group)  # type: ignore[arg-type]


def is_fake_group(group: dist.ProcessGroup) -> bool:
    """Whether the group has no peers: torch's fake group, or a group with a true `emulated`."""
    return dist.get_backend(group) == "fake" or getattr(group, "emulated", False)


def has_others(group: dist.ProcessGroup) -> bool:
    """Whether the group has other ranks, and they are real processes."""
    return group.size() > 1 and not is_fake_group(group)


def join_fake_group(world_size: int) -> None:
    """Make this process rank 0 of a process group without peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    sys.excepthook = hook  # torch's hook adds "[rank0]: " to each line, for each group


def has_real_group() -> bool:
    """Whether this process has joined a process group with peers."""
    return dist.is_initialized() and not is_fake_group(default_group())


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.distributed_c10d.GroupMember.WORLD
    assert group is not None
    return group


def let_backend_threads_finish() -> None:
    """At exit, let gloo's threads drop the tensors of the last collective (2.13).

    A process calls this when it enters its first collective.

    The threads take the GIL to drop the tensors, up to one switch interval (5 ms) after the wait
    has returned. An interpreter that finalizes in that time ends the threads, which aborts the
    process ("terminate called without an active exception").
    """
    atexit.register(time.sleep, 4 * sys.getswitchinterval())
