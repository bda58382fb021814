"""Names for code outside of shardc that adds passes, hardware profiles, devices or backends."""

from shardc.passes import pipeline
from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.estimate.cost import collective_seconds
from shardc.passes.estimate.hardware import PROFILES, Link, Profile
from shardc.passes.runner import run_passes
from shardc.runtime.groups.backends import CommBackend, register_backend
from shardc.runtime.groups.devices import DeviceType, register_device

__all__ = [
    "PROFILES",
    "CommBackend",
    "DeviceType",
    "Link",
    "PassContext",
    "Profile",
    "collective_seconds",
    "contract",
    "pipeline",
    "register_backend",
    "register_device",
    "run_passes",
]
