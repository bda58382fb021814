"""A spec places a ShardTensor on the ranks: as an interval, and as placements on a device mesh.

`ShardSpec` is the interval, with which ops compute. `FlatShard` is the interval as a placement of
DTensor: one dim of the mesh cuts the flattened tensor, where `Shard` would cut one dim of the
tensor. The other mesh dims replicate (HSDP), or belong to a parameter that was a DTensor before
`fully_shard`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from shardc.runtime import compat
from shardc.runtime.comm.collectives import all_reduce
from shardc.runtime.groups.ranks import known_mesh
from shardc.runtime.layout.layout import has_whole_rows, interval, row_of
from shardc.runtime.tensor.tensor_parallel import Placed


@dataclass(frozen=True)
class ShardSpec:
    """The place of a flattened tensor of `numel` elements on the ranks of a group.

    The tensor starts at element `offset` of a flat bucket. Rank r holds elements
    `[r*segment, (r+1)*segment)` of the bucket.
    `tp` is the part of a DTensor that the flattened tensor is; None: it is the whole parameter.
    `everyone` names the group of all ranks that have the tensor, copies included; "": `group`.
    `group` is "" for a part that comes from a file and finds no group (`pickled`).
    `mesh` is the mesh given to `fully_shard`; None after unpickling.
    """

    offset: int
    numel: int
    segment: int
    rank: int
    world_size: int
    group: str
    tp: Placed | None = None
    everyone: str = ""
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the process groups over which the parameter is cut."""
        return (self.group, *self.tp.groups) if self.tp is not None else (self.group,)

    def interval(self, rank: int | None = None) -> tuple[int, int]:
        """The interval `[start, stop)` of the flattened tensor on `rank` (default: this rank)."""
        return interval(self.offset, self.numel, self.segment, self.rank if rank is None else rank)

    def row_of(self, shape: tuple[int, ...]) -> int:
        """Elements of a row, if each rank holds whole rows; 0 if not, and for vectors.

        `shape` is that of the tensor, on a tensor-parallel mesh that of its local value.
        """
        row = row_of(shape)
        whole = has_whole_rows(self.offset, self.numel, self.segment, row)
        return row if len(shape) > 1 and self.numel and whole else 0

    def narrowed(self, start: int, numel: int) -> "ShardSpec":
        """The spec of elements `[start, start + numel)` of the flattened tensor."""
        return replace(self, offset=self.offset + start, numel=numel)

    def lies_as(self, other: "ShardSpec") -> bool:
        """Whether both specs are the same interval; a spec from a file may have no group."""
        if self is other or self == other:
            return True
        if self.group and other.group:
            return False
        return replace(self, group="", everyone="") == replace(other, group="", everyone="")

    def doubled(self) -> "ShardSpec":
        """The spec of a tensor with two elements for each element: complex numbers as pairs."""
        return replace(self, offset=2 * self.offset, numel=2 * self.numel, segment=2 * self.segment)

    def __deepcopy__(self, memo: dict[int, object]) -> "ShardSpec":
        return self

    def __getstate__(self) -> dict[str, object]:
        """The state without the mesh: no file can hold the mesh's process groups."""
        return {**self.__dict__, "mesh": None}


