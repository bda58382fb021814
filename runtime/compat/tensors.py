"""Tensors, and subclasses of them."""

import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from traceback import walk_stack
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
"""The arguments of an op in `__torch_dispatch__`; they may be of any kind."""

Index: TypeAlias = Any
"""The index of a tensor, between brackets; torch has no type for it."""

Subclass: TypeAlias = Any
"""A tensor with `__tensor_flatten__` and hooks of its own; torch has no type for it."""

Context: TypeAlias = Any
"""The second result of `__tensor_flatten__`, after the names of inner tensors."""

NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a tensor subclass that only wants `__torch_dispatch__`."""


def without_python(value: object) -> object:
    """An op as a function in C++, whose call spares 0.4 us of Python; another value as it is."""
    return value._op if type(value) is OpOverload else value


class OnesForValues(TorchDispatchMode):
    """Inside, `.item()` of a tensor on meta is 1 instead of an error."""

    def __torch_dispatch__(
        self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


class OpMode(TorchDispatchMode):
    """A mode that sees ops on plain tensors, below autograd and below tensor subclasses.

    Dynamo traces inside of the mode as it does outside.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Op, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if any(getattr(each, "__torch_dispatch__", None) is not _NO_DISPATCH for each in types):
            return NotImplemented  # a subclass runs its own ops on plain tensors next
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})

    def run(self, func: Op, args: Args, kwargs: Kwargs) -> object:
        """Run an op on plain tensors."""
        raise NotImplementedError


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def keeps_workspaces() -> bool:
    """Whether torch keeps the workspaces of cuBLAS, as 2.11 to 2.14 do.

    2.15 allocates a workspace for each call, if not told otherwise.
    """
    told = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
    return told or torch.torch_version.TorchVersion(torch.__version__) < "2.15"


def tracking_versions() -> AbstractContextManager[None]:
    """Inside `__torch_dispatch__`, give views the version of their base."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def register_foreach_type(cls: type[Tensor]) -> None:
    """Let foreach optimizers and clipping take `cls`.

    Each has a list of the exact types for which foreach is the default.
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
    """Whether a tensor, or the tensor inside of it, is fake: it has no values."""
    from torch._subclasses import fake_tensor

    return fake_tensor.is_fake(tensor)


@inline_only
def inside_transforms(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of `torch.func.grad`, `vmap` and the like; else `tensor`."""
    from torch._C import _functorch

    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def as_parameter(tensor: Tensor) -> Tensor:
    """Make `tensor` an `nn.Parameter` for `isinstance`, also in a trace; gives `tensor`."""
    tensor._is_param = True
    return tensor


def make_wrapper(cls: type[Tensor], shape: Iterable[int], local: Tensor) -> Tensor:
    """A contiguous wrapper subclass of `shape` with the dtype and device of `local`."""
    return Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=local.dtype, device=local.device, requires_grad=False
    )


def without_functions_of_subclasses() -> AbstractContextManager[None]:
    """Inside, the `__torch_function__` of tensor subclasses is not called."""
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
    """A plain tensor as an instance of a subclass without a dispatch, not as a view."""
    return Tensor._make_subclass(cls, tensor)


def become_parameter(tensor: Tensor) -> None:
    """Make a tensor of a class given to `as_class` an ordinary parameter, the same object."""
    _CLASS.__set__(tensor, nn.Parameter)


def as_plain(tensor: Tensor) -> Tensor:
    """A tensor of a class given to `as_class` as a plain tensor, differentiable."""
    with without_functions_of_subclasses():
        return tensor.as_subclass(Tensor)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether `tensor` gives its inner tensors by `__tensor_flatten__`."""
    return is_traceable_wrapper_subclass(tensor)


def plain_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors inside a tensor, in a fixed order; a plain tensor gives itself."""
    if not is_wrapper(tensor):
        return (tensor,)
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return tuple(part for name in names for part in plain_parts(getattr(tensor, name)))


def storage_id(tensor: Tensor) -> int | None:
    """A number that identifies the storage of a tensor; None where there is none.

    For a DTensor, the number of its local value's storage.
    """
    if is_dtensor(tensor):
        tensor = local_of(tensor)
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        return None
    return tensor.untyped_storage()._cdata


class _Mark:
    """An object for weak references."""


def is_in_graph(tensor: Tensor) -> bool:
    """Whether a live autograd graph would accumulate a gradient in the leaf `tensor`.

    Such a graph holds the node that accumulates, and the tensor refers to the node weakly: a mark
    left on the node lives as long as the node. A reference count would not tell, because threads of
    a process group hold a tensor for a moment after the collective, too.
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
"""The descriptor of an object's real class; an object's own `__class__` may give another class."""


def swap_tensors(param: Tensor, new: Tensor) -> None:
    """Swap two tensors as `torch.utils.swap_tensors`, also where other references to `param` exist.

    torch refuses where weak references exist, or C++ references beside Python's own. Here a weak
    reference means the parameter, also with its new value: Dynamo's guards have weak references to
    every parameter that Dynamo saw. A C++ reference means the old tensor: the old tensor goes on as
    `new`, and lives as long as its holders, such as a thread of a process group.
    """
    if is_in_graph(param):
        raise RuntimeError("a sharded parameter cannot be moved: an autograd graph holds it")
    own, other = type(param), type(new)
    _CLASS.__set__(param, other)
    _CLASS.__set__(new, own)
    param.__dict__, new.__dict__ = new.__dict__, param.__dict__
    torch._C._swap_tensor_impl(param, new)


def tensors_of_total_norm() -> Sequence[Tensor] | None:
    """The tensors of the `get_total_norm` that this call comes from; None elsewhere.

    `get_total_norm` takes the norms of one device and dtype at a time, without the other tensors.
    """
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code.co_name in ("_get_total_norm", "get_total_norm"):
            tensors = frame.f_locals.get("tensors")
            return tensors if isinstance(tensors, list) else None
    return None
