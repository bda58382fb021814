"""The ranks that hold a model, for state dicts that one rank gives, or keeps, for all ranks.

A model lies on a grid: data-parallel ranks times tensor-parallel ranks. A message of one rank to
all travels along one axis of the grid after the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.watch.entering import entering, told


@dataclass(frozen=True)
class ModelRanks:
    """The ranks that hold a model.

    Attributes:
        groups: the axes of the grid; none in a single process.
        device: the device from which tensors are sent.
    """

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> "ModelRanks":
        """The ranks over which `model` is sharded; all ranks for an unsharded model."""
        params = list(model.parameters())
        first = next((p.device for p in params if not p.is_meta), torch.device("cpu"))
        device = next((p._slot.bucket.device for p in params if hasattr(p, "_slot")), first)
        if not dist.is_initialized():
            return cls((), device)
        names = dict.fromkeys(name for param in params for name in _groups_of(param))
        groups = tuple(dict.fromkeys(map(compat.resolve_group, names)))  # some have two names
        if not any(isinstance(param, ShardTensor) for param in params):
            groups = (dist.group.WORLD,)  # type: ignore[assignment]
        return cls(tuple(g for g in groups if not compat.is_fake_group(g)), device)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that keeps and gives full state dicts: rank 0, as a rule."""
        return all(group.rank() == 0 for group in self.groups)

    def broadcast(self, value: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first rank's tensor on every rank, on `device`; other ranks give None."""
        if value is None:
            value = torch.empty(shape, dtype=dtype, device=self.device)
        value = value.detach().to(self.device).contiguous()
        sent = value.reshape(-1).view(torch.uint8)
        for group in self.groups if sent.numel() else ():
            with entering(f"a broadcast of {sent.numel()}", compat.group_name(group)):
                dist.broadcast(sent, group=group, group_src=0)
        return value

    def broadcast_object(self, value: Any) -> Any:
        """Send the first rank's `value`, pickled, to every rank; gives the value."""
        box = [value]
        for group in self.groups:
            with entering("a broadcast of an object", compat.group_name(group)):
                dist.broadcast_object_list(box, group=group, group_src=0)
        return box[0]

    def agree(self, error: Exception | None, outcome: str = "nothing was loaded") -> None:
        """Raise on every rank if one has an error: the own error, or the error of another rank.

        Args:
            error: the error of this rank.
            outcome: the words for the state in which an error leaves the ranks.

        Raises:
            RuntimeError: another rank has an error, and this one has none.
        """
        errors: list[str] = []
        if error is not None:
            errors = [f"rank {dist.get_rank() if self.groups else 0}: {error}"]
        for group in self.groups:
            errors = [each for some in told(errors, "a check of all ranks", group) for each in some]
        if error is not None:
            raise error
        if errors:
            raise RuntimeError(f"{outcome}, because not every rank can. {errors[0]}")


def _groups_of(param: Tensor) -> Iterator[str]:
    """The names of the process groups along which `param` lies."""
    mesh, skipped = None, frozenset[int]()
    if compat.is_dtensor(param):
        mesh = param.device_mesh
    elif isinstance(param, ShardTensor):
        slot = getattr(param, "_slot", None)
        yield param._shard_spec.group if slot is None else slot.bucket.ranks.everyone
        if param._shard_spec.tp is not None:
            mesh, skipped = param._shard_spec.tp.mesh, param._shard_spec.tp.data_dims
    if mesh is not None:
        for dim in range(mesh.ndim):
            if dim not in skipped:
                yield compat.group_name(mesh.get_group(dim))
