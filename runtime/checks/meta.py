"""First values: errors for states that are still on meta, a warning where ranks had other values.

A sharded module looks for states on meta before a forward only while a flag of its unit says that
some may be there, so a model with values pays for the flag only.

`fully_shard` notes on a unit how the first values of the ranks differ. A model with values that
were loaded or written afterwards is not checked: each bucket knows whether it was written since.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from shardc.runtime.checks.telling import warn_once


def units_in(module: Any, recurse: bool = True) -> list[Any]:
    """The units of `module` and, with `recurse`, of the modules below it, each once.

    Without `recurse`, also the units that joined that of `module` (`Unit.joins`).
    """
    found = (vars(each).get("_shardc_unit") for each in module.modules())
    units = list(dict.fromkeys(unit for unit in found if unit is not None))
    if recurse:
        return units
    own = vars(module).get("_shardc_unit")
    return [unit for unit in units if unit is own or unit.joins(own)]


def states_on_meta(module: nn.Module) -> list[str]:
    """The names of parameters and buffers below `module` that are on meta and not ignored."""
    units = units_in(module)
    ignored = {id(param) for unit in units for param in unit.ignored}
    skipped = {id(m) for unit in units for m in unit.skipped}
    found = []
    for prefix, child in module.named_modules():
        if id(child) in skipped:
            continue
        for states in (child._parameters, child._buffers):
            for name, tensor in states.items():
                if tensor is not None and tensor.is_meta and id(tensor) not in ignored:
                    found.append(f"{prefix}.{name}".lstrip("."))
    return found


def require_values(module: nn.Module) -> None:
    """Raise unless all states below the sharded `module` have left the meta device.

    Raises:
        RuntimeError: names the states that have not.
    """
    names = states_on_meta(module)
    if names:
        refuse_meta(names)
    units = units_in(module)
    if not torch.compiler.is_compiling():  # else the backend checks
        check_start(units)
    for unit in units:
        unit.on_meta = False


def note_loaded(module: nn.Module, incompatible: object) -> None:
    """Look again for states on meta below a sharded `module`, after `load_state_dict`.

    `assign=True` gives values. A forward would notice, too, but Dynamo guards on the code that it
    traces there, and would compile the next forward anew.
    """
    unit = vars(module)["_shardc_unit"]
    if unit.on_meta:
        unit.note_meta()


def check_start(units: Iterable[Any]) -> None:
    """Raise for units that have values on some ranks only; warn once of units that differ.

    `units`: see `runtime/unit/unit.py`.

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
        if unit.differs and unit.is_as_sharded:
            text = (
                f"ranks had different values in {unit.differs} of {unit.name} "
                "when fully_shard was called, and none were loaded since: each rank has kept its "
                "part of its own, so the model is a patchwork. Seed all ranks alike before the "
                "model is built, give fully_shard sync_module_states=True, or load a checkpoint "
                "before the first step"
            )
            warn_once("first values", text, by_one_rank=True)


def refuse_meta(names: Iterable[str]) -> NoReturn:
    """Raise for parameters and buffers that are read while they are on meta."""
    raise RuntimeError(
        f"parameters or buffers are still on the meta device and have no values: {list(names)}. "
        "Call shardc.materialize(model), or model.to_empty(device=...) and then the model's own "
        "initialisation or load_state_dict"
    )
