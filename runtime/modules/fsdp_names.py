"""Private names of FSDP2 that other code uses on an `FSDPModule`.

torch's pipeline stages reduce through these names, and training code looks into them. A few names
work here; for any other name an error says the public way.
"""

import weakref
from typing import NoReturn

from torch import nn

from shardc.runtime.checks.meta import units_in
from shardc.runtime.unit.unit import Unit


class FSDPNames:
    """The state of a module, its context and its one parameter group, under FSDP2's names."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def _units(self, inner: bool) -> list[Unit]:
        """The module's unit; with `inner`, also the units inside, each once."""
        module = self._module()
        assert module is not None
        return units_in(module, inner)

    @property
    def _state_ctx(self) -> "FSDPNames":
        return self

    @property
    def all_states(self) -> list["FSDPNames"]:
        """A state for the module's unit and for each unit inside."""
        return [FSDPNames(unit.modules[0]) for unit in self._units(inner=True)]

    _fsdp_param_group = _state_ctx

    @property
    def _fsdp_param_groups(self) -> list["FSDPNames"]:
        return [self]

    @property
    def post_forward_mesh_info(self) -> bool | int | None:
        """The unit's `reshard_after_forward`; None where parameters stay gathered.

        Codebases read it and write it back, since a root of FSDP2 clears it at its first forward.
        """
        (unit,) = self._units(inner=False)
        return unit.settings.reshard_after_forward or None

    @post_forward_mesh_info.setter
    def post_forward_mesh_info(self, read: bool | int | None) -> None:
        for unit in self._units(inner=False):
            unit.asked_reshard = read or False
            unit.settle()

    def post_backward(self) -> None:
        """Reduce gradients of the unit that backwards without sync have left."""
        for unit in self._units(inner=False):
            for bucket in unit.buckets:
                bucket.gradients.flush()

    def lazy_init(self) -> None:
        """Do nothing: nothing is left to do."""

    _lazy_init = _root_post_backward_final_callback = lazy_init

    def __deepcopy__(self, memo: dict[int, nn.Module]) -> "FSDPNames":
        module = self._module()
        return FSDPNames(memo[id(module)])

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"'{name}' is a private name of FSDP2, which shardc does not have. Public ways: "
            "shardc.units_of(model) names the units, shardc.describe(model) shows how each is "
            "sharded, and the methods of FSDPModule (unshard, reshard, set_...) change it"
        )
