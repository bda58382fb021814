"""A test whether an optimizer updates each parameter by itself.

The optimizer runs twice on a few small tensors: on all tensors together, and on each alone. If
values, state or settings of a group differ, the optimizer computes something over all parameters (a
step size estimated from all gradients, a global norm, draws of one generator), and the parameters
must stay together.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.optim.given import OWN

log = logging.getLogger("shardc")

SIDE = 6
"""The largest size of a dim of the tensors that are tried."""
_STEPS, _TRIED, _RATE = 3, 4, 0.01

Make = Callable[[dict[int, nn.Parameter]], Optimizer]
"""Makes an optimizer of some of the parameters, given by position."""


def is_independent(make: Make, shapes: Sequence[Sequence[int]], groups: Sequence[int]) -> bool:
    """Whether an optimizer may update parameters apart; not where it fails on small tensors.

    `shapes` and `groups` are the shape and the parameter group of each parameter.
    """
    chosen = _chosen(shapes, groups)
    try:
        with keeping_random_states(), torch.enable_grad():
            together = _run(make, chosen, shapes)
            apart = {index: _run(make, [index], shapes)[index] for index in chosen}
    except Exception as error:
        log.info("its parameters stay on one rank, as it fails on small tensors: %s", error)
        return False
    return all(_same(together[index], apart[index]) for index in chosen)


@contextmanager
def keeping_random_states() -> Iterator[None]:
    """Restore the states of Python's, numpy's and torch's CPU generators at the end."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _chosen(shapes: Sequence[Sequence[int]], groups: Sequence[int]) -> list[int]:
    """The positions of a few parameters; parameters of different groups and dims come first."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, (shape, group) in enumerate(zip(shapes, groups, strict=True)):
        if all(shape):
            kinds.setdefault((len(shape), group), []).append(index)
    firsts = [indices[0] for indices in kinds.values()]
    others = [index for indices in kinds.values() for index in indices[1:]]
    return sorted((firsts + others)[:_TRIED])


def _run(make: Make, indices: list[int], shapes: Sequence[Sequence[int]]) -> dict[int, Any]:
    """Run some steps; gives, by parameter, its value, its state and the settings of its group."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    params = {
        index: nn.Parameter(_noise([min(side, SIDE) for side in shapes[index]], index))
        for index in indices
    }
    optimizer = make(params)
    for group in optimizer.param_groups:
        if "lr" in group and not group["lr"]:  # zero before a warm-up
            group["lr"] = _RATE
    for step in range(_STEPS):
        for index, param in params.items():
            param.grad = _noise(param.shape, 1000 * (step + 1) + index)
        optimizer.step()
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    return {
        index: (
            param.detach(),
            optimizer.state.get(param, {}),
            {key: value for key, value in group_of[param].items() if key not in OWN},
        )
        for index, param in params.items()
    }


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(list(shape), generator=torch.Generator().manual_seed(seed))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, (int, float, str, bool, complex, type(None))):
        return bool(a == b)
    return type(a) is type(b)  # an object of the optimizer's own
