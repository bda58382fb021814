"""Models with different first values on the ranks: an error or a warning where they are used.

`fully_shard` notes on a unit how the first values of the ranks differ. A model with values that
were loaded or written afterwards is not checked: each bucket knows whether it was written since.
"""

from collections.abc import Iterable
from typing import Protocol

from shardc.runtime.checks.telling import is_first_to_tell, warn

_told: list[str] = []
"""The parameter that the warning named; a process warns once."""


class StartedUnit(Protocol):
    """The interface of a unit whose start is checked."""

    name: str
    number: int
    differs: str

    @property
    def lacks_values(self) -> bool:
        """Whether the unit was on meta on some ranks only, and was not written since."""

    @property
    def is_as_sharded(self) -> bool:
        """Whether a bucket of the unit has the values that the ranks had at first."""


def check_start(units: Iterable[StartedUnit]) -> None:
    """Raise for units that have values on some ranks only; warn once of units that differ.

    Raises:
        RuntimeError: names the unit, and the ways to give it values.
    """
    for unit in sorted(units, key=lambda unit: unit.number):
        if unit.lacks_values:
            raise RuntimeError(
                f"parameters of '{unit.name}' had values on some ranks and were on the meta device "
                "on others when fully_shard was called, and nothing was loaded since: load a state "
                "dict on all ranks (set_model_state_dict with full_state_dict=True and "
                "broadcast_from_rank0=True), or give fully_shard sync_module_states=True, to start "
                "from those of rank 0"
            )
        if unit.differs and unit.is_as_sharded and not _told:
            _told.append(unit.differs)
            if not is_first_to_tell("first values"):
                continue
            warn(
                f"ranks had different values in {unit.differs} of {unit.name} "
                "when fully_shard was called, and none were loaded since: each rank has kept its "
                "part of its own, so the model is a patchwork. Seed all ranks alike before the "
                "model is built, give fully_shard sync_module_states=True, or load a checkpoint "
                "before the first step"
            )
