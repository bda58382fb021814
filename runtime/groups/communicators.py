"""Communicators beside the mesh's own: gathers and reductions that do not queue behind each other.

On one NCCL communicator collectives run one after the other. With a communicator of its own, a
reduce-scatter can overlap an all-gather where the network carries both. All models that shard over
the same ranks share these communicators, so their collectives keep one order.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardc.runtime import compat
from shardc.runtime.groups.backends import high_priority_options

T = TypeVar("T")
_kept: WeakKeyDictionary[dist.ProcessGroup, dict[object, object]] = WeakKeyDictionary()


def kept_with(group: dist.ProcessGroup, key: object, make: Callable[[], T]) -> T:
    """The result of `make`, made once for `group` and freed with it."""
    kept = _kept.setdefault(group, {})
    if key not in kept:
        kept[key] = make()
    return cast(T, kept[key])


def group_along(mesh: DeviceMesh, dim: int) -> str:
    """The name of this rank's group along one dim of a mesh, equal on all ranks.

    Therefore ranks in different rows of a mesh have the same graphs, and one of them compiles for
    all.
    """
    group = mesh.get_group(dim)
    if mesh.size(dim) == dist.get_world_size():
        return compat.group_name(group)

    def make() -> str:
        place = hashlib.sha256(compat.place_in_mesh(mesh, dim).encode()).hexdigest()[:8]
        name = f"{mesh.size(dim)}_of_{dist.get_world_size()}_{place}"
        return compat.also_named(group, name)

    return kept_with(group, group_along, make)


def group_over(ranks: list[int], like: dist.ProcessGroup) -> str:
    """The name of a group of these global ranks, made at first use; each of them must call it.

    The group has the timeout of the group `like`.
    """
    world, ranks = dist.distributed_c10d.GroupMember.WORLD, sorted(ranks)
    assert world is not None
    if len(ranks) == dist.get_world_size():
        return compat.group_name(world)
    timeout = compat.group_timeout(like)
    make = partial(compat.new_group, ranks, "all", timeout=timeout)
    return compat.group_name(kept_with(world, tuple(ranks), make))


def own_group(
    group: str, purpose: str, high_priority: bool = False, size: int | None = None
) -> str:
    """The name of a communicator over the ranks of `group` for one purpose, made at first use.

    Every rank of `group` must call it, in the same order.

    Args:
        group: the name of the group whose ranks it spans.
        purpose: "gather", "reduce" or another word.
        high_priority: run its kernels on a stream of high priority (NCCL; others have none).
        size: span only this number of consecutive ranks of `group`, this rank among them.
    """
    base = compat.resolve_group(group)
    name = f"{group}_{purpose}_{'high' if high_priority else 'normal'}"

    def make() -> dist.ProcessGroup:
        members = dist.get_process_group_ranks(base)
        first = base.rank() // size * size if size else 0
        return compat.new_group(
            members[first : first + (size or len(members))],
            name,
            timeout=compat.group_timeout(base),
            backend=dist.get_backend(base),
            pg_options=high_priority_options(base) if high_priority else None,
            group_desc=f"shardc_{purpose}",
        )

    return compat.also_named(kept_with(base, (purpose, high_priority), make), name)
