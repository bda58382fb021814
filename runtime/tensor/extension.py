"""Extensions let a tensor subclass choose the tensors that a gather of its parameter sends.

FSDP2's extension protocol: `fsdp_pre_all_gather` of a rank's rows gives the tensors to send, and
`fsdp_post_all_gather` makes the full parameter from the gathered tensors (float8 and int8 weights
of torchao). Such a parameter has a bucket of its own, cut by rows as FSDP2 cuts it. The segment has
the plain tensor inside the subclass; optimizers update it, and checkpoints hold it. The subclass
wraps the rows for a gather, and the whole value for a caller that asks for the full parameter.

For a frozen subclass with several inner tensors (NF4) the plain tensor is their bytes (`packing`).

Left out: a trained subclass with several inner tensors, or a number of row groups that the ranks
do not divide.
"""

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardc.runtime import compat
from shardc.runtime.checks.words import plural
from shardc.runtime.layout.spec import intern_object
from shardc.runtime.tensor.packing import Packing, first_rows, on_device

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class _Wrapping(NamedTuple):
    """The parts of a subclass around one plain tensor."""

    attribute: str
    context: compat.Context
    inner: Tensor


def extends_gather(tensor: Tensor) -> bool:
    """Whether `tensor` has a hook of FSDP2's on its gather."""
    return any(hasattr(tensor, hook) for hook in HOOKS)


def inner_value(tensor: Tensor) -> Tensor:
    """The plain tensor of a subclass that extends the gather; another tensor is returned itself."""
    if not extends_gather(tensor):
        return tensor
    wrapping = _wrapping(tensor)
    if wrapping is not None:
        return wrapping.inner.detach()
    packing = _packing(tensor)
    return tensor if packing is None else packing.pack(tensor)


def shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of the plain tensor (`inner_value`)."""
    if extends_gather(tensor) and _wrapping(tensor) is None:
        packing = _packing(tensor)
        if packing is not None:
            return (packing.groups, packing.nbytes), torch.uint8
    return tuple(tensor.shape), tensor.dtype


def why_not_extended(tensor: Tensor, world_size: int) -> str | None:
    """The reason not to shard a tensor that extends the gather over `world_size` ranks, or None."""
    missing = [hook for hook in HOOKS if not hasattr(tensor, hook)]
    if missing:
        return f"it has no {missing[0]}, which belongs to the other hook of the gather"
    if not compat.is_wrapper(tensor):
        return "it has no __tensor_flatten__ and __tensor_unflatten__"
    parameters = _arguments(tensor)
    if parameters not in (1, 5):
        return (
            f"its fsdp_pre_all_gather takes {plural(parameters, 'argument')}; it must take "
            "(mesh) or (mesh, outer_size, outer_stride, module, mp_policy)"
        )
    if tensor.dim() == 0:
        return "it has no dim to cut"
    return None if _wrapping(tensor) is not None else _why_not_packed(tensor, world_size)


def _why_not_packed(tensor: Tensor, world_size: int) -> str | None:
    alone = "name it in ignored_params, and each rank keeps all of it"
    packing = _packing(tensor)
    if packing is None:
        return (
            "it is not made of one plain tensor of its own shape and dtype, nor of several that "
            f"torch.chunk cuts with its rows: {alone}"
        )
    if tensor.requires_grad:
        return "it is made of several tensors, which are sharded only frozen: requires_grad_(False)"
    if packing.groups % world_size:
        return (
            "it is made of several tensors, with blocks that end with every "
            f"{plural(packing.rows, 'row')}: {plural(world_size, 'rank')} do not "
            f"divide {packing.groups} times as many; {alone}"
        )
    return None


def _packing(tensor: compat.Subclass) -> Packing | None:
    if not compat.is_wrapper(tensor) or not tensor.dim() or not tensor.numel():
        return None
    with torch.no_grad():
        return Packing.of(tensor.detach())


def _arguments(tensor: compat.Subclass) -> int:
    return len(inspect.signature(tensor.fsdp_pre_all_gather).parameters)


def _wrapping(tensor: compat.Subclass) -> _Wrapping | None:
    if not compat.is_wrapper(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    inner = getattr(tensor, names[0]) if len(names) == 1 else None
    if inner is None or type(inner) not in (Tensor, nn.Parameter):
        return None
    same = inner.shape == tensor.shape and inner.dtype == tensor.dtype and inner.is_contiguous()
    return _Wrapping(names[0], context, inner) if same else None


def attributes_of_subclass(tensor: Tensor) -> set[str]:
    """The attributes that a subclass with an extended gather sets on `tensor`, without attributes
    of users."""
    if not extends_gather(tensor):
        return set()
    wrapping = _wrapping(tensor)
    if wrapping is None:
        return set() if _packing(tensor) is None else set(vars(tensor.detach()))
    return set(vars(_around(type(tensor), *wrapping)))


def _around(cls: compat.Subclass, attribute: str, context: compat.Context, plain: Tensor) -> Tensor:
    made = cls.__tensor_unflatten__({attribute: plain}, context, plain.shape, plain.stride())
    return cast(Tensor, made)


@dataclass(frozen=True, eq=False)
class Extension:
    """An extension calls a parameter's subclass before and after each gather of the parameter.

    Attributes:
        cls, attribute, context: the subclass, the name of its inner tensor, the rest of its state.
        packing: the layout of several inner tensors in bytes; then `context` is of a rank's rows.
        whole_context: the context of all rows.
        dtype: the dtype of the subclass.
        shape: the shape of the whole parameter.
        mesh: the ranks over which the rows are cut.
        rank: the number of this rank in the mesh.
        module: the module that holds the parameter.
        precision: the policy that the subclass gets.
        key: the name of the extension in specs (`object_of`).
    """

    cls: type[Tensor]
    attribute: str
    context: compat.Context = field(repr=False)
    packing: Packing | None
    whole_context: compat.Context = field(repr=False)
    dtype: torch.dtype
    shape: tuple[int, ...]
    mesh: DeviceMesh = field(repr=False)
    rank: int
    module: "weakref.ref[nn.Module]" = field(repr=False)
    precision: MixedPrecisionPolicy = field(repr=False)
    key: str = field(init=False, default="")

    def __post_init__(self) -> None:
        interned = intern_object(self)
        object.__setattr__(self, "key", interned.key)
        object.__setattr__(self, "_interned", interned)

    @classmethod
    def of(
        cls, param: Tensor, mesh: DeviceMesh, module: nn.Module, precision: MixedPrecisionPolicy
    ) -> "Extension | None":
        """The extension of `param`; None if `param` does not extend its gather."""
        if not extends_gather(param):
            return None
        if mesh.ndim > 1:
            mesh = DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)
        wrapping, packing = _wrapping(param), None
        if wrapping is not None:
            attribute, context, _ = wrapping
            whole = context
        else:
            attribute, packing = "", _packing(param)
            parts: tuple[compat.Subclass, compat.Subclass] = (
                first_rows(param, mesh.size()),
                param.detach(),
            )
            context, whole = (value.__tensor_flatten__()[1] for value in parts)
        rank, where = mesh.get_local_rank(), weakref.ref(module)
        own = (attribute, context, packing, whole, param.dtype, tuple(param.shape))
        return cls(type(param), *own, mesh, rank, where, precision)

    def copied_to(self, memo: compat.Memo) -> "Extension":
        """The extension for a copy of the model; `memo` has the copied modules."""
        module = self.module()
        return replace(self, module=weakref.ref(cast(nn.Module, memo.get(id(module), module))))

    @property
    def padded_rows(self) -> int:
        """The number of rows of the longest part, which the first rank has."""
        return -(-self.shape[0] // self.mesh.size())

    def around(self, plain: Tensor) -> Tensor:
        """Wrap rows of the parameter, or the whole parameter, in the subclass."""
        if self.packing is None:
            return _around(self.cls, self.attribute, self.context, plain)
        shape = (plain.shape[0] * self.packing.rows, *self.shape[1:])
        context = self.whole_context if shape == self.shape else self.context
        context = on_device(context, plain.device)
        stride = torch.empty(shape, device="meta").stride()
        inner = self.packing.unpack(plain)
        made: compat.Subclass = self.cls
        return cast(Tensor, made.__tensor_unflatten__(inner, context, torch.Size(shape), stride))

    def _rows(self, segment: Tensor) -> Tensor:
        """View the whole segment as this rank's rows."""
        if self.packing is not None:
            return segment.view(-1, self.packing.nbytes)
        return segment.view(self.padded_rows, *self.shape[1:])

    def before_gather(self, segment: Tensor) -> tuple[list[Tensor], object]:
        """The tensors that this rank sends, of equal sizes on all ranks, and metadata.

        `segment: (S,)`. As in FSDP2, the subclass gets the rows without padding. A tensor with that
        number of rows is padded with zeros; FSDP2 raises there. A rank without rows gives the
        subclass one row of zeros.
        """
        padded, shape = self.padded_rows, self.shape
        rows = min(max(shape[0] - self.rank * padded, 0), padded)
        local = self._rows(segment)
        if self.packing is None:
            local = local[:rows]
        if not rows and padded:
            local = segment.new_zeros((1, *shape[1:]))
        given: tuple[object, ...] = (self.mesh,)
        instance: compat.Subclass = self.around(local)
        if _arguments(instance) == 5:
            whole = torch.empty(shape, device="meta")
            given += (whole.size(), whole.stride(), self.module(), self.precision)
        sent, metadata = instance.fsdp_pre_all_gather(*given)
        if self.packing is not None:
            return list(sent), metadata
        return [_padded(tensor, local.shape[0], padded) for tensor in sent], metadata

    def after_gather(
        self, gathered: Sequence[Tensor], metadata: object, dtype: torch.dtype, segment: Tensor
    ) -> Tensor:
        """Make the full parameter from gathered tensors, each with all ranks' rows along dim 0."""
        instance: compat.Subclass = self.around(self._rows(segment))
        if self.packing is not None:
            dtype = self.precision.param_dtype or self.dtype
        full, _ = instance.fsdp_post_all_gather(tuple(gathered), metadata, dtype)
        stride = torch.empty(self.shape, device="meta").stride()
        return torch.as_strided(full, self.shape, stride, storage_offset=0)


def _padded(tensor: Tensor, rows: int, padded: int) -> Tensor:
    """Pad `tensor` with zeros to `padded` rows if it has `rows` rows; else return it unchanged."""
    if rows == padded or tensor.dim() == 0 or tensor.shape[0] != rows:
        return tensor
    more = tensor.new_zeros((padded, *tensor.shape[1:]))
    more[:rows].copy_(tensor)
    return more
