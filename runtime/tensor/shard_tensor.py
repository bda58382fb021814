"""ShardTensor: a parameter of full shape of which this rank holds one interval.

What users and optimizers hold instead of the full parameter. The local part is a 1-D view of the
rank's segment of a bucket, the interval `[start, stop)` of the flattened parameter. Elementwise
ops run on the local part, statistics are reduced over ranks, initialisers draw the full tensor and
keep the interval, and the rest runs on gathered values (`shard_ops` holds the table). So stock
optimizers, `torch.nn.init`, clipping, GradScaler and DCP work at any world size.

Only the local part and an immutable spec live on the object: checkpoints copy `__dict__` deeply.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.checks.refusal import caller_and_way_out, refuse_split_backward
from shardc.runtime.comm.collectives import all_gather
from shardc.runtime.layout.interval_boxes import Box, boxes_of
from shardc.runtime.layout.layout import interval
from shardc.runtime.tensor.tensor_parallel import Placed

if TYPE_CHECKING:
    from torch.distributed.checkpoint import metadata, planner


@dataclass(frozen=True)
class ShardSpec:
    """Where a flattened tensor of `numel` elements lies on the ranks of a group.

    It starts at element `offset` of a flat bucket whose rank r holds `[r*segment, (r+1)*segment)`.
    `tp` says which part of a DTensor the flattened tensor is; None: it is all of the parameter.
    `everyone` names the group of all ranks that have it, copies included; "": `group`.
    Without a `group` it is a part that comes from a file (`pickled`).
    """

    offset: int
    numel: int
    segment: int
    rank: int
    world_size: int
    group: str
    tp: Placed | None = None
    everyone: str = ""

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


class ShardTensor(Tensor):
    """A tensor of full shape, dtype and device of which `to_local()` is this rank's part."""

    _local: Tensor
    _spec: ShardSpec

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], spec: ShardSpec) -> "ShardTensor":
        """Wrap `local`, the interval `spec.interval()` of a flattened tensor of `shape`."""
        if not isinstance(spec, ShardSpec):
            raise TypeError(
                f"a ShardTensor is made by fully_shard, its spec is a ShardSpec; got {spec!r}"
            )
        self: ShardTensor = compat.make_wrapper(cls, shape, local)  # type: ignore[assignment]
        self._local = local
        self._spec = spec
        return self

    # -- what a user asks for ----------------------------------------------------------------

    def to_local(self) -> Tensor:
        """This rank's part, 1-D, sharing memory: `[start, stop)` of the flattened tensor."""
        return self._local

    def full_tensor(self) -> Tensor:
        """The whole tensor, gathered from all ranks that hold a part: each of them must call it.

        Not differentiable. Moves `world_size` times the largest local part; of a DTensor then the
        same over its own mesh.
        """
        tp = self._spec.tp
        return self._unsharded() if tp is None else tp.wrap(self._unsharded()).full_tensor()

    def _unsharded(self) -> Tensor:
        """The value before `fully_shard`: all of a plain parameter, the local one of a DTensor."""
        spec = self._spec
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

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        start, stop = self._spec.interval()
        return (
            f"ShardTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"rank {self._spec.rank} of {self._spec.world_size} holds elements "
            f"[{start}, {stop}) of {self._spec.numel}{self._placed()}: {self._local})"
        )

    def _placed(self) -> str:
        tp = self._spec.tp
        if tp is None:
            return ""
        return f" of the local value {list(tp.local_shape)} at {list(tp.offsets)}, {tp.placements}"

    # -- what parameters do beyond ops ---------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Write the values of `value`, a tensor of the same shape, whole or sharded alike."""
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
        """As `Tensor.requires_grad_`; a parameter's bucket follows from the next forward on."""
        changed = self.requires_grad != requires_grad
        Tensor.requires_grad.__set__(self, requires_grad)  # type: ignore[attr-defined]
        slot = getattr(self, "_slot", None)
        if slot is not None and changed:
            slot.bucket.set_trainable(slot.index, requires_grad)
        return self

    @property
    def device_mesh(self) -> NoReturn:
        """Of DTensors: a ShardTensor is cut by flat intervals, which no placement describes."""
        self._refuse_of_dtensors("device_mesh")

    @property
    def placements(self) -> NoReturn:
        """Of DTensors, as `device_mesh`."""
        self._refuse_of_dtensors("placements")

    @property
    def redistribute(self) -> NoReturn:
        """Of DTensors, as `device_mesh`."""
        self._refuse_of_dtensors("redistribute")

    def _refuse_of_dtensors(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self._label()} is no DTensor and has no .{name}. To write a whole tensor into it: "
            "param.copy_(full) under torch.no_grad(), each rank takes its part, or "
            "shardc.set_model_state_dict for a model. To read all of it: param.full_tensor()"
        )

    def view_as(self, other: Tensor) -> Tensor:
        """As `Tensor.view_as`, which stages of a pipeline call to find a parameter in a graph."""
        if not torch.compiler.is_compiling():
            refuse_split_backward()
        return super().view_as(other)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused: one rank holds only a part."""
        self._refuse_whole(".numpy()")

    def tolist(self) -> NoReturn:
        """Refused, as `numpy`."""
        self._refuse_whole(".tolist()")

    def storage(self) -> NoReturn:
        """Refused, as `numpy`: safetensors would write what is there."""
        self._refuse_whole(".storage()")

    def _refuse_whole(self, method: str) -> NoReturn:
        caller, way_out = caller_and_way_out()
        raise RuntimeError(
            f"{method} is not supported on {self._label()}, of which one rank holds only a part"
            f"{caller}. {way_out}"
        )

    def __setitem__(self, index: compat.Index, value: Tensor | complex) -> None:
        shard_fill.set_items(self, index, value)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        """A copy of its own, which no bucket knows; that of a whole model has buckets."""
        copied = self.detach().clone()
        memo[id(self)] = copied
        if not isinstance(self, nn.Parameter):
            return copied
        memo[id(self)] = param = nn.Parameter(copied, self.requires_grad)
        return param

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """This rank's part; of parameters, which belong to a bucket, none."""
        if not isinstance(self, nn.Parameter):
            return pickled.reduced(self)
        raise RuntimeError(
            f"{self._label()} cannot be pickled (torch.save): one rank holds only a part of it. "
            "Save model.state_dict() with torch.distributed.checkpoint, or save .full_tensor()"
        )

    def _label(self) -> str:
        slot = getattr(self, "_slot", None)
        name = f"parameter '{slot.name}'" if slot is not None else "a ShardTensor"
        return f"{name} of shape {tuple(self.shape)}"

    # -- torch's protocols for tensor subclasses ---------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: compat.Op,
        types: object,
        args: compat.Args = (),
        kwargs: compat.Kwargs | None = None,
    ) -> object:
        return shard_ops.dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], ShardSpec]:
        return ["_local"], self._spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], spec: ShardSpec, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> "ShardTensor":
        return ShardTensor(inner["_local"], shape, spec)

    def _stable_hash_for_caching(self) -> str:
        """What AOT autograd's cache knows a compiled `opt.step` by; each rank has its own."""
        local = self._local
        outer = (tuple(self.shape), self.dtype, str(self.device), self.requires_grad, self._spec)
        inner = (tuple(local.shape), local.stride(), local.storage_offset())
        return hashlib.sha256(repr((outer, inner)).encode()).hexdigest()

    # -- torch.distributed.checkpoint ---------------------------------------------------------

    def _boxes(self) -> list[Box]:
        """The boxes of the full tensor that this rank saves and loads."""
        if self.numel() == 0:  # DCP wants a box for it all the same; the first rank has it
            shape = tuple(self.shape)
            return [Box((0,) * len(shape), shape, 0)] if self._spec.rank == 0 else []
        tp = self._spec.tp
        if tp is None:
            return list(boxes_of(tuple(self.shape), *self._spec.interval()))
        return [box.moved(tp.offsets) for box in boxes_of(tp.local_shape, *self._spec.interval())]

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
        first, _ = self._spec.interval()
        for box in self._boxes():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                at = box.start - first if box.numel else 0
                return self._local[at : at + box.numel].view(box.sizes)
        raise ValueError(
            f"'{index.fqn}': this rank holds no part at offset {index.offset}; it holds "
            f"{[(box.offsets, box.sizes) for box in self._boxes()]}"
        )


compat.register_foreach_type(ShardTensor)

from shardc.runtime.tensor import pickled, shard_fill, shard_ops  # noqa: E402  # noqa: E402 (they need ShardTensor)
