"""The ranks of a unit: the ranks that share its segments, and the copies of the model."""

from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch.distributed.device_mesh import DeviceMesh

from shardc.runtime.groups.communicators import group_along, group_over
from shardc.runtime.groups.hierarchy import hierarchy_of
from shardc.runtime.layout.spec import Hierarchy


@dataclass(frozen=True)
class Ranks:
    """The process groups of a unit by name, as graphs know them.

    Attributes:
        shard: the ranks among which a bucket is cut; `world_size` of them, this rank is `rank`.
        replicas: the ranks that hold the same segment, `copies` of them; None without copies.
        everyone: the ranks of all copies.
        hierarchy: the steps in which the ranks of `shard` gather, if there are two steps.
        mesh: the mesh of these ranks, (shard) or (replicate, shard).
    """

    shard: str
    world_size: int
    rank: int
    replicas: str | None
    copies: int
    everyone: str
    hierarchy: Hierarchy | None = None
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)


_meshes: WeakValueDictionary[tuple[str, str], DeviceMesh] = WeakValueDictionary()


def known_mesh(shard: str, everyone: str) -> DeviceMesh | None:
    """The mesh with these groups that `fully_shard` was given; a file can only name the groups."""
    return _meshes.get((shard, everyone or shard))


def mesh_ranks(mesh: DeviceMesh) -> Ranks:
    """The ranks of a mesh (shard) or (replicate, shard). All ranks of the mesh must call it."""
    ranks = _ranks_of(mesh)
    _meshes[ranks.shard, ranks.everyone] = mesh
    return ranks


def _ranks_of(mesh: DeviceMesh) -> Ranks:
    shard = group_along(mesh, mesh.ndim - 1)
    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    if mesh.ndim == 1:
        return Ranks(shard, size, rank, None, 1, shard, hierarchy_of(mesh.get_group()), mesh)
    copies = mesh.size(0)
    replicas = group_along(mesh, 0) if copies > 1 else None
    one = mesh.get_group(0)
    everyone = shard if copies == 1 else group_over(mesh.mesh.flatten().tolist(), one)
    return Ranks(shard, size, rank, replicas, copies, everyone, mesh=mesh)
