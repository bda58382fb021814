"""The mesh that `fully_shard` shards over: all ranks, nodes, or dims of a larger mesh."""

import os
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardc.runtime import compat
from shardc.runtime.checks.arguments import Count, Must, checked
from shardc.runtime.checks.words import plural
from shardc.runtime.groups.backends import backend_of
from shardc.runtime.groups.communicators import kept_with
from shardc.runtime.groups.devices import device_named
from shardc.runtime.groups.hierarchy import hierarchical_group
from shardc.runtime.tensor.tensor_parallel import Spmd

MeshDims = Annotated[
    Any,
    Must(
        "a DataParallelMeshDims of torch.distributed.fsdp",
        lambda dims: hasattr(dims, "shard_names") and hasattr(dims, "replicate_names"),
    ),
]
"""The value of `dp_mesh_dims=`; not every supported torch has the class."""


def data_parallel_mesh(mesh: DeviceMesh | None, dims: Any) -> DeviceMesh:
    """The mesh (shard) or (replicate, shard) to shard over, by default all ranks.

    `dims` is None, or torch's `DataParallelMeshDims`: the dims of `mesh` that are data-parallel.

    Raises:
        RuntimeError: no process group.
        ValueError, NotImplementedError: a mesh that cannot be sharded over.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: start the script with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if mesh is None:
        mesh = kept_with(compat.default_group(), "mesh", _all_ranks)
    if spmd_of(mesh, dims) is not None:
        mesh = _named_dims(mesh, tuple(dims.replicate_names), tuple(dims.shard_names))
    if mesh.ndim > 2:
        raise ValueError(
            "fully_shard takes a mesh of one dim (shard) or two (replicate, shard), got a "
            f"{mesh.ndim}-D mesh of shape {tuple(mesh.shape)}"
        )
    device_named(mesh.device_type)
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")
    for group in mesh.get_all_groups():
        if mesh.device_type not in compat.group_backends(group):
            raise ValueError(
                f"the mesh is of '{mesh.device_type}', but its process group has no backend for "
                f"tensors there, only {dist.get_backend_config(group)}: name one in "
                "init_process_group(backend='cpu:gloo,cuda:nccl'), or give a mesh of the device "
                "that the group serves"
            )
    return mesh


def spmd_of(mesh: DeviceMesh | None, dims: Any) -> Spmd | None:
    """The roles that `dp_mesh_dims` gives the dims of the mesh; None without `dp_mesh_dims`."""
    if dims is None:
        return None
    if mesh is None or not mesh.mesh_dim_names:
        raise ValueError("dp_mesh_dims needs a mesh whose dims have names")
    names = (*dims.replicate_names, *dims.shard_names)
    known = mesh.mesh_dim_names
    if not names or not {*names} <= {*known} or len({*names}) < len(names):
        raise ValueError(
            f"dp_mesh_dims names {list(names)}; the mesh has the dims {list(known)}: name each "
            "once, and at least one"
        )
    return Spmd(mesh, frozenset(known.index(name) for name in names))


def _named_dims(mesh: DeviceMesh, replicate: tuple[str, ...], shard: tuple[str, ...]) -> DeviceMesh:
    """A mesh (shard) or (replicate, shard) of named dims, each flattened; (W, 1) without shard."""
    copies, parts = (compat.flat_dims(mesh, names) for names in (replicate, shard))
    if copies is None:
        assert parts is not None
        return parts
    if parts is None:
        return compat.with_last_dim_of_one(copies)
    return compat.concatenate_meshes(copies, parts)


@checked
def hybrid_mesh(devices_per_node: Count | None = None) -> DeviceMesh:
    """A mesh (replicate, shard) for HSDP: sharded within each node, replicated across nodes.

    Args:
        devices_per_node: ranks on one node; default: the number that torchrun sets
            (LOCAL_WORLD_SIZE), else the accelerators of this machine.

    Raises:
        RuntimeError: no process group.
        TypeError, ValueError: `devices_per_node` is no whole number, or does not divide the world.
    """
    size, world = _node_size("hybrid_mesh", devices_per_node), dist.get_world_size()
    kind = _default_device_type()
    return init_device_mesh(kind, (world // size, size), mesh_dim_names=("replicate", "shard"))


@checked
def hierarchical_mesh(devices_per_node: Count | None = None) -> DeviceMesh:
    """A mesh of all ranks for many nodes: graphs gather across nodes first, then inside nodes.

    A ring over all ranks takes one step a rank, and each step costs latency. With two levels, the
    network sees one step a node. Gradients are reduced inside nodes first, in full precision, then
    across nodes, as `MixedPrecisionPolicy(reduce_wire_dtype=...)` says. Parameters and gradients
    are cut among all ranks as on a flat mesh. Ranks are numbered by their place in their node
    first, so checkpoints stay the same, and `mesh.get_local_rank()` differs. Uncompiled code
    gathers on one level.

    Args:
        devices_per_node: consecutive ranks on one node; default: the number that
            torchrun sets (LOCAL_WORLD_SIZE), else the accelerators of this machine. With one node,
            or with one rank a node, there is one level, and the result is the mesh of all ranks.

    Raises:
        RuntimeError: no process group.
        TypeError, ValueError: `devices_per_node` is no whole number, or does not divide the world.
    """
    size, world = _node_size("hierarchical_mesh", devices_per_node), dist.get_world_size()
    if size in (1, world):
        return _all_ranks()
    return DeviceMesh.from_group(hierarchical_group(size), _default_device_type())


def _node_size(function: str, devices_per_node: int | None) -> int:
    """The count of ranks on a node; error messages name `function`."""
    if not dist.is_initialized():
        raise RuntimeError(f"{function} needs a process group: call init_process_group() first")
    size = devices_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    size, world = size or torch.accelerator.device_count(), dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(
            f"{plural(world, 'rank')} cannot be split into nodes of {size}; give devices_per_node"
        )
    return size


def _all_ranks() -> DeviceMesh:
    return init_device_mesh(_default_device_type(), (dist.get_world_size(),))


def _default_device_type() -> str:
    """The type of the accelerator if the group has a backend that works there, else the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    world = compat.default_group()
    if device is None or device.type not in compat.group_backends(world):
        return "cpu"
    return "cpu" if backend_of(world, device.type).on_host else device.type
