"""Facts that shape the graph of a step, beside its arguments; each call compares them."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.unit.bucket import Bucket
from shardc.step.constants import Known, is_constant
from shardc.step.updates import Update


class Facts:
    """The facts of one step, read again by `now`."""

    def __init__(self, known: Known, buckets: Iterable[Bucket], updates: Iterable[Update]) -> None:
        self._known, self._buckets = known, list(buckets)
        roots = [module for bucket in self._buckets for module in bucket.owner.modules]
        roots += (each for each in known.objects() if isinstance(each, nn.Module))
        self._modules = _Modules(dict.fromkeys(m for root in roots for m in root.modules()))
        self._params = list(dict.fromkeys(params_of(buckets, updates)))
        self._devices = sorted({bucket.device.type for bucket in buckets})
        self._optimizers = [update.optimizer for update in updates if not update.is_call]
        self.then = self.now()

    def now(self) -> dict[str, object]:
        """The facts, by the words that a warning has for them."""
        return {
            "settings of units": [(b.key.reading()[0], b.trainable) for b in self._buckets],
            "parameters of optimizers": [
                len(group["params"]) for each in self._optimizers for group in each.param_groups
            ],
            "gradients before the step": [param.grad is None for param in self._params],
            "settings of optimizers": [
                {name: _shape_of(value) for name, value in group.items() if name in each.defaults}
                for each in self._optimizers
                for group in each.param_groups
            ],
            "hooks of parameters": [compat.all_hooks(param) for param in self._params],
            "settings of autocast": list(_autocast(self._devices)),
            "torch.get_default_dtype()": torch.get_default_dtype(),
            **self._known.constants(lists=True),
        }

    def changed(self) -> list[str]:
        """The names of the facts that have changed."""
        now = self.now()
        names = [name for name, value in now.items() if (self.then.get(name),) != (value,)]
        return [*names, *self._modules.changed()]


class _Modules:
    """The numbers, texts and flags of modules (`training` is one), their hooks and inner modules.

    One getter for each module reads them all: a step may have hundreds of modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._names = [_names_of(module) for module in self._modules]
        self._getters = [operator.itemgetter(*names) for names in self._names]
        self._then = [tuple(map(_copied, values)) for values in self._now()]

    def _now(self) -> list[tuple[Any, ...]]:
        pairs = zip(self._getters, self._modules, strict=True)
        return [getter(vars(module)) for getter, module in pairs]

    def changed(self) -> list[str]:
        """The attributes that have changed, by the class of their module."""
        try:
            now = self._now()
        except KeyError as error:
            return [f"the attribute {error} of a module"]
        return [
            f"{type(module).__name__}.{name}"
            for module, names, *both in zip(
                self._modules, self._names, self._then, now, strict=True
            )
            if both[0] != both[1]
            for name, before, after in zip(names, *both, strict=True)
            if (before,) != (after,)  # a NaN that is the same object is equal
        ]


def _names_of(module: nn.Module) -> list[str]:
    values = vars(module).items()
    return [k for k, v in values if is_constant(v) or k == "_modules" or k.endswith("_hooks")]


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def params_of(buckets: Iterable[Bucket], updates: Iterable[Update]) -> Iterator[Tensor]:
    """The parameters of buckets and of optimizers."""
    for bucket in buckets:
        yield from bucket.params
    for update in updates:
        for group in update.optimizer.param_groups:
            yield from group["params"]


def _shape_of(value: object) -> object:
    """The part of a setting that shapes an update: 0.0 often leaves ops out."""
    if isinstance(value, float):
        return value != 0.0
    if isinstance(value, (list, tuple)):
        return len(value) if value and isinstance(value[0], Tensor) else [*map(_shape_of, value)]
    return None if isinstance(value, Tensor) else value


def _autocast(devices: Iterable[str]) -> Iterator[object]:
    for device in devices:
        if torch.is_autocast_enabled(device):
            yield device, torch.get_autocast_dtype(device)
