"""A model on ranks that do not exist: shapes only, sharded over torch's fake process group.

One process compiles a step for any number of ranks, without memory for the model.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardc.runtime import compat
from shardc.runtime.checks.values import MAX_WORLD
from shardc.runtime.checks.words import plural
from shardc.runtime.unit.params import convert
from shardc.sharding.mesh import hierarchical_mesh
from shardc.sharding.shard import fully_shard
from shardc.sharding.units import units_of


def sizes_of(
    what: str,
    model: nn.Module,
    world_size: int | None,
    mesh: DeviceMesh | Sequence[int] | None,
    sharding: Mapping[str, Any],
) -> tuple[int, ...] | None:
    """The sizes of the mesh to make; None where a mesh exists. May raise ValueError."""
    if compat.has_real_group():
        raise ValueError(
            f"{what} works without peers, and this process has a process group with some: call it "
            "before init_process_group or in a process of its own"
            + (", or use shardc.report(model) after the first step" if what == "explain" else "")
        )
    sharded = bool(units_of(model))
    if sharded and (world_size is not None or mesh is not None or sharding):
        raise ValueError(
            "the model is sharded already: leave out world_size, mesh and arguments of fully_shard"
        )
    if mesh is not None and world_size is not None:
        raise ValueError("give world_size or mesh, not both")
    if sharded or isinstance(mesh, DeviceMesh):
        if not dist.is_initialized():
            raise ValueError("a mesh needs its process group, which is gone")
        return None
    sizes = tuple(mesh) if mesh is not None else (8 if world_size is None else world_size,)
    whole = all(isinstance(size, int) and size >= 1 for size in sizes)
    if not whole or len(sizes) not in (1, 2):
        raise ValueError(
            f"mesh must be sizes (shard,) or (replicate, shard) of at least 1, got {sizes}"
        )
    ranks = sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]
    if ranks > MAX_WORLD:
        raise ValueError(f"at most {plural(MAX_WORLD, 'rank')} can be planned for, got {ranks:,}")
    if dist.is_initialized() and dist.get_world_size() != ranks:
        raise ValueError(
            "this process has a fake process group of "
            f"{plural(dist.get_world_size(), 'rank')}, and {ranks:,} are "
            "asked for: destroy_process_group() first"
        )
    return sizes


@contextmanager
def fake_ranks(
    sizes: tuple[int, ...] | None, devices_per_node: int | None = None, device_type: str = "cpu"
) -> Iterator[DeviceMesh | None]:
    """A mesh of `sizes` over a fake process group, which ends with the context; None without sizes.

    With `devices_per_node`, the mesh is a `hierarchical_mesh`. Raises ValueError where `sizes` are
    not one size.
    """
    if devices_per_node is not None and (sizes is None or len(sizes) > 1):
        raise ValueError(
            "devices_per_node goes with world_size or a mesh of one size: give no mesh of two, and "
            "a model that is not sharded yet"
        )
    if sizes is None:
        yield None
        return
    own = not dist.is_initialized()
    if own:
        ranks = sizes[0] * sizes[-1] if len(sizes) == 2 else sizes[0]
        compat.join_fake_group(ranks)
    try:
        names = ("replicate", "shard")[-len(sizes) :]
        if devices_per_node is None:
            yield init_device_mesh(device_type, sizes, mesh_dim_names=names)
        else:
            yield hierarchical_mesh(devices_per_node)
    finally:
        if own:
            dist.destroy_process_group()


# -- the model -----------------------------------------------------------------------------------


def sharded_copy(model: nn.Module, mesh: Any, sharding: Mapping[str, Any]) -> nn.Module:
    """A copy of `model` without values, sharded over `mesh` with the arguments `sharding`.

    A copy of a sharded model stays sharded as it is.
    """
    copied = _on_meta(model)
    if not units_of(copied):
        fully_shard(copied, mesh=mesh, **{"units": "auto", **sharding})
    return copied


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` on meta, with tied states tied; of a sharded model, a plain copy."""
    if units_of(model):
        return copy.deepcopy(model)
    memo: dict[int, Any] = {}
    for param in model.parameters():
        twin = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        memo[id(param)] = twin
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def give_fakes(
    model: nn.Module, fake: Callable[[Tensor], Tensor], host_is_apart: bool = False
) -> None:
    """Replace the tensors of a sharded model by fake ones: segments, other parameters, buffers.

    With `host_is_apart`, plan for a device that is not the host.
    """

    def on_host(tensor: Tensor) -> Tensor:
        return fake(tensor).cpu()

    for unit in units_of(model).values():
        for bucket in unit._shardc_unit.buckets:
            convert(bucket, on_host if unit._shardc_unit.settings.offloaded else fake)
        unit._shardc_unit.on_meta = False
        if host_is_apart:
            unit._shardc_unit.change(host_is_apart=True)
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and not hasattr(param, "_slot"):
                setattr(module, name, nn.Parameter(fake(param.detach()), param.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, fake(buffer))
