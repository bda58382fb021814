"""A bucket's full parameters in one eager forward, and again in its backward.

A saved tensor that views a gathered bucket would keep the whole bucket until the backward. While a
module that holds parameters runs, saved-tensor hooks save a handle in the place of each such
tensor. The backward gathers the bucket again when it unpacks the first handle of the bucket. The
bucket is freed with its last handle: autograd drops a handle when the handle's node is done.

Only modules with parameters of their own have these hooks: torch refuses function transforms
(`vmap`) under saved-tensor hooks, and models use transforms between their layers. A weight that is
read from outside its module is saved as it is: gradients are right, but the bucket stays until the
backward.
"""

import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardc.runtime import compat
from shardc.runtime.comm.unshard import full_parameters, recut
from shardc.runtime.layout.spec import UnshardSpec
from shardc.runtime.tensor.tensor_parallel import wrapped
from shardc.runtime.unit.backward_pass import backward_pass

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket

_by_storage: "weakref.WeakValueDictionary[int, Unsharded]" = weakref.WeakValueDictionary()


class Unsharded:
    """The full parameters of a bucket in one eager forward.

    Attributes:
        written: the bucket's version at the gather.
        stays: whether the bucket stays gathered after the forward.
        views: the full parameters, one a slot.
        local_views: the plain tensors of `views`, which tensor parallelism wraps in DTensors.
    """

    def __init__(self, bucket: "Bucket", code: UnshardSpec, full: Tensor) -> None:
        self.bucket = bucket
        self.code = code
        self.full = full
        self.written = bucket.version
        self.stays = code.held or not code.reshard_after_forward
        self._again: Again | None = None
        # The first read may lie inside `no_grad` or `vmap` and a later read outside: the views
        # serve both.
        with compat.outside_function_transforms(), torch.enable_grad():
            views: tuple[Tensor, ...] = _Read.apply(bucket.segment, full, bucket, code)
            self.local_views = views
            self.views: tuple[Tensor, ...] = tuple(
                compat.as_parameter(wrapped(view, placed))
                for view, placed in zip(views, bucket.placed, strict=True)
            )
        self._shapes = [view.shape for view in views]
        self._parts = compat.plain_parts(full)
        self._versions = [part._version for part in self._parts]
        self._storages = [compat.storage_id(part) for part in self._parts]
        for storage in self._storages:
            if storage is not None:
                _by_storage[storage] = self

    def state(self) -> object:
        """A value that changes with a write to full parameters, unless in place through `.data`."""
        parts = [part for view in self.local_views for part in compat.plain_parts(view)]
        where = [None if compat.is_fake(part) else part.data_ptr() for part in parts]
        return [part._version for part in self._parts], where

    @property
    def is_written(self) -> bool:
        """Whether a full parameter was written in place, other than through `.data`."""
        return [part._version for part in self._parts] != self._versions[: len(self._parts)]

    @property
    def is_resized(self) -> bool:
        """Whether a full parameter was given another shape, through `.data`."""
        known = zip(self.local_views, self._shapes, strict=False)  # no views once it is closed
        return any(view.shape != shape for view, shape in known)

    def close(self, at_once: bool) -> None:
        """Free the views; `at_once` frees the bucket too, and later backwards gather it again."""
        for storage in self._storages:
            if storage is not None:
                _by_storage.pop(storage, None)
        if self._again is not None and at_once:
            self._again.full = None
        self.views, self.local_views, self._parts, self._again = (), (), (), None
        del self.full

    def handle(self, tensor: Tensor) -> "Handle | None":
        """A handle for `tensor`, a view of the gathered bucket; None if it cannot have one."""
        index = self._storages.index(compat.storage_id(tensor))
        if tensor.dtype != self._parts[index].dtype:
            return None  # a view in another dtype
        if tensor.is_conj() or tensor.is_neg():
            return None
        if self._again is None:
            at_once = compat.in_backward()  # recomputed for this backward
            self._again = Again(
                self.bucket, self.code, self.full, self.written, self.stays or at_once
            )
        place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return Handle(self._again, index, *place)


class _Read(torch.autograd.Function):
    """The parameters as views of the gathered bucket; their gradients go to the backward pass."""

    @staticmethod
    def forward(
        ctx: compat.FunctionContext,
        segment: Tensor,
        full: Tensor,
        bucket: "Bucket",
        code: UnshardSpec,
    ) -> tuple[Tensor, ...]:
        ctx.bucket = weakref.ref(bucket)  # weak: it may hold these views until a backward
        ctx.set_materialize_grads(False)
        views = full_parameters(full, code)
        ctx.mark_non_differentiable(
            *(view for view, flag in zip(views, code.trainable, strict=True) if not flag)
        )
        return views

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, *grads: Tensor | None) -> tuple[None, ...]:
        bucket = ctx.bucket()  # None: the model and its parameters are gone
        if bucket is not None and any(grad is not None for grad in grads):
            backward_pass().reduce(bucket, grads)
        return None, None, None, None


class Again:
    """A bucket for a backward, gathered again if it did not stay; its handles keep it alive."""

    def __init__(
        self, bucket: "Bucket", code: UnshardSpec, full: Tensor, written: object, stays: bool
    ) -> None:
        self.bucket = bucket
        self.code = code
        self.written = written
        self.part = None if code.recut is None else recut(full, *code.recut)
        self.full: Tensor | None = full if stays else None
        self._version = _versions(full)
        bucket.gathered.expect(self)

    def get(self) -> Tensor:
        """The gathered bucket, as `comm.unshard.gather` gives it.

        Raises:
            RuntimeError: the parameters were written since the forward.
        """
        if self.full is None or _versions(self.full) != self._version:
            if self.written != self.bucket.version:
                raise RuntimeError(
                    f"parameters of {self.bucket.label} were written (by an optimizer step, a load "
                    "or a copy) between the forward and its backward, which needs the values that "
                    "the forward used: run the backward first"
                )
            self.full = backward_pass().gather(self.bucket, self)
            self._version = _versions(self.full)
        return self.full


