"""Owners: which rank computes the update of which parameter, and which travel together."""

import math
from collections.abc import Sequence

from torch import Tensor

from shardc.runtime.tensor.shard_spec import ShardSpec
from shardc.runtime.tensor.shard_tensor import ShardTensor


def update_cost(shape: Sequence[int]) -> int:
    """How long an update takes, in no unit.

    What whole tensors are needed for (orthogonalising, preconditioners) multiplies a matrix by
    square ones of its smaller side; an update of a vector goes by its elements.
    """
    numel = math.prod(shape)
    return numel * (min(shape[0], numel // shape[0]) if len(shape) > 1 and numel else 1)


def owners_of(
    shapes: Sequence[Sequence[int]], world_size: int, state: Sequence[int] | None = None
) -> list[int]:
    """An owner for each tensor, so that ranks have about equal work and about equal state.

    Args:
        state: bytes of each tensor's state; None: they go by its elements.
    """
    held = [math.prod(shape) for shape in shapes] if state is None else state
    return _dealt(
        [(update_cost(shape), size) for shape, size in zip(shapes, held, strict=True)], world_size
    )


def _dealt(costs: Sequence[Sequence[int]], count: int) -> list[int]:
    """One of `count` piles for each item, so that piles cost about as much in every way.

    The costliest is dealt first, to the pile that is then the least of all in its worst way.

    Args:
        costs: of each item, in one or more ways.
    """
    totals = [max(sum(way), 1) for way in zip(*costs, strict=True)]
    shares = [[cost / total for cost, total in zip(c, totals, strict=True)] for c in costs]
    load = [[0.0] * len(totals) for _ in range(count)]
    piles = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -max(shares[i])):
        after = [[a + b for a, b in zip(shares[index], pile, strict=True)] for pile in load]
        piles[index] = min(range(count), key=lambda pile: (max(after[pile]), sum(after[pile])))
        load[piles[index]] = after[piles[index]]
    return piles


MOST_STAGES, LEAST_BYTES = 8, 4 * 2**20
"""How many stages a step has at most, and what a rank has of a stage's parameters at least: so much
takes much longer to send than a message takes to start. More stages hold less memory at once."""


def stages_of(nbytes: Sequence[int], owners: Sequence[int], world_size: int) -> list[list[int]]:
    """Parameters by stage: positions, in each stage about as many bytes of every owner.

    Args:
        nbytes: of each parameter.
        owners: of each parameter.
    """
    count = min(max(sum(nbytes) // world_size // LEAST_BYTES, 1), MOST_STAGES)
    stages: list[list[int]] = [[] for _ in range(count)]
    for rank in range(world_size):
        own = [index for index, owner in enumerate(owners) if owner == rank]
        for index, stage in zip(own, _dealt([(nbytes[i],) for i in own], count), strict=True):
            stages[stage].append(index)
    return [sorted(stage) for stage in stages if stage]


def on_owner(
    value: Tensor | None, shape: Sequence[int], owner: int, like: ShardTensor, empty: Tensor
) -> ShardTensor:
    """A tensor of which `owner` holds all, as one that is sharded over the ranks of `like`.

    Args:
        value: the tensor, on the owner; others give None.
        empty: of no elements, with the dtype and device of the others' parts.
    """
    numel = math.prod(shape)
    spec = like._shard_spec
    ranks = (spec.rank, spec.world_size, spec.group)
    whole = ShardSpec(owner * numel, numel, numel, *ranks, mesh=spec.mesh)
    return ShardTensor(empty if value is None else value.reshape(-1), shape, whole)
