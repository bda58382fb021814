"""`fit`: the largest batch that a device's memory holds, and the fewest ranks that hold a model.

`explain` plans every size with a memory budget, so a size fits by the plan that a run would make. A
plan that does not fit gives the bytes that it needs, and the search goes on from these: a handful
of plans is enough.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardc.passes.budget.choose import BudgetTooSmall
from shardc.passes.estimate.hardware import Profile, as_profile, budget_bytes
from shardc.planning.explain import explain
from shardc.reports.report import Report
from shardc.runtime.checks.arguments import Count, checked
from shardc.runtime.checks.words import plural
from shardc.runtime.unit.precision import map_tensors

CLOSE = 0.02
"""A size counts as the largest if a size larger by this fraction does not fit."""
LARGEST = 1 << 20
"""The size at which the search ends."""

Plan = Callable[[int], Report]
"""Gives the report of a size; raises BudgetTooSmall where the size does not fit."""


@dataclass(frozen=True)
class Fit:
    """The largest size that fits, or the smallest.

    Attributes:
        size: the size; 0 where none fits.
        report: the report of its step; None where none fits.
        least: bytes that the nearest size that does not fit would need; None where all fit.
        planned: how many sizes were planned.
    """

    size: int
    report: Report | None
    least: int | None
    planned: int


@checked
def fit(
    model: nn.Module,
    *args: Any,
    memory: int | float | str,
    kwargs: Mapping[str, Any] | None = None,
    world_size: Count = 8,
    dim: int = 0,
    profile: Profile | str = "h100-nvlink",
    options: dict[str, Any] | None = None,
    progress: Callable[[str], object] = str,
    **sharding: Any,
) -> Fit:
    """Find how many times the example inputs fit: the largest batch, or the longest sequence.

    Args:
        model: the model, as for `explain`; not sharded yet.
        args, kwargs: example inputs of one rank. They are repeated along `dim`.
        memory: bytes of a device: a count, a text such as "80GB", or a fraction of the profile's
            memory.
        world_size: ranks to shard over.
        dim: the dim of every input that grows: 0 the batch, 1 the sequence of (batch, length).
        profile, options, sharding: as for `explain`.
        progress: called with each size before it is planned, in words.

    Returns:
        The largest size, in repeats of the example inputs.

    Raises:
        ValueError: no input has that dim, or an error of `explain`.
        RuntimeError: an error of `explain`.
    """
    if not any(tensor.ndim > dim for tensor in _tensors((args, kwargs))):
        raise ValueError(f"no example input has a dim {dim} to grow: give tensors that have one")

    def plan(size: int) -> Report:
        progress(f"{size} x the example inputs")
        grow = functools.partial(_repeated, dim=dim, size=size)
        given, named = map_tensors(grow, (tuple(args), dict(kwargs or {})))
        return planned(*given, kwargs=named, world_size=world_size)

    nbytes = budget_bytes(memory, as_profile(profile))
    planned = functools.partial(
        explain, model, profile=profile, options=options, memory_budget=nbytes, **sharding
    )
    return largest(plan, nbytes)


@checked
def fewest_ranks(
    model: nn.Module,
    *args: Any,
    memory: int | float | str,
    kwargs: Mapping[str, Any] | None = None,
    profile: Profile | str = "h100-nvlink",
    options: dict[str, Any] | None = None,
    progress: Callable[[str], object] = str,
    **sharding: Any,
) -> Fit:
    """Find the fewest ranks on which a step of the example inputs fits; arguments as for `fit`.

    From one node of the profile's size on, only whole nodes count.
    """
    node = as_profile(profile).node_size
    sizes = [1 << power for power in range(node.bit_length()) if 1 << power < node]
    sizes += [node << power for power in range(12) if node << power <= 16384]

    def plan(number: int) -> Report:
        progress(plural(sizes[-number], "rank"))
        return planned(*args, kwargs=kwargs, world_size=sizes[-number])

    nbytes = budget_bytes(memory, as_profile(profile))
    planned = functools.partial(
        explain, model, profile=profile, options=options, memory_budget=nbytes, **sharding
    )
    tries = _Tries(plan, len(sizes) + 1)
    while tries.border - tries.size > 1 and tries.planned <= len(sizes):
        tries.fits((tries.size + tries.border) // 2)
    found = tries.found()
    return Fit(sizes[-found.size] if found.size else 0, found.report, found.least, found.planned)


def _tensors(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, inputs)  # type: ignore[func-returns-value]
    return found


def _repeated(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Repeat a tensor along `dim`, on meta: only the shape counts."""
    if tensor.ndim <= dim:
        return tensor
    return tensor.to("meta").repeat([size if each == dim else 1 for each in range(tensor.ndim)])


def largest(plan: Plan, memory: int) -> Fit:
    """Find the largest size for which `plan` does not raise `BudgetTooSmall`.

    The bytes needed mostly grow linearly with the size, so two sizes that do not fit give a guess
    of the border. Where a guess leaves more than half of the interval, the middle is tried.
    """
    tries = _Tries(plan)
    size = 1
    while tries.fits(size) and size < LARGEST:
        size *= 4
    if tries.border - tries.size > 1 and len(tries.least) == 1:
        tries.fits(2 * size)
    guessed = True
    while tries.least and tries.border - tries.size > max(1, CLOSE * tries.size):
        between = tries.border - tries.size
        guess = float(tries.size + tries.border) / 2
        if guessed and len(tries.least) > 1:
            (near, its), (far, others) = sorted(tries.least.items())[:2]
            guess = near - (its - memory) * (far - near) / max(others - its, 1)
        tries.fits(math.floor(min(max(guess, tries.size + 1), tries.border - 1)))
        guessed = 2 * (tries.border - tries.size) <= between  # else halve the interval
    return tries.found()


class _Tries:
    """Sizes that were planned: the largest one that fits, the smallest one that does not."""

    def __init__(self, plan: Plan, border: int = 2 * LARGEST) -> None:
        self._plan = plan
        self.size, self.border, self.planned = 0, border, 0
        self.least: dict[int, int] = {}
        self._report: Report | None = None

    def fits(self, size: int) -> bool:
        """Plan a size; whether it fits."""
        self.planned += 1
        try:
            report = self._plan(size)
        except BudgetTooSmall as error:
            self.least[size] = error.least
            self.border = min(self.border, size)
            return False
        if size > self.size:
            self.size, self._report = size, report
        return True

    def found(self) -> Fit:
        """The largest size that fits."""
        return Fit(self.size, self._report, self.least.get(self.border), self.planned)
