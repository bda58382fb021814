"""An optimizer's first step: warnings about parameters that train in a wrong way.

Before the step: a warning about first values that differ between ranks. After the step, when the
optimizer has a state: a warning about parameters in 16 bits without a copy in more bits. Most
updates are smaller than half of the last digit of such a parameter, and are lost (accelerate#3979:
28 times slower to converge). A process gives each warning once. A compiled step
(`torch.compile(optimizer.step)`) gives neither.
"""

import re
from collections.abc import Iterator

from torch.optim import Optimizer

from shardc.runtime import compat
from shardc.runtime.checks.meta import check_start
from shardc.runtime.checks.optimizer_hooks import Turn, after_steps, before_steps
from shardc.runtime.checks.telling import warn_once
from shardc.runtime.tensor.shard_tensor import ShardTensor

_KEEPS_MORE = re.compile("master|kahan|compensat|stochastic|fp32|float32")
"""Words in the names of states and settings of optimizers that lose no small updates."""


def watch_first_steps() -> None:
    """Look at the first step of each optimizer from now on."""
    before_steps.call(Turn.FIRST, _before, once=True)
    after_steps.call(Turn.FIRST, _after, once=True)


def _before(optimizer: Optimizer, *_: object) -> None:
    check_start(dict.fromkeys(param._slot.bucket.owner for param in _trained(optimizer)))  # type: ignore[attr-defined]


def _after(optimizer: Optimizer, *_: object) -> None:
    low = next(
        (p for p in _trained(optimizer) if p.dtype.itemsize < 4 and p.is_floating_point()), None
    )
    if low is None or _keeps_more(optimizer, low):
        return
    text = (
        f"{type(optimizer).__name__} trains '{low._slot.name}' and others in {low.dtype}, in which "  # type: ignore[attr-defined]
        "most updates are lost by rounding, and keeps no float32 copy: keep parameters in float32 "
        "(model.float() before fully_shard) and give fully_shard "
        f"mp_policy=MixedPrecisionPolicy(param_dtype={low.dtype}) to gather and compute in that"
    )
    warn_once("dtype of a first step", text)


def _trained(optimizer: Optimizer) -> Iterator[ShardTensor]:
    for param in compat.params_of(optimizer):
        if isinstance(param, ShardTensor) and param.requires_grad and hasattr(param, "_slot"):
            yield param


def _keeps_more(optimizer: Optimizer, param: ShardTensor) -> bool:
    """Whether the name of a state or a setting says that the optimizer loses no small updates."""
    group = next(g for g in optimizer.param_groups if any(p is param for p in g["params"]))
    off = (None, False)  # compared by identity: a setting may be a tensor
    settings = [
        n for at in (vars(optimizer), group) for n in at if not any(at[n] is o for o in off)
    ]
    return any(_KEEPS_MORE.search(str(n)) for n in (*settings, *optimizer.state.get(param, {})))
