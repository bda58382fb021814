"""The spec of the code that gathers and reduces a bucket, from the bucket's layout and settings.

`groups_for` makes the groups that the spec names; `spec_for` has no side effects.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from shardc.runtime import compat
from shardc.runtime.groups.backends import backend_of
from shardc.runtime.groups.communicators import own_group
from shardc.runtime.groups.hierarchy import own_hierarchy
from shardc.runtime.layout.spec import Hierarchy, Reduction, UnshardSpec
from shardc.runtime.layout.wire_format import WireFormat

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket


@dataclass(frozen=True)
class BucketGroups:
    """The names of the groups that a bucket communicates in.

    Attributes:
        gather: the group of gathers.
        reduce: the group of reductions; None: the group of gathers.
        recut: (ranks, group) of the backward's gathers; None: the group of gathers.
        gather_steps, reduce_steps: the groups where gathers, or reductions, go in two steps.
        mean_op: "avg" where the backend averages by itself, else "sum".
    """

    gather: str
    reduce: str | None
    recut: tuple[int, str] | None
    gather_steps: Hierarchy | None
    reduce_steps: Hierarchy | None
    mean_op: str


def groups_for(bucket: "Bucket") -> BucketGroups:
    """The groups that the bucket's settings ask for, made at first use.

    Every rank of the bucket must call it.
    """
    settings, shared, steps = bucket.settings, bucket.ranks.shard, bucket.ranks.hierarchy
    asked = {"gather": settings.gathers_on, "reduce": settings.reduces_on}
    own = {
        purpose: own_group(shared, purpose, on == "urgent")
        for purpose, on in asked.items()
        if on != "shared"
    }
    gather_steps = reduce_steps = steps
    if steps is not None:  # a step that waits for the network must not hold up a step inside a node
        reduce_steps = own_hierarchy(steps, "reduce", asked["reduce"] == "urgent")
        if "gather" in own:
            gather_steps = own_hierarchy(steps, "gather", asked["gather"] == "urgent")
    size = settings.reshard_after_forward
    part = None
    if not isinstance(size, bool):
        inside = steps.inside if steps is not None and size == steps.local else None
        part = size, inside or own_group(shared, f"of_{size}", size=size)
    mean_op = "avg" if backend_of(shared, bucket.device.type).averages else "sum"
    return BucketGroups(
        gather=own.get("gather", shared),
        reduce=own.get("reduce", shared if "gather" in own else None),
        recut=part,
        gather_steps=gather_steps,
        reduce_steps=reduce_steps,
        mean_op=mean_op,
    )


def spec_for(bucket: "Bucket", groups: BucketGroups, evaluating: bool = False) -> UnshardSpec:
    """The spec of the code that `bucket` needs now."""
    layout, ranks, settings = bucket.layout, bucket.ranks, bucket.settings
    stored = bucket.segment.dtype
    computed, _ = settings.dtypes(stored, evaluating)
    _, reduced = settings.dtypes(stored, evaluating=False)
    memory, _ = _memory(bucket)
    own = settings.all_gather is not None or memory is not None
    return UnshardSpec(
        dtype=stored,
        world_size=layout.world_size,
        group=groups.gather,
        pieces=tuple(layout.split_sizes()),
        shapes=tuple(slot.shape for slot in layout.slots),
        trainable=bucket.trainable,
        reshard_after_forward=bool(settings.reshard_after_forward),
        reduction=_reduction(bucket, groups, reduced),
        everyone=ranks.everyone if ranks.copies > 1 else None,
        param_dtype=None if computed == stored else computed,
        device=bucket.device.type if is_elsewhere(bucket) else None,
        recut=groups.recut if bucket.extension is None else None,
        held=bucket.gathered.is_held and computed == settings.dtypes(stored, evaluating=False)[0],
        kept=_is_kept(bucket) and not evaluating,
        outside=bucket.gathered.is_shared,
        gather=settings.all_gather,
        memory=memory,
        extension=None if bucket.extension is None else bucket.extension.key,
        wire=None if settings.is_full_precision(evaluating) else _wire(bucket, "gather"),
        hierarchy=None if own or bucket.extension is not None else groups.gather_steps,
        hints=bucket.unit.hints if bucket.unit is not None else (),
    )


def is_elsewhere(bucket: "Bucket") -> bool:
    """Whether the segment lies on the host, and another device computes the unit."""
    home, settings = bucket.segment.device.type, bucket.settings
    if home == "meta" or not settings.offloaded:
        return False
    return home != bucket.device.type or settings.host_is_apart


def _is_kept(bucket: "Bucket") -> bool:
    """Whether a compiled graph that gathers the bucket gives it out whole, to be held.

    The graph saves it for the backward as it is. A bucket that an object of the user gathers, or
    that lies in the memory of a group, is gathered again where it is held.
    """
    settings, gathered = bucket.settings, bucket.gathered
    if settings.reshard_after_forward or settings.reshard_after_backward:
        return False
    return not gathered.is_held and not gathered.is_shared and can_stay_gathered(bucket)


def can_stay_gathered(bucket: "Bucket") -> bool:
    """Whether a step may keep the bucket gathered by itself.

    The gathers of an object of the user, of a tensor's own extension and of parameters on the host
    stay where the user has them.
    """
    settings = bucket.settings
    own = settings.all_gather is not None or settings.memory is not None
    is_cut = bucket.layout.world_size > 1
    return is_cut and not own and bucket.extension is None and not settings.offloaded


def _wire(bucket: "Bucket", purpose: Literal["gather", "reduce"]) -> WireFormat | None:
    """The wire format of a bucket's gathers or reductions; None: values travel in their dtype.

    A collective of the user's own gets values in their dtype.

    With copies of the model, the ranks of one copy count as a node: values are not quantised among
    the ranks of one copy, and gradients are quantised among the copies.
    """
    layout, settings, copies = bucket.layout, bucket.settings, bucket.ranks.copies
    if purpose == "gather":
        own = settings.all_gather
    else:
        own = settings.reduce_function or settings.reduce_scatter
    form = settings.wire_format(layout, purpose)
    if form is None or own is not None:
        return None
    if copies > 1:
        fits = layout.exact < form.row_of(layout.segment, copies)
        return form if purpose == "reduce" and fits else None
    return form if layout.world_size > 1 else None


def _memory(bucket: "Bucket") -> tuple[str | None, str | None]:
    """The allocators of the buffers of gathers and of reductions; None: the device's own.

    As in FSDP2, a process group without an allocator for the device is not asked, and reductions
    use symmetric memory only with forced sums (NCCL's symmetric kernels have no mean).
    """
    memory, group = bucket.settings.memory, bucket.ranks.shard
    if memory == "group" and not compat.group_allocates(group, bucket.device):
        memory = None
    return memory, None if memory == "symmetric" and not bucket.settings.force_sum else memory


def _reduction(bucket: "Bucket", groups: BucketGroups, dtype: torch.dtype) -> Reduction:
    settings, ranks, waiting = bucket.settings, bucket.ranks, bucket.gradients.waiting
    last = dtype == bucket.segment.dtype and settings.hook is None and not is_elsewhere(bucket)
    _, memory = _memory(bucket)
    own = settings.reduce_function or settings.reduce_scatter or memory
    op, before, after = settings.division(ranks.world_size * ranks.copies, dtype, groups.mean_op)
    if not settings.sync:
        return Reduction(dtype=dtype, sync=not any(bucket.trainable))
    return Reduction(
        op=op,
        dtype=dtype,
        group=groups.reduce,
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
        wire=_wire(bucket, "reduce"),
        hierarchy=groups.reduce_steps if own is None else None,
    )
