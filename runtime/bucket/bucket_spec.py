"""From what a bucket is and was asked to the spec of the code that gathers and reduces it."""

from typing import TYPE_CHECKING

import torch

from shardc.runtime import compat
from shardc.runtime.comm.ranks import part_of
from shardc.runtime.layout.spec import Reduction, UnshardSpec

if TYPE_CHECKING:
    from shardc.runtime.bucket.bucket import Bucket


def spec_for(bucket: "Bucket", evaluating: bool = False) -> UnshardSpec:
    """The spec of the code that `bucket` needs now; where it must not sync, it gets a sink."""
    layout, ranks, settings = bucket.layout, bucket.ranks, bucket.settings
    stored = bucket.segment.dtype
    computed, _ = settings.dtypes(stored, evaluating)
    _, reduced = settings.dtypes(stored, evaluating=False)
    reshard = settings.reshard_after_forward
    memory, _ = _memory(bucket)
    return UnshardSpec(
        dtype=stored,
        world_size=layout.world_size,
        group=bucket.gather_group or bucket.group,
        pieces=tuple(layout.split_sizes()),
        shapes=tuple(slot.shape for slot in layout.slots),
        trainable=bucket.trainable,
        reshard_after_forward=bool(reshard),
        reduction=_reduction(bucket, reduced),
        everyone=ranks.everyone if ranks.copies > 1 else None,
        param_dtype=None if computed == stored else computed,
        device=bucket.device.type if is_elsewhere(bucket) else None,
        recut=None if isinstance(reshard, bool) else (reshard, part_of(bucket.group, reshard)),
        held=bucket.gathered.is_held and computed == settings.dtypes(stored, evaluating=False)[0],
        outside=bucket.gathered.is_shared,
        gather=settings.all_gather,
        memory=memory,
        hints=bucket.unit.hints if bucket.unit is not None else (),
    )


def is_elsewhere(bucket: "Bucket") -> bool:
    """Whether the segment lies on the host and is computed on another device."""
    home, settings = bucket.segment.device.type, bucket.settings
    if home == "meta" or not settings.offloaded:
        return False
    return home != bucket.device.type or settings.host_is_apart


def _memory(bucket: "Bucket") -> tuple[str | None, str | None]:
    """Where the buffers of gathers and of reductions come from.

    As with FSDP2, the process group's allocator is asked only where it has one for the device, and
    reductions use symmetric memory only with forced sums (NCCL's symmetric kernels have no mean).
    """
    memory, group = bucket.settings.memory, bucket.group
    if memory == "group" and not compat.group_allocates(group, bucket.device):
        memory = None
    return memory, None if memory == "symmetric" and not bucket.settings.force_sum else memory


def _reduction(bucket: "Bucket", dtype: torch.dtype) -> Reduction:
    settings, ranks, waiting = bucket.settings, bucket.ranks, bucket.gradients.waiting
    if not settings.sync:
        if not any(bucket.trainable):
            return Reduction(dtype=dtype)
        waiting.make_sink(bucket.layout.numel, dtype, bucket.device)
        return Reduction(dtype=dtype, sync=False)
    last = dtype == bucket.segment.dtype and settings.hook is None and not is_elsewhere(bucket)
    _, memory = _memory(bucket)
    op, before, after = settings.division(ranks.world_size * ranks.copies, dtype, bucket.mean_op)
    return Reduction(
        op=op,
        dtype=dtype,
        group=bucket.reduce_group,
        predivide=before,
        postdivide=1.0 if last else after,
        divide_later=after if last else 1.0,
        replicas=ranks.replicas,
        copies=ranks.copies,
        all_reduce=settings.all_reduce or ranks.replicas is None,
        pending=waiting.pending is not None and not waiting.taken,
        partial=waiting.partial is not None and not waiting.taken,
        function=settings.reduce_function,
        scatter=settings.reduce_scatter,
        memory=memory,
        hook=settings.hook,
        hook_sees_mean=dtype != torch.float16 and not settings.force_sum,
    )
