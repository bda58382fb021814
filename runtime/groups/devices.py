"""Types of devices: the facts of each that torch does not tell, one entry a type.

Whatever depends on a type of device reads it here; streams, copies and indices go by
`torch.accelerator`. A type without an entry is refused by `fully_shard`.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceType:
    """Facts of a type of device.

    Attributes:
        name: as `torch.device` takes it.
        backend: the backend of collectives that its groups have, by its name in `BACKENDS`.
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
    """Know a type of device by its name from now on; every rank does so before `fully_shard`."""
    DEVICES[device.name] = device


def device_named(name: str) -> DeviceType:
    """The facts of a type of device.

    Raises:
        NotImplementedError: there is no entry.
    """
    if name not in DEVICES:
        known = " and ".join(map(repr, DEVICES))
        raise NotImplementedError(
            f"shardc runs on devices of the types {known}, got '{name}': describe it to "
            f"shardc.extending.register_device(DeviceType('{name}', backend=..., profile=...)) "
            "first"
        )
    return DEVICES[name]


def board_of(device_type: str) -> str:
    """The name that torch has for the device installed, "" where there is none or it has none."""
    if device_type == "cpu":
        return ""
    module = torch.get_device_module(device_type)
    named = getattr(module, "get_device_name", None)
    return str(named()) if named is not None and module.is_available() else ""
