"""Tensor subclasses that say what is gathered of them, as those of torchao do."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
_KEPT = {
    aten.as_strided.default, aten.clone.default, aten.detach.default, aten.empty_like.default,
    aten.new_zeros.default, aten.slice.Tensor, aten.split.Tensor, aten.t.default,
    aten.view.default, aten._to_copy.default, aten.copy_.default,
}  # fmt: skip


class _Weight(Tensor):
    """A weight in full precision, which is cast when it is gathered."""

    _inner: Tensor
    gathers = 0

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda x: x._inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func is aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, cls, out) if func in _KEPT else out


class Rowwise(_Weight):
    """Sends int8 values and a scale a row; the full weight is plain again."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Linear) and module.out_features == outer_size[0]
        assert mesh.ndim == 1 and outer_stride == (outer_size[1], 1) and mp_policy is not None
        type(self).gathers += 1
        return self.parts(self._inner), None

    @staticmethod
    def parts(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Values and scales of which the product is about `weight`."""
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return (weight / scale).round().to(torch.int8), scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        values, scale = outputs
        full = (values * scale).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (full,)


class Fp8(_Weight):
    """Sends float8 values, scaled by the largest of all ranks; the full weight stays float8."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        type(self).gathers += 1
        largest = funcol.all_reduce(self._inner.abs().max(), "max", mesh)
        values, scale = self.parts(self._inner, largest)
        return (values,), (scale,)

    @staticmethod
    def parts(weight: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Values and the scale of which the product is about `weight`."""
        largest = weight.abs().max() if largest is None else largest
        scale = largest.clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
        return (weight / scale).to(torch.float8_e4m3fn), scale

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (values,), (scale,) = outputs, metadata
        if out is not None:
            out._scale = scale
            return None
        return Fp8Full(values, scale, param_dtype), (values,)


class Fp8Full(Tensor):
    """float8 values and their scale, which computes as what it stands for."""

    _values: Tensor
    _scale: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=dtype, device=values.device, strides=values.stride()
        )

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self._values, self._scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_values", "_scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_values"], inner["_scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            aten.as_strided.default, aten.detach.default, aten.t.default, aten.view.default
        ):  # fmt: skip
            return cls(func(args[0]._values, *args[1:]), args[0]._scale, args[0].dtype)
        whole = tree_map_only(cls, Fp8Full.whole, (args, kwargs or {}))
        return func(*whole[0], **whole[1])

    def whole(self) -> Tensor:
        """The values that it stands for."""
        return self._values.to(self.dtype) * self._scale.to(self.dtype)


class Planes(_Weight):
    """Sends MXFP8 in two planes: values scaled by rows of 32, and values scaled by columns of 32.

    The full weight computes `x @ w.T` from the first plane, and `g @ w` from the second.
    """

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        type(self).gathers += 1
        by_rows, by_columns = mx(self._inner, 1), mx(self._inner, 0)
        return (*by_rows, *by_columns), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        if out is not None:
            return None
        return PlanesFull(*outputs, param_dtype, False), outputs


def mx(weight: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """MXFP8 of a matrix: float8 values, and a power of two for each 32 along `dim`, as its byte."""
    blocks = weight.float().unflatten(dim, (-1, 32))
    largest = blocks.abs().amax(dim + 1)
    exponents = (largest.view(torch.int32) >> 23 & 0xFF) - 8
    bytes_ = exponents.clamp(min=0).to(torch.uint8)
    values = blocks / torch.exp2(bytes_.float() - 127).unsqueeze(dim + 1)
    values = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.flatten(dim, dim + 1), bytes_


def from_mx(values: Tensor, bytes_: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The matrix of which `mx` gives `values` and `bytes_`."""
    scales = torch.exp2(bytes_.float() - 127).unsqueeze(dim + 1)
    return (values.float().unflatten(dim, (-1, 32)) * scales).flatten(dim, dim + 1).to(dtype)


class PlanesFull(Tensor):
    """The two planes of a weight, perhaps transposed; a product reads one of them."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _NAMES = ("_rows", "_row_scales", "_columns", "_column_scales")

    @staticmethod
    def __new__(
        cls, rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor,
        dtype: torch.dtype, transposed: bool,
    ) -> Any:  # fmt: skip
        shape, strides = tuple(rows.shape), (rows.shape[1], 1)
        if transposed:
            shape, strides = shape[::-1], strides[::-1]
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=rows.device, strides=strides
        )

    def __init__(
        self, rows: Tensor, row_scales: Tensor, columns: Tensor, column_scales: Tensor,
        dtype: torch.dtype, transposed: bool,
    ) -> None:  # fmt: skip
        self._rows, self._row_scales = rows, row_scales
        self._columns, self._column_scales = columns, column_scales
        self._transposed = transposed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self._NAMES], (self.dtype, self._transposed)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls._NAMES), *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.t.default, aten.as_strided.default, aten.detach.default):
            full, turns = args[0], func is aten.t.default
            parts = [getattr(full, name) for name in cls._NAMES]
            return cls(*parts, full.dtype, full._transposed != turns)
        if func in (aten.mm.default, aten.addmm.default) and isinstance(args[-1], cls):
            return func(*args[:-1], args[-1].factor())
        raise NotImplementedError(f"{func} of two planes")

    def factor(self) -> Tensor:
        """The matrix to multiply with, from the plane that is scaled along the summed dim."""
        if self._transposed:
            return from_mx(self._rows, self._row_scales, 1, self.dtype).t()
        return from_mx(self._columns, self._column_scales, 0, self.dtype)


def extended(model: nn.Module, kind: type[_Weight]) -> nn.Module:
    """`model`, where the weight of every linear layer is a `kind`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def compiled(model: Any, how: str, blocks: Iterable[nn.Module] | None = None) -> nn.Module:
    """`model`, compiled in place: its "blocks", the whole by an executor, or "uncompiled"."""
    if how == "blocks":
        for layer in model.layers if blocks is None else blocks:
            layer.compile(backend="shardc", options={"executor": "eager"}, fullgraph=True)
    elif how != "uncompiled":
        model.compile(backend="shardc", options={"executor": how}, fullgraph=True)
    return model


class Rounding(nn.Linear):
    """What a linear layer with such a weight computes where nothing is sharded."""

    kind: type[Rowwise] | type[Fp8]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach()
        values, scale = self.kind.parts(weight)
        error = values.to(x.dtype) * scale - weight
        return nn.functional.linear(x, self.weight + error, self.bias)


def rounding(model: nn.Module, kind: type[Rowwise] | type[Fp8]) -> nn.Module:
    """`model` as `extended` is to compute, with plain weights."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__, module.kind = Rounding, kind
    return model
