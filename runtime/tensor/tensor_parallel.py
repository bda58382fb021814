"""Parameters that are DTensors on a tensor-parallel mesh, as a data-parallel bucket sees them.

A bucket holds the local value of such a parameter and is gathered and reduced over the
data-parallel ranks as any other: they have the same coordinate on the tensor-parallel mesh, so
their local values have one shape. Only the way out knows more: what a module reads is made a
DTensor again, whose autograd brings the gradient to the parameter's placements; and what a user
holds has the global shape, of which this rank's part is an interval of the flattened local value.

A parameter may also be a DTensor on a mesh that includes the data-parallel dims (`Spmd`, FSDP2's
`dp_mesh_dims`), replicated over those. Its gradient is then brought to the parameter's placements
over the other dims only, and what is partial over the data-parallel ones is left to the bucket.

Left out: `_StridedShard` and Partial placements, and DTensors on a mesh that includes the
data-parallel ranks otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardc.runtime import compat
from shardc.runtime.checks.optimizer_hooks import Turn, before_steps
from shardc.runtime.layout.spec import intern_object, object_of
from shardc.runtime.tensor.extension import inner_value, shape_and_dtype


@dataclass(frozen=True)
class Spmd:
    """A mesh on which all parameters are DTensors, and which of its dims are data-parallel."""

    mesh: DeviceMesh
    dims: frozenset[int]


@dataclass(frozen=True)
class Placed:
    """How a parameter lies on a tensor-parallel mesh; equal on ranks of one coordinate.

    Attributes:
        mesh, placements: those of the DTensor.
        shape, stride: of the whole parameter.
        local_shape, offsets: this coordinate's part of it.
        groups: the process groups over which it is cut, by name; none where it is replicated.
        data_dims: the data-parallel dims of the mesh (`Spmd`).
        key: names it in a graph (`object_of`), where it has data-parallel dims.
    """

    mesh: DeviceMesh = field(repr=False)
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    local_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    groups: tuple[str, ...]
    data_dims: frozenset[int]
    key: str = field(init=False, compare=False, default="")

    def __post_init__(self) -> None:
        if self.data_dims:
            interned = intern_object(self)
            object.__setattr__(self, "key", interned.key)
            object.__setattr__(self, "_interned", interned)  # no field: Dynamo would look into it

    @classmethod
    def of(cls, tensor: Tensor, spmd: Spmd | None = None) -> "Placed | None":
        """How `tensor` is placed; None for a plain tensor."""
        if not compat.is_dtensor(tensor):
            return None
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        shape = tuple(tensor.shape)
        local_shape, offsets = _part(shape, mesh, placements)
        assert local_shape == tuple(local_value(tensor).shape), (local_shape, tensor)
        cut = [dim for dim, placement in enumerate(placements) if isinstance(placement, Shard)]
        groups = tuple(compat.group_name(mesh.get_group(dim)) for dim in cut if mesh.size(dim) > 1)
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        data_dims = frozenset() if spmd is None else spmd.dims
        return cls(mesh, placements, shape, stride, local_shape, offsets, groups, data_dims)

    @property
    def other_dims(self) -> DeviceMesh | None:
        """The mesh of the dims that are not data-parallel; None where all are."""
        if not self.data_dims:
            return self.mesh
        names = self.mesh.mesh_dim_names or ()
        others = tuple(name for dim, name in enumerate(names) if dim not in self.data_dims)
        return self.mesh[others] if others else None

    @property
    def other_placements(self) -> tuple[Placement, ...]:
        """The placements on these dims."""
        dims = enumerate(self.placements)
        return tuple(placement for dim, placement in dims if dim not in self.data_dims)

    def wrap(self, local: Tensor) -> DTensor:
        """The DTensor of which `local` is this rank's value; differentiable."""
        if self.data_dims:
            return _wrap_spmd(local, self.key)
        return self._wrap(local)

    def _wrap(self, local: Tensor) -> DTensor:
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,  # type: ignore[arg-type]
            stride=self.stride,
        )

    def lies_as(self, tensor: DTensor) -> bool:
        """Whether `tensor` has the same shape, mesh and placements."""
        own = (self.shape, self.mesh, self.placements)
        return own == (tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))

    def local_of(self, tensor: Tensor) -> Tensor:
        """This coordinate's part of a whole tensor, plain or a DTensor of any placements."""
        if compat.is_dtensor(tensor):
            return compat.local_of(tensor.redistribute(self.mesh, self.placements))
        for dim, (start, size) in enumerate(zip(self.offsets, self.local_shape, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def __deepcopy__(self, memo: dict[int, object]) -> "Placed":
        return self


def wrapped(local: Tensor, placed: Placed | None) -> Tensor:
    """`local` as it is, or the DTensor of which it is this rank's value."""
    return local if placed is None else placed.wrap(local)


class _WrapSpmd(torch.autograd.Function):
    """A local value as a DTensor; back, the gradient's own local value on data-parallel dims."""

    @staticmethod
    def forward(ctx: compat.FunctionContext, local: Tensor, key: str) -> DTensor:
        ctx.placed = object_of(key)
        return ctx.placed._wrap(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, grad: DTensor) -> tuple[Tensor, None]:
        placed = ctx.placed
        target = tuple(
            have if dim in placed.data_dims else want
            for dim, (have, want) in enumerate(zip(grad.placements, placed.placements, strict=True))
        )
        return grad.redistribute(placements=target).to_local(), None


@compat.allow_in_graph
def _wrap_spmd(local: Tensor, key: str) -> DTensor:
    """Left to AOT autograd: Dynamo does not know the placements that a gradient will have."""
    return _WrapSpmd.apply(local, key)


@compat.allow_in_graph
def as_parameter(value: Tensor) -> Tensor:
    """`value`, a DTensor, as an `nn.Parameter` to `isinstance`; Dynamo asks the value itself."""
    return compat.as_parameter(value)


def local_value(param: Tensor) -> Tensor:
    """The value of a parameter that this rank holds, plain."""
    return compat.local_of(param) if compat.is_dtensor(param) else inner_value(param)


def stored_as(param: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the same."""
    return shape_and_dtype(compat.local_of(param) if compat.is_dtensor(param) else param)


def unsupported(param: DTensor, ranks: Sequence[int], spmd: Spmd | None) -> str | None:
    """Why a DTensor cannot be sharded further over the global `ranks`; None if it can."""
    strange = [p for p in param.placements if type(p) not in (Replicate, Shard)]
    if strange:
        return f"its placement {strange[0]!r} is neither Shard nor Replicate"
    if type(param.to_local()) is not Tensor:
        return f"its local value is a {type(param.to_local()).__name__}"
    if spmd is not None:
        return _unsupported_spmd(param, spmd)
    shared = set(ranks) & set(param.device_mesh.mesh.flatten().tolist())
    if len(shared) > 1:
        return (
            f"its mesh {param.device_mesh} overlaps the mesh given to fully_shard in ranks "
            f"{sorted(shared)}: give the data-parallel dim of a mesh whose other dims it is on, or "
            "the whole mesh with dp_mesh_dims"
        )
    return None


def _unsupported_spmd(param: DTensor, spmd: Spmd) -> str | None:
    if param.device_mesh != spmd.mesh:
        return f"it is on {param.device_mesh}; with dp_mesh_dims it must be on {spmd.mesh}"
    names = spmd.mesh.mesh_dim_names or ()
    for dim in sorted(spmd.dims):
        if not isinstance(param.placements[dim], Replicate):
            return f"it is {param.placements[dim]!r} on the data-parallel dim '{names[dim]}'"
    return None


def _part(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offsets of this rank's part: mesh dims cut in order, as `torch.chunk` does."""
    sizes, offsets = list(shape), [0] * len(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            size = -(-sizes[dim] // mesh.size(axis))
            start = min(mesh.get_local_rank(axis) * size, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(size, sizes[dim] - start)
    return tuple(sizes), tuple(offsets)


def restore_ties(modules: Sequence[torch.nn.Module]) -> None:
    """Give modules that hold a DTensor which an inner unit took the parameter it became.

    A plain parameter stays the same object when it is sharded; a DTensor cannot.
    """
    for root in modules:
        for module in root.modules():
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                if hasattr(param, "_shardc_became"):
                    setattr(module, name, param._shardc_became)
    before_steps.call(Turn.REPLACED, _refuse_replaced, once=True, compiled=True)
    before_steps.call_again(Turn.REPLACED)


def _refuse_replaced(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step with DTensors that the optimizer was made with: they would never be trained."""
    for param in compat.params_of(optimizer):
        if hasattr(param, "_shardc_became"):
            raise RuntimeError(
                f"{type(optimizer).__name__} was made before fully_shard and holds a DTensor of "
                f"shape {tuple(param.shape)} that the model no longer has: make the optimizer "
                "after fully_shard"
            )
