"""Where a ShardTensor lies on the ranks: as an interval, and as placements on a device mesh.

`ShardSpec` is the interval, which ops compute with. `FlatShard` is the same as a placement of
DTensor: one dim of the mesh cuts the flattened tensor, where `Shard` would cut one of its dims. The
other dims replicate (HSDP) or are those of a parameter that was a DTensor before `fully_shard`.
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
from shardc.runtime.layout.layout import interval
from shardc.runtime.tensor.tensor_parallel import Placed


@dataclass(frozen=True)
class ShardSpec:
    """Where a flattened tensor of `numel` elements lies on the ranks of a group.

    It starts at element `offset` of a flat bucket whose rank r holds `[r*segment, (r+1)*segment)`.
    `tp` says which part of a DTensor the flattened tensor is; None: it is all of the parameter.
    `everyone` names the group of all ranks that have it, copies included; "": `group`.
    Without a `group` it is a part that comes from a file (`pickled`).
    `mesh` is the one given to `fully_shard`; None where the spec was unpickled.
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
        """The process groups over which the parameter is cut, by name."""
        return (self.group, *self.tp.groups) if self.tp is not None else (self.group,)

    def interval(self, rank: int | None = None) -> tuple[int, int]:
        """`[start, stop)` of the flattened tensor that `rank` (default: this one) holds."""
        return interval(self.offset, self.numel, self.segment, self.rank if rank is None else rank)

    def narrowed(self, start: int, numel: int) -> "ShardSpec":
        """The spec of elements `[start, start + numel)` of the flattened tensor."""
        return replace(self, offset=self.offset + start, numel=numel)

    def lies_as(self, other: "ShardSpec") -> bool:
        """Whether both are the same interval; one that comes from a file knows no group."""
        if self is other or self == other:
            return True
        if self.group and other.group:
            return False
        return replace(self, group="", everyone="") == replace(other, group="", everyone="")

    def doubled(self) -> "ShardSpec":
        """The spec where every element becomes two: complex numbers as pairs."""
        return replace(self, offset=2 * self.offset, numel=2 * self.numel, segment=2 * self.segment)

    def __deepcopy__(self, memo: dict[int, object]) -> "ShardSpec":
        return self

    def __getstate__(self) -> dict[str, object]:
        """Everything but the mesh, whose process groups no file can hold."""
        return {**self.__dict__, "mesh": None}


def part_of(full: Tensor, spec: ShardSpec) -> Tensor:
    """This rank's part of a whole tensor, 1-D; a view where `full` is contiguous."""
    start, stop = spec.interval()
    local = full if spec.tp is None else spec.tp.local_of(full)
    return local.reshape(-1)[start:stop]


# -- gradients of whole tensors ------------------------------------------------------------------

Over = Literal["mean", "sum", "own"]
"""How the ranks' gradients of a full tensor become one: this rank's own where they are equal."""


def mean_over_ranks(value: Tensor, spec: ShardSpec) -> Tensor:
    """The mean over the ranks that train a parameter, copies included; each must call it."""
    group = spec.everyone or spec.group
    return all_reduce(value.contiguous(), "sum", group) / len(compat.ranks_of(group))


def whole_gradient(grad: Tensor, spec: ShardSpec, over: Over = "mean") -> Tensor:
    """This rank's part of the plain gradient of a whole tensor, reduced over the ranks.

    Where `grad` repeats along a dim, as that of a sum does, what is sent does not.
    """
    if over != "own":
        once = tuple(slice(None) if step else slice(0, 1) for step in grad.stride())
        sent, shape = grad[once], grad.shape
        group = spec.everyone or spec.group
        grad = (
            mean_over_ranks(sent, spec)
            if over == "mean"
            else all_reduce(sent.contiguous(), "sum", group)
        ).expand(shape)
    return part_of(grad, spec).clone()


# -- on a mesh -----------------------------------------------------------------------------------


class FlatShard(Placement):
    """The placement of a ShardTensor: each rank holds an interval of the flattened tensor.

    Rank r of the mesh dim holds the elements that lie in `[r*segment, (r+1)*segment)` of a flat
    buffer in which the tensor starts at `offset`. Equal on all ranks. `param.placements` gives it;
    `distribute_tensor(full, param.device_mesh, param.placements)` cuts another tensor so.

    Attributes:
        offset, segment: counted in elements.
        numel: of the flattened tensor, on a tensor-parallel mesh of its local value.
    """

    def __init__(self, spec: ShardSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def offset(self) -> int:
        return self.spec.offset

    @property
    def segment(self) -> int:
        return self.spec.segment

    @property
    def numel(self) -> int:
        return self.spec.numel

    def _cut(self) -> tuple[int, ...]:
        return self.offset, self.segment, self.numel, self.spec.world_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatShard) and self._cut() == other._cut()

    def __hash__(self) -> int:
        return hash(self._cut())

    def __repr__(self) -> str:
        return f"FlatShard(offset={self.offset}, segment={self.segment}, numel={self.numel})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[object, ...]:
        return FlatShard, (self.spec,)


def flat_shard_in(placements: Sequence[Placement] | None) -> FlatShard | None:
    """The FlatShard among `placements`, if there is one."""
    return next((p for p in placements or () if isinstance(p, FlatShard)), None)


def mesh_of(spec: ShardSpec) -> DeviceMesh:
    """The mesh of all dims on which the tensor lies.

    Raises:
        AttributeError: it comes from a file and no parameter here has its groups, or its
            data-parallel and its tensor-parallel mesh are not dims of one mesh.
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


def placements_of(spec: ShardSpec) -> tuple[Placement, ...]:
    """How the tensor lies on each dim of `mesh_of(spec)`."""
    mesh = mesh_of(spec)
    around = () if spec.tp is None else spec.tp.other_placements
    copies = mesh.ndim - len(around) - 1
    return (*(Replicate() for _ in range(copies)), FlatShard(spec), *around)


def dtensor_spec(shape: torch.Size, dtype: torch.dtype, spec: ShardSpec) -> compat.DTensorSpec:
    """The same as torch describes a DTensor of `shape`."""
    return compat.dtensor_spec(mesh_of(spec), placements_of(spec), shape, dtype)
