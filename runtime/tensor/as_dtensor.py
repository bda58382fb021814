"""A ShardTensor as a DTensor: `isinstance` says so, and the attributes of a DTensor are true.

Training code asks `isinstance(param, DTensor)` before it gathers, saves or takes a norm. A true
subclass of DTensor has two slots more in memory than an `nn.Parameter`, so Python lets no parameter
become one; every optimizer, tie and list that holds it would hold a stranger. A ShardTensor stays
the same object instead, and names DTensor as its `__class__`, which `isinstance` believes.

Ops of torch's DTensors refuse one as a later operand, as any tensor that is no DTensor. While torch
dispatches an op, and while Dynamo traces, a ShardTensor says what it is: torch would run the op as
DTensor's, and guards on a DTensor look for its inner parts. (Dynamo answers the `isinstance` of
traced code by `compat.let_torch_make`, too.) `conversions` has the way to other forms and back.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardc.runtime import compat
from shardc.runtime.tensor.shard_spec import ShardSpec, dtensor_spec, mesh_of, placements_of

_TRACING = compat.TRACING
_is_excluded, _DISPATCHED = compat.WHILE_DISPATCHING  # looked up once: this runs for each op


class AsDTensor(Tensor):
    """The attributes and methods of a DTensor that a ShardTensor has."""

    _local: Tensor
    _shard_spec: ShardSpec

    @property
    @compat.inline_only
    def __class__(self) -> type:
        # torch asks this itself where it dispatches an op: it shall not take it for DTensor's.
        if _is_excluded(_DISPATCHED) or getattr(_TRACING, "tracing_context", None) is not None:
            return type(self)
        return DTensor

    @__class__.setter
    def __class__(self, cls: type) -> None:
        raise TypeError(f"a ShardTensor cannot become a {cls.__name__}")

    @property
    def _local_tensor(self) -> Tensor:
        return self._local

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:
        if isinstance(self, nn.Parameter):
            raise RuntimeError(
                "the local part of a sharded parameter is a view of its bucket and cannot be "
                "replaced: write into it, param.to_local().copy_(value) under torch.no_grad()"
            )
        if value.shape != self._local.shape or value.dtype != self.dtype:
            raise RuntimeError(
                f"the local part of this ShardTensor is {self.dtype} of shape "
                f"{tuple(self._local.shape)}; got {value.dtype} of {tuple(value.shape)}"
            )
        self._local = value

    @property
    def _spec(self) -> compat.DTensorSpec:
        return dtensor_spec(self.shape, self.dtype, self._shard_spec)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh given to `fully_shard`; of a parameter that was a DTensor, with its own dims.

        Raises:
            AttributeError: the part comes from a file, or its two meshes are not dims of one.
        """
        return mesh_of(self._shard_spec)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """For each dim of `device_mesh`: `FlatShard` where the ranks cut it, else as it lies."""
        return placements_of(self._shard_spec)
