"""Tensors, and subclasses of them."""

import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shardc.runtime.compat.dtensors import is_dtensor, local_of
from shardc.runtime.compat.dynamo import inline_only

TensorClass = TypeVar("TensorClass", bound=Tensor)

Op: TypeAlias = "OpOverload[..., Any]"
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""What torch gives `__torch_dispatch__`: an op, and arguments of any kind."""

Index: TypeAlias = Any
"""What a tensor takes between brackets, which torch has no type for."""

Subclass: TypeAlias = Any
"""A tensor with `__tensor_flatten__` and hooks of its own, which torch has no type for."""

Context: TypeAlias = Any
"""What `__tensor_flatten__` gives beside the names of inner tensors."""

NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""A tensor subclass that only wants `__torch_dispatch__`."""


class OnesForValues(TorchDispatchMode):
    """Inside, `.item()` of a tensor on meta is 1 instead of an error."""

    def __torch_dispatch__(
        self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def keeps_workspaces() -> bool:
    """Whether torch keeps what it gives cuBLAS to work in, as 2.11 to 2.14 do.

    2.15 allocates it anew for each call, if not told otherwise.
    """
    told = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    return told or torch.torch_version.TorchVersion(torch.__version__) < "2.15"


def tracking_versions() -> AbstractContextManager[None]:
    """Inside `__torch_dispatch__`, give views the version of their base."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def register_foreach_type(cls: type[Tensor]) -> None:
    """Let foreach optimizers and clipping take `cls`.

    Both lists name the exact types for which foreach is the default.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    ):
        if cls not in supported:
            supported.append(cls)


@inline_only
def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor, or what is inside of it, only stands for a value."""
    from torch._subclasses import fake_tensor

    return fake_tensor.is_fake(tensor)


@inline_only
def inside_transforms(tensor: Tensor) -> Tensor:
    """The tensor inside of wrappers of `torch.func.grad`, `vmap` and the like; else `tensor`."""
    from torch._C import _functorch

    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def as_parameter(tensor: Tensor) -> Tensor:
    """`tensor`, from now on an `nn.Parameter` to `isinstance`, in a trace too."""
    tensor._is_param = True
    return tensor


def make_wrapper(cls: type[Tensor], shape: Iterable[int], local: Tensor) -> Tensor:
    """A contiguous wrapper subclass of `shape` with the dtype and device of `local`."""
    return Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=local.dtype, device=local.device, requires_grad=False
    )


def without_functions_of_subclasses() -> AbstractContextManager[None]:
    """Inside, `__torch_function__` of tensor subclasses is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def make_wrapper_of_view(cls: type[Tensor], view: Tensor) -> Tensor:
    """A wrapper subclass with the metadata of `view`, strides included."""
    return Tensor._make_wrapper_subclass(
        cls,
        view.shape,
        strides=view.stride(),
        storage_offset=view.storage_offset(),
        dtype=view.dtype,
        device=view.device,
        requires_grad=False,
    )


def as_class(tensor: Tensor, cls: type[TensorClass]) -> TensorClass:
    """A plain tensor as a Python subclass without a dispatch, no view of it."""
    return Tensor._make_subclass(cls, tensor)


def become_parameter(tensor: Tensor) -> None:
    """Make a tensor of such a subclass an ordinary parameter, the same object."""
    _CLASS.__set__(tensor, nn.Parameter)


def as_plain(tensor: Tensor) -> Tensor:
    """A tensor of such a subclass as a plain one, differentiable."""
    with without_functions_of_subclasses():
        return tensor.as_subclass(Tensor)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether `tensor` says by `__tensor_flatten__` what it is made of."""
    return is_traceable_wrapper_subclass(tensor)


def plain_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors that a tensor is made of, itself if it is plain, in a fixed order."""
    if not is_wrapper(tensor):
        return (tensor,)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return tuple(part for name in names for part in plain_parts(getattr(tensor, name)))


def storage_id(tensor: Tensor) -> int | None:
    """A number that is equal for tensors that share a storage; None where there is none.

    Of a DTensor, the storage of its local value.
    """
    if is_dtensor(tensor):
        tensor = local_of(tensor)
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return None
    return tensor.untyped_storage()._cdata


class _Mark:
    """Something that can be referred to weakly."""


def is_in_graph(tensor: Tensor) -> bool:
    """Whether an autograd graph that is alive would accumulate a gradient in the leaf `tensor`.

    Such a graph holds the node that accumulates, which the tensor knows weakly: a mark that is left
    on the node lives on with it. A reference count would not tell, because threads of a process
    group hold a tensor for a moment after the collective, too.
    """
    if not tensor.requires_grad or not tensor.is_leaf:
        return False
    with torch.inference_mode(False), torch.enable_grad():
        view = tensor.view_as(tensor).grad_fn
    assert view is not None
    node = view.next_functions[0][0]
    assert node is not None
    mark = _Mark()
    node.metadata[_Mark] = mark  # type: ignore[index]
    found = weakref.ref(mark)
    del mark, node, view
    return found() is not None


_CLASS: Subclass = vars(object)["__class__"]
"""Of which class an object really is, whatever its own `__class__` says."""


def swap_tensors(param: Tensor, new: Tensor) -> None:
    """`torch.utils.swap_tensors`, whatever else refers to `param`.

    Torch refuses where weak references exist, or references of C++ beside Python's own. Here weak
    ones mean the parameter, whatever it is made of: Dynamo's guards have some on every parameter
    that it saw. What C++ refers to is the tensor as it was: it goes on with `new`, and with
    whoever holds it still, such as a thread of a process group.
    """
    if is_in_graph(param):
        raise RuntimeError("a sharded parameter cannot be moved: an autograd graph holds it")
    own, other = type(param), type(new)
    _CLASS.__set__(param, other)
    _CLASS.__set__(new, own)
    param.__dict__, new.__dict__ = new.__dict__, param.__dict__
    torch._C._swap_tensor_impl(param, new)


def gradient_hooks(tensor: Tensor) -> list[object]:
    """The hooks that `tensor.register_hook` was given."""
    return list((tensor._backward_hooks or {}).values())


def tensors_of_total_norm() -> Sequence[Tensor] | None:
    """The tensors of the `get_total_norm` that this call comes from; None elsewhere.

    It takes norms of one device and dtype at a time, which do not know of the others.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("_get_total_norm", "get_total_norm"):
            tensors = frame.f_locals.get("tensors")
            return tensors if isinstance(tensors, list) else None
        frame = frame.f_back
    return None
