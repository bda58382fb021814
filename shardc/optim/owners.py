"""Which rank computes the update of which parameter."""

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
    """An owner for each tensor, so that ranks have about equal work: the costliest is dealt first,
    to the rank that has the least."""
    owners, load = [0] * len(shapes), [0] * world_size
    for index in sorted(range(len(shapes)), key=lambda i: -update_cost(shapes[i])):
        owner = min(range(world_size), key=load.__getitem__)
        owners[index] = owner
        load[owner] += update_cost(shapes[index])
    return owners


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
