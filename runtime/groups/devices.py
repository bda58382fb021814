"""Types of devices: the facts of each that torch does not tell, one entry a type.

Code that depends on a type of device reads the facts here; streams, copies and indices go by
`torch.accelerator`. CUDA graphs and the tools for GPUs name CUDA (docs/adding.md lists them).
`fully_shard` refuses a type without an entry.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceType:
    """Facts of a type of device.

    Attributes:
        name: the name that `torch.device` takes.
        backend: the backend of collectives of its groups, by its name in `BACKENDS`.
        profile: the hardware profile to plan with where the device's name tells none.
        has_symmetric_memory: whether torch has symmetric memory for it.
        compiles_ahead: whether `precompile` can compile for it.
    """

    name: str
    backend: str
    profile: str
    has_symmetric_memory: bool = False
    compiles_ahead: bool = False


DEVICES: dict[str, DeviceType] = {
    each.name: each
    for each in (
        DeviceType("cpu", "gloo", "cpu", compiles_ahead=True),
        DeviceType("cuda", "nccl", "h100-nvlink", has_symmetric_memory=True, compiles_ahead=True),
    )
}


def register_device(device: DeviceType) -> None:
    """Register a type of device under its name; every rank does so before `fully_shard`."""
    DEVICES[device.name] = device


def device_named(name: str) -> DeviceType:
    """The facts of a type of device.

    Raises:
        NotImplementedError: the type has no entry.
    """
    if name not in DEVICES:
        raise NotImplementedError(
            f"shardc runs on devices of the types {named_devices()}, got '{name}': describe it to "
            f"shardc.extending.register_device(DeviceType('{name}', backend=..., profile=...)) "
            "first"
        )
    return DEVICES[name]


def named_devices(having: Callable[[DeviceType], bool] = lambda device: True) -> str:
    """The names of the types that have a fact, in words: "'cpu' and 'cuda'"."""
    return " and ".join(f"'{device.name}'" for device in DEVICES.values() if having(device))


def device_board(device_type: str) -> str:
    """The name that torch has for the installed device; "" without a device or a name."""
    if device_type == "cpu":
        return ""
    module = torch.get_device_module(device_type)
    named = getattr(module, "get_device_name", None)
    return str(named()) if named is not None and module.is_available() else ""
