"""A bucket's full parameters in one eager forward, and again in its backward.

What autograd saves of a gathered bucket would keep all of it until the backward. While a module
that holds parameters runs, saved-tensor hooks put a handle in the place of each such tensor. The
bucket is gathered again when the backward unpacks the first of its handles, and freed with the
last: autograd drops each when its node is done.

Only modules with parameters of their own are covered: torch refuses function transforms (`vmap`)
under such hooks, and models use them between their layers. A weight that is read from outside the
module that holds it is saved as it is: right, but its bucket stays until the backward.
"""

import weakref
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
    """The full parameters that one eager forward reads of a bucket.

    Attributes:
        written: the bucket's version when it was gathered.
        stays: whether it stays gathered after the forward.
        views: the full parameters, one a slot.
        local_views: the same without tensor parallelism around them.
    """

    def __init__(self, bucket: "Bucket", code: UnshardSpec, full: Tensor) -> None:
        self.bucket = bucket
        self.code = code
        self.full = full
        self.written = bucket.version
        self.stays = code.held or not code.reshard_after_forward
        self._again: Again | None = None
        # The first read may lie inside `no_grad` or `vmap` and a later one outside: what is kept
        # serves both.
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
        """Differs after a write to the full parameters, but for those in place through `.data`."""
        parts = [part for view in self.local_views for part in compat.plain_parts(view)]
        where = [None if compat.is_fake(part) else part.data_ptr() for part in parts]
        return [part._version for part in self._parts], where

    @property
    def is_written(self) -> bool:
        """Whether a full parameter was written to in place, but through `.data`."""
        return [part._version for part in self._parts] != self._versions[: len(self._parts)]

    @property
    def is_resized(self) -> bool:
        """Whether a full parameter was given another shape, through `.data`."""
        known = zip(self.local_views, self._shapes, strict=False)  # no views once it is closed
        return any(view.shape != shape for view, shape in known)

    def close(self, at_once: bool) -> None:
        """Nothing reads it any more. Backwards to come gather again what is freed `at_once`."""
        for storage in self._storages:
            if storage is not None:
                _by_storage.pop(storage, None)
        if self._again is not None and at_once:
            self._again.full = None
        self.views, self.local_views, self._parts, self._again = (), (), (), None
        del self.full

    def handle(self, tensor: Tensor) -> "Handle | None":
        """A stand-in for `tensor`, which views the gathered bucket; None if it cannot have one."""
        index = self._storages.index(compat.storage_id(tensor))
        if tensor.dtype != self._parts[index].dtype:
            return None  # another view of the bytes
        if tensor.is_conj() or tensor.is_neg():
            return None
        if self._again is None:
            at_once = compat.in_backward()  # recomputed for it
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
        ctx.bucket = weakref.ref(bucket)  # which may hold these views until a backward
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
    """A bucket for a backward, gathered again if it did not stay; lives as long as the handles."""

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
        """The gathered bucket, as `gather` gives it.

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
    """A handle that autograd saves in place of a view of a plain part of a gathered bucket."""

    again: Again
    part: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor, gathered again."""
        part = compat.plain_parts(self.again.get())[self.part]
        return part.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class _Placed:
    """The same of a DTensor."""

    inner: "Packed"
    spec: compat.DTensorSpec

    def tensor(self) -> Tensor:
        return compat.make_dtensor(self.inner.tensor(), self.spec)


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """The same of another subclass; inner tensors that view no gathered bucket as they are."""

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
    """Hooks that save handles, to be entered; None where nothing is saved, or all is recomputed.

    What is no part of a gathered bucket goes on to the hooks that are in force.
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
    # Never the tensor itself: it may be an output of the node that saves it, a cycle.
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
    """A handle for a subclass around views of a gathered bucket."""
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    handles = {name: handle for name, value in inner.items() if (handle := _handle(value))}
    if not handles:
        return None
    return _Wrapped(type(tensor), inner | handles, context, tensor.size(), tensor.stride())
