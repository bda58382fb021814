"""Which rank computes the update of which parameter, and which travel together."""

import math
from collections.abc import Sequence

from torch import Tensor

from shardc.runtime.tensor.shard_tensor import ShardSpec, ShardTensor


def update_cost(shape: Sequence[int]) -> int:
    """How long an update takes, in no unit.

    What whole tensors are needed for (orthogonalising, preconditioners) multiplies a tensor by
    square matrices of its sides; an update of a vector goes by its elements.
    """
    return math.prod(shape) * (sum(shape) if len(shape) > 1 else 1)


def owners_of(shapes: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """An owner for each tensor, so that ranks have about equal work."""
    return _dealt([update_cost(shape) for shape in shapes], world_size)


def _dealt(costs: Sequence[int], count: int) -> list[int]:
    """A share for each of `costs`, so that shares are about equal: the costliest is dealt first, to
    the share that has the least."""
    shares, load = [0] * len(costs), [0] * count
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        share = min(range(count), key=load.__getitem__)
        shares[index] = share
        load[share] += costs[index]
    return shares


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
        for index, stage in zip(own, _dealt([nbytes[i] for i in own], count), strict=True):
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
    spec = like._spec
    whole = ShardSpec(owner * numel, numel, numel, spec.rank, spec.world_size, spec.group)
    return ShardTensor(empty if value is None else value.reshape(-1), shape, whole)
