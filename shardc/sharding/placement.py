"""Devices of the states of a unit: states move to the device of the mesh, or are refused.

Parameters on the CPU are cut onto the device bucket by bucket; a whole model never moves. A model
on the meta device stays there until it is materialised.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.runtime import compat
from shardc.runtime.groups.ranks import Ranks
from shardc.runtime.layout.layout import BucketLayout
from shardc.runtime.layout.padding import new_padded
from shardc.runtime.unit.settings import Settings
from shardc.sharding.sync import scatter_segment

META = torch.device("meta")


def compute_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank on `mesh`: the CPU, or the current accelerator."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def check_devices(named: Mapping[str, Any], device: torch.device, mixed: bool = False) -> None:
    """Raise where the parameters of a unit cannot move to `device` together.

    Parameters may be on the CPU and on `device`, or all on meta.

    Args:
        named: objects with a `.device`, by the parameter's name.
        device: the device that computes the unit.
        mixed: let some parameters be on meta and others not: their values are not used.

    Raises:
        ValueError: another device, or some parameters on meta and others not; names both.
    """
    for name, param in named.items():
        where = param.device
        if where.type not in ("cpu", "meta", device.type):
            raise ValueError(
                f"parameter '{name}' is on {where}, the mesh on '{device.type}': move the model to "
                "the CPU or to the mesh's devices first, or give a mesh of its device"
            )
        if where.type == device.type and where.index != device.index:
            raise ValueError(
                f"parameter '{name}' is on {where}, but the current device of this rank is "
                f"{device}: call torch.{device.type}.set_device({where.index}) before fully_shard, "
                "or move the parameter"
            )
        if compat.is_dtensor(param) and param.device_mesh.device_type != device.type:
            raise ValueError(
                f"parameter '{name}' is a DTensor on a mesh of '{param.device_mesh.device_type}', "
                f"the mesh given to fully_shard is of '{device.type}'"
            )
    on_meta = [name for name, param in named.items() if param.device == META]
    elsewhere = {name: param.device for name, param in named.items() if param.device != META}
    if on_meta and elsewhere and not mixed:
        name, where = next(iter(elsewhere.items()))
        raise ValueError(
            f"parameters of one unit must be all on meta or all have values, but {_some(on_meta)} "
            f"is on meta and '{name}' on {where}: build all of it under torch.device('meta'), "
            "materialise the rest first, or give sync_module_states=True where rank 0 has values"
        )


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"'{names[0]}'{more}"


def new_segment(
    layout: BucketLayout,
    params: list[nn.Parameter],
    settings: Settings,
    device: torch.device,
    source: Ranks | None,
) -> Tensor:
    """The segment of a new bucket, `(S,)`: with the values of rank 0 of `source`, or to fill."""
    home = torch.device("cpu") if settings.offloaded else device
    if source is not None:
        segment = scatter_segment(layout, params, source, device).to(home)
    else:
        where = META if any(param.is_meta for param in params) else home
        segment = new_padded(layout.segment, layout.dtype, where)
    if settings.pinned and device.type != "cpu" and segment.device.type == "cpu":
        segment = segment.pin_memory()
    return segment


def move_buffers(
    modules: Iterable[nn.Module], skipped: Iterable[nn.Module], device: torch.device
) -> None:
    """Move the buffers below `modules` to `device`, except those in `skipped` and on meta.

    Plain buffers stay the same objects, so tied buffers stay tied.
    """
    left_alone = set(skipped)
    for module in (m for root in modules for m in root.modules() if m not in left_alone):
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta or buffer.device == device:
                continue
            if type(buffer) is Tensor:
                buffer.data = buffer.to(device)
            else:  # a subclass, whose inner tensors must move too
                setattr(module, name, buffer.to(device))
