"""The optimizers of torchao that quantise their state (seen in 0.18)."""

import functools
import sys
from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer


class QuantisingOptimizer(Protocol):
    """An optimizer of torchao that quantises its state, as far as shardc needs it."""

    block_size: int

    def _subclass_zeros(self, like: Tensor, signed: bool, block_size: int) -> Tensor: ...


NewBuffer = Callable[[QuantisingOptimizer, Tensor, bool], Tensor]
"""Makes a state of zeros from the optimizer, a parameter, and whether the state is signed."""


def quantises_state(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is an optimizer of torchao that quantises its state."""
    module = sys.modules.get("torchao.optim.adam")
    return module is not None and isinstance(optimizer, module._AdamBase)


@functools.cache
def replace_new_buffer(make: Callable[[NewBuffer], NewBuffer]) -> None:
    """Replace the function by which these optimizers make states, once; `make` gets that one."""
    base = sys.modules["torchao.optim.adam"]._AdamBase
    base._new_buffer = make(base._new_buffer)
