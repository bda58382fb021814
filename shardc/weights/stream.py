"""A stream of whole tensors: the buckets of a model gathered one after the other.

While the consumer uses the tensors of one bucket, the next bucket is gathered. Each bucket has
memory of its own, which is freed when the consumer lets its tensors go: writers of buffers (vLLM's
`pack_tensors`) hold many tensors before they copy them. A loop holds the last tensor of a bucket
until it gets the first one of the next. So the gather of the bucket after next starts one tensor
later, and two buckets are held at most.

An all-gather moves each byte once to each rank, half of the bytes of the sum in `state.values`,
which in turn needs one tensor at a time.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardc.runtime.checks.arguments import Dtype, checked
from shardc.runtime.comm.collectives import CallStarted, Started, start_all_gather_into
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.watch.agreement import Statement, agree
from shardc.runtime.watch.entering import naming
from shardc.runtime.watch.progress import AwaitedCall
from shardc.sharding.units import units_of
from shardc.state.ranks import ModelRanks
from shardc.state.values import whole
from shardc.weights.adapters import Adapters
from shardc.weights.sources import named_tensors


@checked
def full_tensors(
    model: nn.Module,
    *,
    dtype: Dtype | None = None,
    device: torch.device | str | None = None,
    merge_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Stream all parameters and persistent buffers, whole, by name. Every rank must iterate.

    Tied parameters come under each of their names. The order is that of the buckets, then all
    tensors that are not sharded. Gathered memory is two buckets at most, and the buckets of the
    tensors that the consumer keeps: `clone()` a tensor to keep it alone. A tensor-parallel
    parameter, and a tensor that is widened or moved, needs itself once more. All ranks must stop at
    the same tensor if they stop early (`close()`).

    Args:
        model: a model, sharded or not.
        dtype: the dtype of floating-point tensors; values are cast before they are sent if it is
            narrower. None: the dtype of the parameters in memory.
        device: the device of the tensors; default: the device that computes.
        merge_adapters: give `W + scaling * B @ A` for LoRA of PEFT, under the names of a model
            without adapters; the model does not change.

    Raises:
        ValueError: a tensor is on the meta device, or an adapter cannot be merged.
        RuntimeError: the ranks ask for different tensors, or another rank has an error.
    """
    ranks, error, adapters = ModelRanks.of(model), None, Adapters()
    named: dict[str, Tensor] = {}
    try:
        adapters = Adapters.of(model) if merge_adapters else adapters
        named = named_tensors(model, adapters)
    except ValueError as raised:
        error = raised
    ranks.agree(error, "nothing was sent")
    facts = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in named.items()]
    facts.append(f"dtype={dtype}, merge_adapters={merge_adapters}")
    for group in ranks.groups:
        agree(group, Statement("the tensors of a stream", facts), every_time=True)
    slots = {
        _place_of(param): (bucket, index)
        for module in units_of(model).values()
        for bucket in module._shardc_unit.buckets
        if bucket.extension is None
        for index, param in enumerate(bucket.params)
    }
    target = torch.device(device or ranks.device)
    return _Stream(named, slots, dtype, target, ranks.device, adapters).tensors()


@dataclass
class _Stream:
    """The state of one iteration."""

    named: dict[str, Tensor]
    slots: dict[object, tuple[Bucket, int]]
    dtype: torch.dtype | None
    device: torch.device
    computing: torch.device
    adapters: Adapters
    names: dict[Bucket, dict[int, list[str]]] = field(default_factory=dict)
    rest: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort the names: by bucket and slot, or into the rest."""
        for name, value in self.named.items():
            bucket, index = self.slots.get(_place_of(value), (None, 0))
            if bucket is None or not value.numel():
                self.rest[name] = value
            else:
                self.names.setdefault(bucket, {}).setdefault(index, []).append(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        buckets = list(self.names)
        self.adapters = self.adapters.gathered(self.computing)
        ahead = self._start(buckets[0]) if buckets else None
        try:
            for bucket, following in itertools.zip_longest(buckets, buckets[1:]):
                assert ahead is not None
                full, ahead = ahead.wait(), None
                views = self._views(bucket, full)
                yield next(views)
                ahead = self._start(following) if following is not None else None
                yield from views
        finally:
            if ahead is not None:
                ahead.wait()
        for name, value in self.rest.items():
            yield name, self._given(name, whole(value, self.computing).detach())

    def _sent_as(self, bucket: Bucket) -> torch.dtype:
        """The dtype in which a bucket travels: the narrower one, unless adapters are added."""
        own = bucket.segment.dtype
        names = (name for names in self.names[bucket].values() for name in names)
        if self.dtype is None or not own.is_floating_point or self.dtype.itemsize > own.itemsize:
            return own
        return own if any(name in self.adapters.pairs for name in names) else self.dtype

    @torch.no_grad()
    def _start(self, bucket: Bucket) -> Started | CallStarted:
        bucket.owner.await_updates()
        dtype, layout = self._sent_as(bucket), bucket.layout
        full = torch.empty(layout.numel, dtype=dtype, device=self.computing)
        part = full.narrow(0, bucket.ranks.rank * layout.segment, layout.segment)
        part.copy_(bucket.segment.detach())
        group = bucket.ranks.shard
        if layout.world_size == 1:
            return Started(full, done=True)
        with naming(group), AwaitedCall(f"an all-gather of {layout.numel} for a stream") as call:
            start_all_gather_into(full, part, layout.world_size, group)
        return CallStarted(Started(full), call, group)

    def _views(self, bucket: Bucket, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        for index, names in self.names[bucket].items():
            slot, tp = bucket.layout.slots[index], bucket.placed[index]
            value = full[slot.start : slot.stop].view(slot.shape)
            if tp is not None:
                value = tp.wrap(value).full_tensor().detach()
            for name in names:
                yield name, self._given(name, value)

    def _given(self, name: str, value: Tensor) -> Tensor:
        """The value with adapters, in the dtype and on the device that were asked for."""
        value = self.adapters.merged(name, value, (0,) * value.dim())
        if self.dtype is not None and value.is_floating_point():
            value = value.to(self.dtype)
        return value.to(self.device)


def _place_of(value: Tensor) -> object:
    """A key of the memory of a sharded tensor, equal for a parameter and its alias."""
    if not isinstance(value, ShardTensor):
        return id(value)
    spec = value._shard_spec
    return spec.group, spec.offset, value._local.untyped_storage().data_ptr()
