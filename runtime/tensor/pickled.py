"""A rank pickles its part of a tensor into a file of its own: `torch.save(model.state_dict())`.

The file has the local part and its place in the tensor. So the part loads on the same rank, at the
same number of ranks. Rank 0 warns when it pickles: code that saves on rank 0 alone would lose the
other parts. Loading finds the group by its name, if the group has the same ranks. A part without a
group can be copied into a parameter with the same cut, but cannot be gathered.
"""

from typing import Any

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.refusal import SAVE_WHOLE, caller_and_way_out
from shardc.runtime.checks.telling import warn
from shardc.runtime.tensor.shard_spec import ShardSpec
from shardc.runtime.tensor.sharded import Sharded


def reduced(tensor: Sharded) -> tuple[object, ...]:
    """The value of `__reduce_ex__` for a ShardTensor that is no parameter.

    Raises:
        NotImplementedError: tensor parallelism cuts the tensor too; no file can hold its mesh.
    """
    spec = tensor._shard_spec
    if spec.tp is not None:
        raise NotImplementedError(
            f"{tensor._label()} is also cut by tensor parallelism and cannot be pickled "
            "(torch.save). Save it with torch.distributed.checkpoint, or save .full_tensor()"
        )
    if spec.rank == 0 and spec.world_size > 1:
        _tell_that_it_is_a_part(spec)
    cut = (spec.offset, spec.numel, spec.segment, spec.rank, spec.world_size)
    place = (*cut, spec.group, spec.everyone, *map(compat.ranks_of, (spec.group, spec.everyone)))
    return rebuild_part, (tensor._local, tuple(tensor.shape), place)


def _tell_that_it_is_a_part(spec: ShardSpec) -> None:
    """Warn once for each caller that saves: no rank knows whether the others save their parts."""
    caller, _ = caller_and_way_out()
    warn(
        f"a sharded tensor was pickled{caller}: the file has the part of rank 0 of "
        f"{spec.world_size} alone, which is right where every rank saves a file of its own. "
        f"{SAVE_WHOLE}"
    )


def rebuild_part(local: Tensor, shape: tuple[int, ...], place: tuple[Any, ...]) -> Sharded:
    """Rebuild a ShardTensor from the values that `reduced` gave."""
    offset, numel, segment, rank, world_size, group, everyone, ranks, ranks_of_everyone = place
    found = compat.ranks_of(group), compat.ranks_of(everyone)
    if not group or found != (ranks, ranks_of_everyone):
        group = everyone = ""
    spec = ShardSpec(offset, numel, segment, rank, world_size, group, everyone=everyone)
    return Sharded.make(local, shape, spec)


torch.serialization.add_safe_globals([rebuild_part])
