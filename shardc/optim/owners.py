"""Owners: the rank that computes each update, and the parameters that travel together."""

import math
from collections.abc import Sequence

from torch import Tensor

from shardc.runtime.tensor.shard_spec import ShardSpec
from shardc.runtime.tensor.shard_tensor import ShardTensor


def update_cost(shape: Sequence[int]) -> int:
    """The relative time of an update.

    Optimizers that need whole tensors (orthogonalising, preconditioners) multiply a matrix by
    square matrices of its smaller side. The time of a vector is proportional to its elements.
    """
    numel = math.prod(shape)
    return numel * (min(shape[0], numel // shape[0]) if len(shape) > 1 and numel else 1)


def owners_of(
    shapes: Sequence[Sequence[int]], world_size: int, state: Sequence[int] | None = None
) -> list[int]:
    """An owner for each tensor; ranks get about equal work and about equal state.

    `state` has the bytes of each tensor's state; None: proportional to the tensor's elements.
    """
    held = [math.prod(shape) for shape in shapes] if state is None else state
    return _dealt(
        [(update_cost(shape), size) for shape, size in zip(shapes, held, strict=True)], world_size
    )


def _dealt(costs: Sequence[Sequence[int]], count: int) -> list[int]:
    """One of `count` piles for each item; all piles have about equal costs of each kind.

    The costliest item is dealt first. An item goes to the pile with the least cost, the item
    included: the cost of a pile is its largest share of a kind.
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
"""The most stages of a step, and the least bytes that a rank has of a stage's parameters.

So many bytes take much longer to send than a message takes to start. More stages hold less memory
at once.
"""


def stages_of(nbytes: Sequence[int], owners: Sequence[int], world_size: int) -> list[list[int]]:
    """The positions of parameters by stage; each owner has about as many bytes in every stage."""
    count = min(max(sum(nbytes) // world_size // LEAST_BYTES, 1), MOST_STAGES)
    stages: list[list[int]] = [[] for _ in range(count)]
    for rank in range(world_size):
        own = [index for index, owner in enumerate(owners) if owner == rank]
        for index, stage in zip(own, _dealt([(nbytes[i],) for i in own], count), strict=True):
            stages[stage].append(index)
    return [sorted(stage) for stage in stages if stage]


def on_owner(part: Tensor, shape: Sequence[int], owner: int, like: ShardTensor) -> ShardTensor:
    """A tensor that `owner` holds as a whole, as a ShardTensor over the ranks of `like`.

    `part` is the tensor on the owner, and a tensor of no elements on other ranks.
    """
    numel, spec = math.prod(shape), like._shard_spec
    ranks = (spec.rank, spec.world_size, spec.group)
    whole = ShardSpec(owner * numel, numel, numel, *ranks, mesh=spec.mesh)
    return ShardTensor(part.reshape(-1), shape, whole)
