"""The parameters of a bucket: ShardTensors that are views of its segment.

A user's `nn.Parameter` becomes a ShardTensor and stays the same object, so that optimizers and tied
modules keep holding it. A DTensor cannot become a ShardTensor: a new parameter takes its place.
"""

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.layout.padding import padding_value
from shardc.runtime.tensor.extension import attributes_of_subclass
from shardc.runtime.tensor.shard_gathers import reduce_plain_gradients
from shardc.runtime.tensor.shard_spec import part_of
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import local_value

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket


class Place:
    """A stand-in for one slot of a bucket in the graphs of blocks that are compiled by themselves.

    Dynamo guards on the number of a slot. Equal blocks read other slots of a bucket of the model,
    and would each get a graph. So Dynamo sees a tensor of no elements in place of the number, and
    the runtime finds the slot by that tensor.

    Attributes:
        marker: the tensor; it requires a gradient where the parameter does.
        like: the first slot of the bucket with the same shape.
    """

    def __init__(self, bucket: "Bucket", index: int) -> None:
        shapes = [slot.shape for slot in bucket.layout.slots]
        self.like = shapes.index(shapes[index])
        self.marker = torch.empty(0, requires_grad=bucket.trainable[index])
        self.marker.shardc_slot = (weakref.ref(bucket), index)  # type: ignore[attr-defined]


def slot_of(marker: Tensor) -> tuple["Bucket", int]:
    """The bucket and the slot of a `Place`, by its marker."""
    reference, index = marker.shardc_slot  # type: ignore[attr-defined]
    bucket: Bucket | None = reference()
    assert bucket is not None
    return bucket, index


class SlotRef:
    """A reference from a parameter to its slot in a bucket.

    Attributes:
        bucket, index: the bucket, and the number of the slot in it.
        is_shared: whether several modules hold the parameter, or one module by several names.
        place: an input of graphs for the slot, where the bucket is of a unit around the module's
            own; else None.
    """

    def __init__(self, bucket: "Bucket", index: int, is_shared: bool = False) -> None:
        self.bucket = bucket
        self.index = index
        self.is_shared = is_shared
        self.place = bucket.places.get(index)

    def put_apart(self) -> None:
        """Give the slot a `place`."""
        if self.index not in self.bucket.places:
            self.bucket.places[self.index] = Place(self.bucket, self.index)
        self.place = self.bucket.places[self.index]

    @property
    def name(self) -> str:
        """The parameter's name within its unit."""
        return self.bucket.layout.slots[self.index].name

    def gives(self, value: object) -> bool:
        """Whether `value` is the parameter, sharded, or full as the running forward reads it."""
        current = self.bucket.gathered.current
        full = () if current is None else current.views[self.index : self.index + 1]
        return value is self.bucket.params[self.index] or any(value is view for view in full)

    def __deepcopy__(self, memo: compat.Memo) -> "SlotRef":
        bucket: Bucket | None = memo.get(id(self.bucket))  # None: the bucket is not copied
        return self if bucket is None else type(self)(bucket, self.index, self.is_shared)


class TakenSlot(SlotRef):
    """A reference from a module to a parameter that it took over from another module.

    Dynamo guards on the class of a slot. A module that took a parameter over reads two buckets, and
    an equal module that did not reads one; no other guard tells their graphs apart.
    """


def view(bucket: "Bucket", index: int, flat: Tensor) -> ShardTensor:
    """Parameter `index` as a view of `flat: (S,)`, the segment or its gradient."""
    spec = bucket.specs[index]
    start, stop = spec.interval()
    first = spec.offset + start - spec.rank * spec.segment if stop > start else 0
    return _wrapped(bucket, index, flat.detach()[first : first + stop - start])


def views(bucket: "Bucket", flat: Tensor, indices: Iterable[int]) -> dict[int, ShardTensor]:
    """Parameters by index as views of `flat: (S,)`, which is split at once."""
    sizes, places = bucket.split
    parts = flat.detach().split_with_sizes(sizes)
    return {i: _wrapped(bucket, i, parts[places[i]]) for i in indices}


def _wrapped(bucket: "Bucket", index: int, part: Tensor) -> ShardTensor:
    placed = bucket.placed[index]
    shape = bucket.layout.slots[index].shape if placed is None else placed.shape
    return ShardTensor(part, shape, bucket.specs[index])


def cut(bucket: "Bucket", index: int, full: Tensor) -> ShardTensor:
    """This rank's part of `full`, a tensor of the shape of parameter `index`, as a copy."""
    spec = bucket.specs[index]
    part = part_of(full.detach(), spec).to(bucket.segment.device, copy=True)
    return ShardTensor(part, tuple(full.shape), spec)


