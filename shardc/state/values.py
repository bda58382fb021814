"""Values of state dicts: gathered, moved, taken apart; and written back from any form.

One full tensor exists at a time. A sum of integers puts it together: every rank has a buffer of the
full size that is zero outside of the rank's own part, so that the sum has the bits of all parts.
The sum needs exactly one full tensor on the device, however unevenly the parts are cut, and moves
twice as many bytes as an all-gather.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from shardc.optim.first_state import map_leaves
from shardc.runtime import compat
from shardc.runtime.checks.words import plural
from shardc.runtime.tensor.quantised_state import restore
from shardc.runtime.tensor.shard_operands import interval_like
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.watch.entering import entering
from shardc.state.ranks import ModelRanks

Tree = Any
"""Dicts, lists and tuples of values."""

CPU = torch.device("cpu")


def _each_once(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`fn`, memoised by tensor identity: it is called once for a tied parameter."""
    done: dict[int, tuple[Tensor, Any]] = {}  # the tensor too, so that its id stays taken

    def call(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in done:
            done[id(value)] = (value, fn(value))
        return done[id(value)][1]

    return call


# -- out of the model ----------------------------------------------------------------------------


def whole(value: Any, device: torch.device) -> Any:
    """A sharded value as a full, plain tensor on `device`. Every rank with a part must call it."""
    if compat.is_dtensor(value):
        return value.full_tensor().detach()
    if not isinstance(value, ShardTensor):
        return value
    tp = value._shard_spec.tp
    if tp is None:
        return _put_together(value, tuple(value.shape), device)
    return tp.wrap(_put_together(value, tp.local_shape, device)).full_tensor()


def _put_together(value: ShardTensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    spec, local = value._shard_spec, value._local
    size = spec.numel * local.element_size()
    buffer = torch.zeros(-(-size // 8), dtype=torch.int64, device=device)
    flat = buffer.view(torch.uint8)[:size].view(local.dtype)
    start, stop = spec.interval()
    flat[start:stop].copy_(local)
    if spec.numel:
        with entering(f"an all-reduce of {plural(size, 'byte')}", spec.group):
            dist.all_reduce(buffer, group=compat.resolve_group(spec.group))
    return flat.view(shape)


def full_values(tree: Tree, ranks: ModelRanks, offload: bool) -> Tree:
    """`tree` with full tensors; with `offload`, on the first rank's host, and `{}` elsewhere."""
    keep = ranks.is_first or not offload

    def gather(value: Tensor) -> Tensor | None:
        full = whole(value, ranks.device)
        if not keep:
            return None
        return full.detach().to(CPU if offload else full.device, copy=full is value)

    result = map_leaves(_each_once(gather), tree)
    return result if keep else {}


def on_host(tree: Tree) -> Tree:
    """`tree` with copies of all tensors in host memory; a sharded tensor stays sharded."""
    return map_leaves(_each_once(lambda value: value.detach().to(CPU, copy=True)), tree)


def local_parts(tree: Tree) -> Tree:
    """`tree` with a plain copy of this rank's part, 1-D, for each sharded tensor."""

    def part(value: Tensor) -> Tensor:
        if isinstance(value, ShardTensor):
            return value._local.clone()
        if isinstance(value, DTensor):
            return value.to_local().detach().clone()
        return value

    return map_leaves(_each_once(part), tree)


# -- from one rank to all ------------------------------------------------------------------------


@dataclass(frozen=True)
class Announced:
    """A tensor that the first rank will send: entry `index` of its list."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class Values:
    """A state dict to load, and the way to its tensors.

    Attributes:
        tree: the dict; if it comes from the first rank, with an `Announced` for each tensor.
        ranks: the ranks that load it.
    """

    tree: Tree
    ranks: ModelRanks
    _sent: list[Tensor] = field(default_factory=list)

    @classmethod
    def from_first(cls, tree: Tree, ranks: ModelRanks) -> "Values":
        """The values of the first rank; `tree` is ignored on the others."""
        values = cls({}, ranks)
        skeleton: Any = None
        if ranks.is_first:
            try:
                skeleton = map_leaves(values._announce, tree)
            except ValueError as error:
                skeleton = error
        values.tree = ranks.broadcast_object(skeleton)
        if isinstance(values.tree, Exception):
            raise values.tree
        return values

    def _announce(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, (ShardTensor, DTensor)):
            raise ValueError(
                f"broadcast_from_rank0 sends full tensors, and rank 0 has a {type(value).__name__} "
                f"of shape {tuple(value.shape)}: get the state dict with full_state_dict=True, or "
                "give the sharded one on every rank without broadcast_from_rank0"
            )
        self._sent.append(value)
        return Announced(len(self._sent) - 1, value.shape, value.dtype)

    def fetch(self, value: Any) -> Any:
        """The tensor for an `Announced`, else `value`; every rank must ask in the same order."""
        if not isinstance(value, Announced):
            return value
        sent = self._sent[value.index] if self.ranks.is_first else None
        return self.ranks.broadcast(sent, value.shape, value.dtype)


# -- into the model ------------------------------------------------------------------------------


@torch.no_grad()
def write_value(target: Tensor, value: Tensor, local: bool = False) -> None:
    """Write `value`, in any form, into `target`, sharded or not; with `local`, `value` is a part.

    A sharded value that is cut otherwise is gathered: every rank must call it.
    """
    if local and isinstance(target, ShardTensor):
        value = ShardTensor(value, target.shape, target._shard_spec)
    elif local and compat.is_dtensor(target):
        target = target.to_local()
    elif not _same_form(target, value):
        value = whole(value, target.device)
        if compat.is_dtensor(target):
            mesh, placements = target.device_mesh, target.placements
            value = distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None)
    target.copy_(value)
    restore(target, value)


def _same_form(target: Tensor, value: Tensor) -> bool:
    if isinstance(target, ShardTensor):
        if isinstance(value, ShardTensor):
            return value._shard_spec == target._shard_spec
        return not compat.is_dtensor(value)  # copy_ cuts a full tensor
    if compat.is_dtensor(target):
        return type(target) is type(value)
    return not isinstance(value, (ShardTensor, DTensor))


def part_like(param: Tensor, value: Any) -> Any:
    """`value`, a new state of `param`, sharded as `param` if the two shapes are equal.

    A number, also a 0-dim tensor, and a tensor of another shape stay whole.
    """
    if not isinstance(value, Tensor) or not isinstance(param, (ShardTensor, DTensor)):
        return whole(value, param.device)
    if value.dim() == 0 or value.shape != param.shape:
        return whole(value, param.device)
    if compat.is_dtensor(param):
        made = torch.empty_like(param, dtype=value.dtype)
        write_value(made, value)
        return made
    if isinstance(value, ShardTensor) and value._shard_spec == param._shard_spec:
        return value
    full = whole(value, param.device)
    part = interval_like(full, param).to(param.device, copy=True)
    return ShardTensor(part, tuple(param.shape), param._shard_spec)
