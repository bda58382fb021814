"""ShardTensor: a parameter of full shape of which this rank holds one interval.

Users and optimizers hold a ShardTensor instead of the full parameter. The local part is a 1-D view
of the rank's segment of a bucket: the interval `[start, stop)` of the flattened parameter.
Elementwise ops run on the local part. Ranks reduce statistics. Initialisers draw the full tensor
and keep the interval. Other ops run on gathered values (`shard_ops` holds the table). So stock
optimizers, `torch.nn.init`, clipping, GradScaler and DCP work at any world size.

The state is in `Sharded`. The object has no more state, because checkpoints copy `__dict__` deeply.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from shardc.runtime import compat
from shardc.runtime.checks.refusal import caller_and_way_out, is_called_by, refuse_search_for_node
from shardc.runtime.tensor import conversions, pickled, shard_fill, shard_gathers, shard_ops
from shardc.runtime.tensor.shard_spec import ShardSpec
from shardc.runtime.tensor.sharded import Sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata, planner


class ShardTensor(Sharded):
    """A tensor of full shape, dtype and device; `to_local()` gives this rank's part."""

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    # -- methods for users -------------------------------------------------------------------

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's part: an alias of elements `[start, stop)` of the flattened tensor.

        Its shape is `(rows, *shape[1:])` if every rank holds whole rows, as the layout of a bucket
        prefers; otherwise the part is 1-D, and `placements` has a FlatShard whose `row` is 0.

        Differentiable: the gradient of the part is this rank's part of the gradient.

        Raises:
            NotImplementedError: `grad_placements` other than `placements`.
        """
        return conversions.to_local(self, grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Gather the whole tensor. Every rank that holds a part must make this call.

        The gather moves `world_size` times the largest local part. A former DTensor is then
        gathered over its own mesh too. Differentiable: each rank gives the gradient of its own
        loss, and the gradients are averaged.

        Args:
            grad_placements: `Replicate()` on every dim: the ranks' gradients are equal, and nothing
                is sent; `Partial()` on every dim: the ranks' gradients are added up.

        Raises:
            NotImplementedError: other `grad_placements`.
        """
        return conversions.full_tensor(self, grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Place the value otherwise on its mesh. Every rank of the mesh must make this call.

        The value is gathered in `forward_dtype` and cut again; `async_op` has no effect. The result
        is a DTensor, or a ShardTensor if a `FlatShard` is among `placements`.

        Raises:
            RuntimeError: no placements, or a Partial one.
            NotImplementedError: another mesh.
        """
        return conversions.redistribute(self, device_mesh, placements, forward_dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        start, stop = self._shard_spec.interval()
        return (
            f"ShardTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"rank {self._shard_spec.rank} of {self._shard_spec.world_size} holds elements "
            f"[{start}, {stop}) of {self._shard_spec.numel}{self._placed()}: {self._local})"
        )

    def _placed(self) -> str:
        tp = self._shard_spec.tp
        if tp is None:
            return ""
        return f" of the local value {list(tp.local_shape)} at {list(tp.offsets)}, {tp.placements}"

    # -- methods of parameters beyond ops ------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Write the values of `value`, a tensor of the same shape and dtype, whole or sharded."""
        if value.shape != self.shape:
            raise RuntimeError(
                f".data of {self._label()} cannot become a tensor of shape {tuple(value.shape)}: "
                "the segment that is trained has room for its shape only. Resize (as "
                "resize_token_embeddings does) before fully_shard"
            )
        if value.dtype != self.dtype:
            raise RuntimeError(
                f".data of {self._label()} is {self.dtype} and cannot become {value.dtype}: its "
                "bucket has one dtype. Convert the value, or the model: model.to(dtype)"
            )
        with torch.no_grad():
            self.copy_(value)

    @property
    def requires_grad(self) -> bool:
        return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardTensor":
        """Set `requires_grad` as torch does; the parameter's bucket follows at the next forward."""
        changed = self.requires_grad != requires_grad
        Tensor.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
        slot = getattr(self, "_slot", None)
        if slot is not None and changed:
            slot.bucket.set_trainable(slot.index, requires_grad)
            shard_gathers.reduce_plain_gradients(self)
        return self

    def view_as(self, other: Tensor) -> Tensor:
        """View as torch does; refuse code of torch that looks for the parameter's node."""
        if not torch.compiler.is_compiling():
            refuse_search_for_node()
        return super().view_as(other)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse: one rank holds only a part."""
        self._refuse_whole(".numpy()")

    def tolist(self) -> NoReturn:
        """Refuse, as `numpy` does."""
        self._refuse_whole(".tolist()")

    def storage(self) -> NoReturn:
        """Refuse, as `numpy` does: safetensors would write the part alone."""
        self._refuse_whole(".storage()")

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of this rank's part: the storage of its bucket's segment.

        safetensors is refused: it would write as many bytes as the whole tensor has.
        """
        if is_called_by("safetensors"):
            self._refuse_whole(".untyped_storage()")
        if is_called_by("torch._"):  # fake tensors are made with the wrapper's storage
            return super().untyped_storage()
        return self._local.untyped_storage()

    def _typed_storage(self) -> NoReturn:
        """Refuse, as `numpy` does: torch.multiprocessing would send a part as the whole."""
        self._refuse_whole("its storage")

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, as `numpy` does."""
        self._refuse_whole("__dlpack__")

    def _refuse_whole(self, method: str) -> NoReturn:
        caller, way_out = caller_and_way_out()
        raise RuntimeError(
            f"{method} is not supported on {self._label()}, of which one rank holds only a part"
            f"{caller}. {way_out}"
        )

    def __setitem__(self, index: compat.Index, value: Tensor | complex) -> None:
        shard_fill.set_items(self, index, value)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        """Copy the tensor into one without a bucket. (A copy of a whole model has buckets.)"""
        copied = self.detach().clone()
        memo[id(self)] = copied
        if not isinstance(self, nn.Parameter):
            return copied
        memo[id(self)] = param = nn.Parameter(copied, self.requires_grad)
        return param

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Pickle this rank's part; refuse a parameter, because it belongs to a bucket."""
        if not isinstance(self, nn.Parameter):
            return pickled.reduced(self)
        raise RuntimeError(
            f"{self._label()} cannot be pickled (torch.save): one rank holds only a part of it. "
            "Save model.state_dict() with torch.distributed.checkpoint, or save .full_tensor()"
        )

    # -- torch's protocols for tensor subclasses ---------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: compat.Op,
        types: object,
        args: compat.Args = (),
        kwargs: compat.Kwargs | None = None,
    ) -> object:
        return shard_ops.rule_of(func)(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        return ["_local"], self._shard_spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], spec: ShardSpec, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> "ShardTensor":
        return ShardTensor(inner["_local"], shape, spec)

    def _stable_hash_for_caching(self) -> str:
        """The hash of a compiled `opt.step` in AOT autograd's cache; each rank has its own hash."""
        local = self._local
        spec = self._shard_spec
        outer = (tuple(self.shape), self.dtype, str(self.device), self.requires_grad, spec)
        inner = (tuple(local.shape), local.stride(), local.storage_offset())
        return hashlib.sha256(repr((outer, inner)).encode()).hexdigest()

    # -- torch.distributed.checkpoint ---------------------------------------------------------

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> list["planner.WriteItem"]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        compat.write_boxes_apart()
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._local),
                    size=self.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list["metadata.ChunkStorageMetadata"]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: "metadata.MetadataIndex") -> Tensor:
        first, _ = self._shard_spec.interval()
        for box in self._boxes():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                at = box.start - first if box.numel else 0
                return self._local[at : at + box.numel].view(box.sizes)
        raise ValueError(
            f"'{index.fqn}': this rank holds no part at offset {index.offset}; it holds "
            f"{[(box.offsets, box.sizes) for box in self._boxes()]}"
        )


compat.register_foreach_type(ShardTensor)
compat.let_torch_make(conversions)
Sharded.make = ShardTensor