def _versions(full: Tensor) -> list[int]:
    return [part._version for part in compat.plain_parts(full)]


@dataclass(frozen=True, slots=True)
class Handle:
    """The handle that autograd saves for a view of a plain part of a gathered bucket."""

    again: Again
    part: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The view, after its bucket is gathered again."""
        part = compat.plain_parts(self.again.get())[self.part]
        return part.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Placed:
    """The handle of a DTensor."""

    inner: "Packed"
    spec: compat.DTensorSpec

    def tensor(self) -> Tensor:
        return compat.make_dtensor(self.inner.tensor(), self.spec)


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """The handle of another subclass; inner tensors outside of gathered buckets are saved as is."""

    kind: Any
    inner: dict[str, "Packed | Tensor"]
    context: object
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        inner = {
            name: value if isinstance(value, Tensor) else value.tensor()
            for name, value in self.inner.items()
        }
        made = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return cast(Tensor, made)


Packed = Handle | _Placed | _Wrapped


# -- saved-tensor hooks ---------------------------------------------------------------------------


def saving_handles() -> "torch.autograd.graph.saved_tensors_hooks | None":
    """Saved-tensor hooks that save handles, for the caller to enter; None where none are needed.

    None are needed where no tensor is saved, a checkpoint recomputes, or such hooks are in force.
    Where torch refuses hooks, there are none. Tensors that view no gathered bucket go to the hooks
    in force.
    """
    if not torch.is_grad_enabled() or not compat.saved_tensors_hooks_allowed():
        return None
    outer = compat.top_saved_tensors_hooks()
    if outer is not None and (
        hasattr(outer[0], "saves_handles") or compat.is_checkpoint_hook(outer[0])
    ):
        return None
    if outer is None:
        return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    return torch.autograd.graph.saved_tensors_hooks(*_handing_on(*outer))


@compat.untraced  # autograd calls it between the graphs of a broken model
def _pack(tensor: Tensor) -> Packed | tuple[Tensor, int]:
    # An alias, never the tensor itself: an output of the node that saves it would make a cycle.
    return _handle(tensor) or (tensor.detach(), tensor._version)


_pack.saves_handles = True  # type: ignore[attr-defined]


@compat.untraced
def _unpack(packed: Packed | tuple[Tensor, int]) -> Tensor:
    if not isinstance(packed, tuple):
        return packed.tensor()
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {tensor.dtype} of shape {tuple(tensor.shape)} is at version "
            f"{tensor._version}; expected version {version} instead"
        )
    return tensor


def _handing_on(pack: compat.PackHook, unpack: compat.UnpackHook) -> compat.SavedTensorsHooks:
    @compat.untraced
    def own_pack(tensor: Tensor) -> Packed | tuple[object]:
        return _handle(tensor) or (pack(tensor),)

    @compat.untraced
    def own_unpack(packed: Packed | tuple[object]) -> Tensor:
        return unpack(packed[0]) if isinstance(packed, tuple) else packed.tensor()

    own_pack.saves_handles = True  # type: ignore[attr-defined]
    return own_pack, own_unpack


def saving_themselves(tensors: Collection[Tensor]) -> AbstractContextManager[object]:
    """Inside, autograd saves `tensors` themselves, and other tensors by the hooks in force.

    Hooks that copy, such as `save_on_cpu`, would miss a later write to a tensor.
    """
    looked_for = tensors and compat.saved_tensors_hooks_allowed()
    outer = compat.top_saved_tensors_hooks() if looked_for else None
    if outer is None or compat.is_checkpoint_hook(outer[0]):  # a checkpoint copies nothing
        return nullcontext()
    pack, unpack = outer
    own = {id(tensor) for tensor in tensors}

    def own_pack(tensor: Tensor) -> Tensor | tuple[object]:
        return tensor if id(tensor) in own else (pack(tensor),)

    def own_unpack(packed: Tensor | tuple[object]) -> Tensor:
        return packed if isinstance(packed, Tensor) else unpack(packed[0])

    return torch.autograd.graph.saved_tensors_hooks(own_pack, own_unpack)


def _handle(tensor: Tensor) -> Packed | None:
    """A handle for a view of a gathered bucket, also inside a DTensor; None for other tensors."""
    if not _by_storage:
        return None
    parts = compat.dtensor_parts(tensor)
    if parts is not None:
        inner = _handle(parts[0])
        return None if inner is None else _Placed(inner, parts[1])
    if compat.is_wrapper(tensor):
        return _handle_inside(tensor)
    storage = compat.storage_id(tensor)
    unsharded = None if storage is None else _by_storage.get(storage)
    return None if unsharded is None else unsharded.handle(tensor)


def _handle_inside(tensor: Any) -> _Wrapped | None:
    """A handle for a subclass around views of a gathered bucket; None for other tensors."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    handles = {name: handle for name, value in inner.items() if (handle := _handle(value))}
    if not handles:
        return None
    return _Wrapped(type(tensor), inner | handles, context, tensor.size(), tensor.stride())