@torch.no_grad()
def take(bucket: "Bucket", params: Sequence[nn.Parameter], filled: bool = False) -> None:
    """Cut full parameters, one a slot, into the segment; each is freed as soon as it is cut.

    A segment that is `filled` has the values already. DTensors are not freed here: `bucket.params`
    has another object for each.
    """
    for index, param in enumerate(params):
        grad = None if param.grad is None else cut(bucket, index, param.grad)
        if not param.is_meta and not filled:
            start, stop = bucket.specs[index].interval()
            part = view(bucket, index, bucket.segment)._local
            part.copy_(local_value(param).reshape(-1)[start:stop])
        bucket.params.append(_point(bucket, index, param, grad))


@torch.no_grad()
def convert(bucket: "Bucket", fn: Callable[[Tensor], Tensor]) -> None:
    """Convert the segment (dtype, device), and make the parameters views of the new segment.

    Parameters stay the same views if `fn` returns the segment unwritten.
    """
    before, is_first = bucket.segment.detach(), bucket.is_as_sharded
    version = before._version
    segment = fn(before)
    if segment is before and before._version == version:
        for param in bucket.params:
            param.grad = _converted(param.grad, fn)
        return
    if bucket.segment.is_meta and not segment.is_meta:  # no value yet, so no padding either
        segment.fill_(padding_value(segment.dtype))
    bucket.set_segment(segment)
    for index, param in enumerate(bucket.params):
        _point(bucket, index, param, _converted(param.grad, fn))
    if is_first:
        bucket.note_first()


def _converted(grad: Tensor | None, fn: Callable[[Tensor], Tensor]) -> Tensor | None:
    if isinstance(grad, ShardTensor):
        return ShardTensor(fn(grad._local), tuple(grad.shape), grad._shard_spec)
    return None if grad is None else fn(grad)  # full: code around the step assigned it


def is_in_live_graph(param: Tensor) -> bool:
    """Whether an autograd graph leads to `param`, other than a graph that is garbage by chance."""
    if not compat.is_in_graph(param):
        return False
    gc.collect()
    return compat.is_in_graph(param)


def allocate(bucket: "Bucket", device: torch.device | None = None) -> None:
    """Allocate a bucket that is on meta on `device`; None: where its unit keeps segments."""
    unit = bucket.owner
    home = device or (torch.device("cpu") if unit.settings.offloaded else unit.device)
    pin = unit.settings.pinned and unit.device.type != "cpu" and home.type == "cpu"

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=home, pin_memory=pin)

    convert(bucket, empty)


@torch.no_grad()
def allocate_unwritten(bucket: "Bucket") -> None:
    """Allocate a bucket for writes parameter by parameter; unwritten parameters are NaN."""
    allocate(bucket)
    if bucket.segment.is_floating_point() or bucket.segment.is_complex():
        for param in bucket.params:
            param.fill_(math.nan)


def make_param(bucket: "Bucket", index: int, like: nn.Parameter) -> nn.Parameter:
    """Parameter `index`, a view of the segment, with `requires_grad` and attributes of `like`."""
    sharded = parameter_like(like, view(bucket, index, bucket.segment))
    sharded._slot = SlotRef(bucket, index)  # type: ignore[attr-defined]
    reduce_plain_gradients(sharded)
    return sharded


def parameter_like(like: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter of `value` with `requires_grad` and attributes of `like`; each may be sharded."""
    param = nn.Parameter(value, like.requires_grad)
    own = {"_local", "_shard_spec", "_slot"} | attributes_of_subclass(like)
    param.__dict__.update({k: v for k, v in like.__dict__.items() if k not in own})
    return param


@torch.no_grad()
def adopt(bucket: "Bucket", index: int, param: nn.Parameter) -> None:
    """Make `param` parameter `index` of the bucket: cut `param`, full and of the slot's shape, in
    place.

    The replaced parameter keeps its values and leaves the bucket.
    """
    old = bucket.params[index]
    value = local_value(param.detach())
    grad = None if param.grad is None else cut(bucket, index, param.grad)
    left = old._local.clone()  # type: ignore[attr-defined]
    old.copy_(value)
    bucket.params[index] = _point(bucket, index, param, grad)
    old._local = left  # type: ignore[attr-defined]
    del old._slot  # type: ignore[attr-defined]
    if param.requires_grad != bucket.trainable[index]:
        bucket.set_trainable(index, param.requires_grad)


def _point(bucket: "Bucket", index: int, param: nn.Parameter, grad: Tensor | None) -> nn.Parameter:
    """Make `param`, the same object, a view of the segment.

    A DTensor has another layout in memory and stays as it is; a new parameter takes its place, and
    is noted on the DTensor.
    """
    sharded = make_param(bucket, index, param)
    if compat.is_dtensor(param):
        param._shardc_became = sharded  # type: ignore[attr-defined]
        sharded.grad = grad
        return sharded
    param.grad = None
    compat.swap_tensors(param, sharded)
    param.grad = grad
    return param
