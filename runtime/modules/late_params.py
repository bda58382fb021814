"""Parameters that came into a sharded model after `fully_shard`: no rank reduces their gradients.

An adapter that is added later, or a module that takes the place of another, holds plain parameters,
and each rank would train its own values. A step of an optimizer that holds such a parameter is
refused. A parameter that `ignored_params` left alone, or a frozen one, is allowed.
"""

import weakref
from collections.abc import Iterator

import torch

from shardc.runtime import compat
from shardc.runtime.checks.meta import units_in
from shardc.runtime.checks.optimizer_hooks import Turn, before_steps
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.unit.unit import Unit

_units: "weakref.WeakSet[Unit]" = weakref.WeakSet()
_known: "weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]]" = weakref.WeakKeyDictionary()
"""By optimizer, the ids of plain parameters that are in no sharded model, or were left alone there.

No weak references to parameters: torch could not swap them, as `to()` does with DTensors.
"""


def watch_for_late_params(unit: Unit) -> None:
    """Check optimizers for plain parameters below the unit's modules from now on."""
    _units.add(unit)
    _known.clear()
    before_steps.call(Turn.LATE, _refuse_late)


def _refuse_late(optimizer: torch.optim.Optimizer, *_: object) -> None:
    params = compat.params_of(optimizer)
    plain = {id(p) for p in params if p.requires_grad and not isinstance(p, ShardTensor)}
    unknown = plain - _known.get(optimizer, set())
    if not unknown:
        return
    for unit in sorted((unit for unit in _units if unit.is_root), key=lambda unit: unit.number):
        for name in _late(unit, unknown):
            raise RuntimeError(
                f"'{name}' came into the sharded {unit.name} after fully_shard (as add_adapter and "
                f"load_adapter do) and {type(optimizer).__name__} would train it: no rank reduces "
                "its gradient, so each rank would have its own values. Add it before fully_shard; "
                "or call fully_shard on the module that has it, and make the optimizer anew. What "
                "each rank shall train by itself is named in ignored_params"
            )
    _known[optimizer] = plain


def _late(unit: Unit, plain: set[int]) -> Iterator[str]:
    """The names of the parameters with ids in `plain` below a root unit, unless left alone."""
    for root in unit.modules:
        inner = units_in(root)
        alone = {below for each in inner for module in each.skipped for below in module.modules()}
        wanted = plain - {id(param) for each in inner for param in each.ignored}
        for prefix, module in root.named_modules():
            for name, param in module.named_parameters(recurse=False):
                if id(param) in wanted and module not in alone:
                    yield f"{prefix}.{name}".lstrip(".")
