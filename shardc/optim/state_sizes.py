"""The bytes of state that an optimizer keeps for each parameter, found by a step on meta tensors.

Owners share memory as evenly as work. Optimizers keep different state for a shape: a momentum, two
factors, square matrices of the sides up to some size. The step needs shapes only, so it costs no
memory and next to no time. A value that the step reads is 1.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardc.optim.independence import keeping_random_states
from shardc.runtime import compat

log = logging.getLogger("shardc")


def state_sizes(make: Callable[[], Optimizer], params: Sequence[nn.Parameter]) -> list[int]:
    """The bytes of each parameter's state; if a step on meta fails, the bytes of the parameter.

    Args:
        make: makes the optimizer of `params`.
        params: parameters on meta.
    """
    own = [param.nbytes for param in params]
    try:
        with (
            keeping_random_states(),
            torch.compiler.set_stance("force_eager"),
            compat.OnesForValues(),
        ):
            optimizer = make()
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
    except Exception as error:
        log.info("its state is taken to be as large as the parameters: %s", error)
        return own
    states = [tree_leaves(optimizer.state.get(param, {})) for param in params]
    sizes = [sum(t.nbytes for t in state if isinstance(t, Tensor)) for state in states]
    return sizes if any(sizes) else own