def part_of(full: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's part of a whole tensor, 1-D; a view where `full` is contiguous."""
    start, stop = spec.interval()
    local = full if spec.tp is None else spec.tp.local_of(full)
    return local.reshape(-1)[start:stop]


# -- gradients of whole tensors ------------------------------------------------------------------

Over = Literal["mean", "sum", "own"]
"""The reduction of the ranks' gradients of a full tensor; "own" if the gradients are equal."""


def over_ranks(value: Tensor, spec: ShardSpec, over: Over = "mean") -> Tensor:
    """The mean or sum over all ranks that train a parameter, copies included; each must call it."""
    group = spec.everyone or spec.group
    total = all_reduce(value.contiguous(), "sum", group)
    return total / len(compat.ranks_of(group)) if over == "mean" else total


def whole_gradient(grad: Tensor, spec: ShardSpec, over: Over = "mean") -> Tensor:
    """Reduce the plain gradient of a whole tensor over the ranks; returns this rank's part.

    A dim along which `grad` repeats (stride 0, as in the gradient of a sum) is sent once.
    """
    if over != "own":
        once = tuple(slice(None) if step else slice(0, 1) for step in grad.stride())
        grad = over_ranks(grad[once], spec, over).expand(grad.shape)
    return part_of(grad, spec).clone()


# -- on a mesh -----------------------------------------------------------------------------------


class FlatShard(Placement):
    """The placement of a ShardTensor: each rank holds an interval of the flattened tensor.

    The tensor starts at element `offset` of a flat buffer. Rank r of the mesh dim holds the
    elements in `[r*segment, (r+1)*segment)` of the buffer. The FlatShards of all ranks are equal.
    `param.placements` has the FlatShard of a parameter;
    `distribute_tensor(full, param.device_mesh, param.placements)` gives a tensor the same cut.

    Attributes:
        offset, segment: counted in elements.
        numel: the size of the flattened tensor; on a tensor-parallel mesh, of its local value.
        row: the elements of a row, if each rank holds whole rows; 0 where rows are cut.
        shape: that of the tensor whose `placements` it is one of; None where no tensor was given.
    """

    def __init__(self, spec: ShardSpec, row: int = 0, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.spec, self.row, self.shape = spec, row, shape
        self.offset, self.segment, self.numel = spec.offset, spec.segment, spec.numel

    def _cut(self) -> tuple[int, ...]:
        return self.offset, self.segment, self.numel, self.spec.world_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatShard) and self._cut() == other._cut()

    def __hash__(self) -> int:
        return hash(self._cut())

    def __repr__(self) -> str:
        rows = f", rows of {self.row}" if self.row else ""
        return f"FlatShard(offset={self.offset}, segment={self.segment}, numel={self.numel}{rows})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[object, ...]:
        return FlatShard, (self.spec, self.row, self.shape)


def flat_shard_in(placements: Sequence[Placement] | None) -> FlatShard | None:
    """The FlatShard among `placements`; None if there is none."""
    return next((p for p in placements or () if isinstance(p, FlatShard)), None)


def mesh_of(spec: ShardSpec) -> DeviceMesh:
    """The mesh with all dims on which the tensor is placed.

    Raises:
        AttributeError: the tensor comes from a file and no parameter here has its groups, or the
            tensor's data-parallel and tensor-parallel meshes are not dims of one mesh.
    """
    mesh = spec.mesh or known_mesh(spec.group, spec.everyone)
    if mesh is None:
        raise AttributeError(
            "this part of a tensor was loaded from a file and lies on no mesh: copy it into a "
            "parameter that is cut alike"
        )
    other = None if spec.tp is None else spec.tp.other_dims
    return mesh if other is None else _joined(mesh, other)


@functools.cache
def _joined(data: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    try:
        return compat.concatenate_meshes(data, other)
    except ValueError as error:
        raise AttributeError(
            f"the parameter lies on {data} and on {other}, which are not dims of one mesh: take "
            "both from one init_device_mesh with mesh_dim_names"
        ) from error


def placements_of(spec: ShardSpec, shape: tuple[int, ...] | None = None) -> tuple[Placement, ...]:
    """The placement of a tensor of `shape` on each dim of `mesh_of(spec)`."""
    mesh = mesh_of(spec)
    around = () if spec.tp is None else spec.tp.other_placements
    copies = mesh.ndim - len(around) - 1
    local_shape = shape if spec.tp is None else spec.tp.local_shape
    row = 0 if local_shape is None else spec.row_of(local_shape)
    return (*(Replicate() for _ in range(copies)), FlatShard(spec, row, shape), *around)


def spec_as_dtensor(shape: torch.Size, dtype: torch.dtype, spec: ShardSpec) -> compat.DTensorSpec:
    """The mesh and placements of `spec` as torch's spec of a DTensor of `shape`."""
    return compat.dtensor_spec(mesh_of(spec), placements_of(spec, shape), shape, dtype)
