"""A data-parallel bucket holds the local values of DTensors on a tensor-parallel mesh.

The bucket is gathered and reduced over the data-parallel ranks, as any other bucket. These ranks
have the same coordinate on the tensor-parallel mesh, so their local values have one shape. A module
reads the value as a DTensor again; autograd of the DTensor brings the gradient to the parameter's
placements. A user holds a parameter of the global shape; this rank's part is an interval of the
flattened local value.

A parameter may also be a DTensor on a mesh that includes the data-parallel dims (`Spmd`, FSDP2's
`dp_mesh_dims`), replicated over these dims. Autograd then brings the gradient to the parameter's
placements over the other dims only. A gradient that is partial over the data-parallel dims is left
to the bucket.

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
    """A mesh on which all parameters are DTensors, and its data-parallel dims."""

    mesh: DeviceMesh
    dims: frozenset[int]


@dataclass(frozen=True)
class Placed:
    """The place of a parameter on a tensor-parallel mesh; equal on ranks of one coordinate.

    Attributes:
        mesh, placements: the mesh and the placements of the DTensor.
        shape, stride: the shape and the stride of the whole parameter.
        local_shape, offsets: this coordinate's part of the whole parameter.
        groups: the names of the process groups that cut the parameter; none where it is replicated.
        data_dims: the data-parallel dims of the mesh (`Spmd`).
        key: the name of this object in a graph (`object_of`); "" without data-parallel dims.
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
        """The place of `tensor` on its mesh; None for a plain tensor."""
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
        """The mesh of the dims that are not data-parallel; None if all dims are data-parallel."""
        if not self.data_dims:
            return self.mesh
        names = self.mesh.mesh_dim_names or ()
        others = tuple(name for dim, name in enumerate(names) if dim not in self.data_dims)
        return self.mesh[others] if others else None

    @property
    def other_placements(self) -> tuple[Placement, ...]:
        """The placements on the dims that are not data-parallel."""
        dims = enumerate(self.placements)
        return tuple(placement for dim, placement in dims if dim not in self.data_dims)

    def wrap(self, local: Tensor) -> DTensor:
        """Wrap `local`, this rank's local value, in a DTensor; differentiable."""
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
        """Cut this coordinate's part from a whole tensor, plain or a DTensor of any placements."""
        if compat.is_dtensor(tensor):
            return compat.local_of(tensor.redistribute(self.mesh, self.placements))
        for dim, (start, size) in enumerate(zip(self.offsets, self.local_shape, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor

    def __deepcopy__(self, memo: dict[int, object]) -> "Placed":
        return self


def wrapped(local: Tensor, placed: Placed | None) -> Tensor:
    """Wrap `local` in a DTensor; without `placed`, return `local` itself."""
    return local if placed is None else placed.wrap(local)


class _WrapSpmd(torch.autograd.Function):
    """Wrap a local value in a DTensor; the gradient keeps its placements on data-parallel dims."""

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
    """Wrap a local value under AOT autograd only: Dynamo does not know a gradient's placements."""
    return _WrapSpmd.apply(local, key)


@compat.allow_in_graph
def dtensor_as_parameter(value: Tensor) -> Tensor:
    """Make a DTensor an `nn.Parameter` for `isinstance`, also in a trace; gives the DTensor."""
    return compat.as_parameter(value)


def local_value(param: Tensor) -> Tensor:
    """The local value of a parameter on this rank, as a plain tensor."""
    return compat.local_of(param) if compat.is_dtensor(param) else inner_value(param)


def stored_as(param: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of `local_value`."""
    return shape_and_dtype(compat.local_of(param) if compat.is_dtensor(param) else param)


def unsupported(param: DTensor, ranks: Sequence[int], spmd: Spmd | None) -> str | None:
    """The reason not to shard a DTensor further over the global `ranks`; None if there is none."""
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
    """The shape and offsets of this rank's part: each mesh dim cuts in turn, as `torch.chunk`."""
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
    """Replace DTensors that inner units have sharded by their ShardTensors, in all modules.

    A plain parameter stays the same object when it is sharded; a DTensor cannot.
    """
    for root in modules:
        for module in root.modules():
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                if hasattr(param, "_shardc_became"):
                    # Our own `register_parameter` refuses a parameter of another unit.
                    torch.nn.Module.register_parameter(module, name, param._shardc_became)
    before_steps.call(Turn.REPLACED, _refuse_replaced, once=True, compiled=True)
    before_steps.call_again(Turn.REPLACED)


def _refuse_replaced(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuse a step of an optimizer made with DTensors that `fully_shard` replaced since.

    Such an optimizer would never train the parameters of the model.
    """
    for param in compat.params_of(optimizer):
        if hasattr(param, "_shardc_became"):
            raise RuntimeError(
                f"{type(optimizer).__name__} was made before fully_shard and holds a DTensor of "
                f"shape {tuple(param.shape)} that the model no longer has: make the optimizer "
                "after fully_shard"
            )
