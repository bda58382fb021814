"""Facts that shape the graph of a step, beside its arguments; each call compares them."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from shardc.backend.recorder import Update
from shardc.runtime.unit.bucket import Bucket
from shardc.step.constants import constants_of


class Facts:
    """The facts of one step, read again by `now`."""

    def __init__(
        self, step: Callable[..., object], buckets: Iterable[Bucket], updates: Iterable[Update]
    ) -> None:
        self._step, self._buckets = step, list(buckets)
        roots = dict.fromkeys(module for bucket in buckets for module in bucket.owner.modules)
        self._modules = list(dict.fromkeys(m for root in roots for m in root.modules()))
        self._params = list(dict.fromkeys(params_of(buckets, updates)))
        self._devices = sorted({bucket.device.type for bucket in buckets})
        self._optimizers = [update.optimizer for update in updates if not update.is_call]
        self.then = self.now()

    def now(self) -> dict[str, object]:
        """The facts, by the words that a warning has for them."""
        return {
            "settings of units": [(b.key.reading()[0], b.trainable) for b in self._buckets],
            "train() or eval()": [module.training for module in self._modules],
            "parameters": [
                len(group["params"]) for each in self._optimizers for group in each.param_groups
            ],
            "gradients": [param.grad is None for param in self._params],
            "settings of optimizers": [
                {name: _shape_of(value) for name, value in group.items() if name in each.defaults}
                for each in self._optimizers
                for group in each.param_groups
            ],
            "autocast": list(_autocast(self._devices)),
            **constants_of(self._step),
        }

    def changed(self) -> list[str]:
        """The names of the facts that have changed."""
        now = self.now()
        return [name for name, value in now.items() if self.then.get(name) != value]


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
