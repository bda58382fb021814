"""Sharded has the state of a ShardTensor, and the attributes by which it passes as a DTensor.

The state is `_local`, this rank's part as a 1-D view of a segment, and `_shard_spec`, the place of
the part in the tensor. Ops read the state and `make` other ShardTensors. `ShardTensor`, the one
subclass, adds the methods for users and torch's protocols. They call the ops, so the file of
`ShardTensor` comes after the files of the ops.

Training code asks `isinstance(param, DTensor)` before it gathers, saves or takes a norm. A true
subclass of DTensor has two more fields in memory than an `nn.Parameter`. So Python cannot change a
parameter's class to it, and each optimizer, tie and list would still hold the old parameter.
Instead a ShardTensor stays the same object, and names DTensor as its `__class__`, which
`isinstance` believes.

Ops of torch's DTensors refuse a ShardTensor as a later operand, as any tensor that is no DTensor.
While torch dispatches an op, and while Dynamo traces, `__class__` is the true class. Else torch
would run the op as DTensor's, and guards on a DTensor would look for its inner parts. (In traced
code, too, `compat.let_torch_make` makes `isinstance` true.) `conversions` converts a ShardTensor to
other forms and back.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from typing_extensions import Self

from shardc.runtime import compat
from shardc.runtime.comm.collectives import all_gather
from shardc.runtime.layout.interval_boxes import Box, boxes_of
from shardc.runtime.tensor.shard_spec import ShardSpec, mesh_of, placements_of, spec_as_dtensor

_TRACING = compat.TRACING
_is_excluded, _DISPATCHED = compat.WHILE_DISPATCHING  # looked up once: this runs for each op


class Sharded(Tensor):
    """A tensor of full shape, dtype and device of which this rank holds one interval."""

    _local: Tensor
    _shard_spec: ShardSpec

    make: "ClassVar[type[Sharded]]"
    """ShardTensor, with which ops make results; `shard_tensor.py`, imported after them, sets it."""

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], spec: ShardSpec) -> Self:
        """Wrap `local`, the interval `spec.interval()` of a flattened tensor of `shape`."""
        if not isinstance(spec, ShardSpec):
            raise TypeError(
                f"a ShardTensor is made by fully_shard, its spec is a ShardSpec; got {spec!r}"
            )
        self: Self = compat.make_wrapper(cls, shape, local)  # type: ignore[assignment]
        self._local = local
        self._shard_spec = spec
        return self

    def _gathered(self) -> Tensor:
        """Gather the whole tensor; every rank that holds a part must make this call."""
        tp = self._shard_spec.tp
        return self._unsharded() if tp is None else tp.wrap(self._unsharded()).full_tensor()

    def _unsharded(self) -> Tensor:
        """Gather the value before `fully_shard`: a plain parameter, or a DTensor's local value."""
        spec = self._shard_spec
        shape = self.shape if spec.tp is None else spec.tp.local_shape
        if not spec.numel:
            return self._local.new_empty(shape)
        if not spec.group:
            raise RuntimeError(
                f"{self._label()} was loaded from a file of rank {spec.rank} of {spec.world_size}, "
                "and a model here is cut otherwise, or its groups are others. Load such a file on "
                "its rank and at its number of ranks; torch.distributed.checkpoint loads at any"
            )
        cuts = [spec.interval(rank) for rank in range(spec.world_size)]
        longest = max(stop - start for start, stop in cuts)
        local = self._local
        padded = local.new_zeros(longest)
        padded[: local.numel()] = local
        rows = all_gather(padded, spec.world_size, spec.group).view(spec.world_size, longest)
        parts = [row[: stop - start] for row, (start, stop) in zip(rows, cuts, strict=True)]
        return torch.cat(parts).view(shape)

    def _boxes(self) -> list[Box]:
        """The boxes of the full tensor that this rank saves and loads."""
        if self.numel() == 0:  # DCP wants a box for it too; the first rank has the box
            shape = tuple(self.shape)
            return [Box((0,) * len(shape), shape, 0)] if self._shard_spec.rank == 0 else []
        tp, interval = self._shard_spec.tp, self._shard_spec.interval()
        if tp is None:
            return list(boxes_of(tuple(self.shape), *interval))
        return [box.moved(tp.offsets) for box in boxes_of(tp.local_shape, *interval)]

    def _label(self) -> str:
        """The words for the tensor in messages; the slot of a bucket's parameter has its name."""
        slot = getattr(self, "_slot", None)
        name = f"parameter '{slot.name}'" if slot is not None else "a ShardTensor"
        return f"{name} of shape {tuple(self.shape)}"

    # -- as a DTensor ----------------------------------------------------------------------------

    @property
    @compat.inline_only
    def __class__(self) -> type:
        # torch reads this where it dispatches an op, and must not take the op for DTensor's.
        if _is_excluded(_DISPATCHED) or getattr(_TRACING, "tracing_context", None) is not None:
            return type(self)
        return DTensor

    @__class__.setter
    def __class__(self, cls: type) -> None:
        raise TypeError(f"a ShardTensor cannot become a {cls.__name__}")

    @property
    def _local_tensor(self) -> Tensor:
        """This rank's part: in rows if every rank holds whole rows, otherwise 1-D."""
        tp = self._shard_spec.tp
        shape = tuple(self.shape) if tp is None else tp.local_shape
        in_rows = self._shard_spec.row_of(shape) and not compat.is_wrapper(self._local)
        return self._local.view(-1, *shape[1:]) if in_rows else self._local

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:
        if isinstance(self, nn.Parameter):
            raise RuntimeError(
                "the local part of a sharded parameter is a view of its bucket and cannot be "
                "replaced: write into it, param.to_local().copy_(value) under torch.no_grad()"
            )
        own = self._local_tensor.shape
        if value.shape not in (own, self._local.shape) or value.dtype != self.dtype:
            raise RuntimeError(
                f"the local part of this ShardTensor is {self.dtype} of shape {tuple(own)}; got "
                f"{value.dtype} of {tuple(value.shape)}"
            )
        self._local = value.reshape(-1)

    @property
    def _spec(self) -> compat.DTensorSpec:
        return spec_as_dtensor(self.shape, self.dtype, self._shard_spec)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh given to `fully_shard`, joined with the other dims of a former DTensor's mesh.

        Raises:
            AttributeError: the part comes from a file and no parameter has its groups, or the two
                meshes are not dims of one mesh.
        """
        return mesh_of(self._shard_spec)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement on each dim of `device_mesh`: `FlatShard` on the dim of `fully_shard`."""
        return placements_of(self._shard_spec, self.shape)
