"""transformers' `from_pretrained(..., distributed_config=)` reads files into ShardTensors.

transformers shards a model on meta, and cuts each value that it reads by the dims of its `Shard`
placements. A ShardTensor has no such dim: its part is an interval. Two names of transformers'
loader are replaced (5.24). One reads the boxes of a rank's interval. The other sets a parameter,
also to a whole value, as transformers' conversions make it (experts that a file has one by one).
"""

import functools
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardc.runtime.tensor.shard_spec import FlatShard
from shardc.runtime.tensor.shard_tensor import ShardTensor


def let_transformers_load() -> None:
    """Make transformers' loader fill ShardTensors, where the loader is imported and has the names.

    A second call changes nothing.
    """
    loader: Any = sys.modules.get("transformers.core_model_loading")
    theirs = getattr(loader, "DtensorShardOperation", None)
    set_theirs = getattr(loader, "set_param_for_module", None)
    if theirs is None or set_theirs is None or theirs.__module__ == __name__:
        return

    class Reading(theirs):  # type: ignore[misc, valid-type]
        """An operation that reads this rank's part of the values of one parameter."""

        def __init__(self, param: Tensor) -> None:
            super().__init__(_unsharded(param) if isinstance(param, ShardTensor) else param)
            self.param = param

        def shard_tensor(
            self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
        ) -> Any:
            shape = tuple(source.shape if isinstance(source, Tensor) else source.get_shape())
            is_whole = tensor_idx is None and shape == tuple(self.param.shape) != ()
            if isinstance(self.param, ShardTensor) and is_whole:
                return read_part(self.param, source, device, dtype)
            return super().shard_tensor(source, tensor_idx, device, dtype)

    @functools.wraps(set_theirs)
    def set_param(
        model: nn.Module, target_name: str, param_value: Tensor, loading_info: Any, *rest: Any
    ) -> None:
        path, _, name = target_name.rpartition(".")
        module = model.get_submodule(path)
        held = getattr(module, name, None)
        if not isinstance(held, ShardTensor):
            set_theirs(model, target_name, param_value, loading_info, *rest)
            return
        loading_info.missing_keys.discard(target_name)
        wanted, value = _unsharded_shape(held), param_value
        if not isinstance(value, ShardTensor):
            if value.shape != wanted:
                loading_info.mismatched_keys.add((target_name, value.shape, wanted))
                return
            value = DTensor.from_local(
                value.detach(), held.device_mesh, held.placements, shape=held.shape,
                stride=held.stride(),
            )  # fmt: skip
        setattr(module, name, nn.Parameter(value, held.requires_grad))
        getattr(module, name)._is_hf_initialized = True  # else transformers would draw a value

    loader.DtensorShardOperation, loader.set_param_for_module = Reading, set_param


def _unsharded(param: ShardTensor) -> Any:
    """The facts by which transformers cuts a value, as they were before `fully_shard`."""
    placements = [Replicate() if isinstance(p, FlatShard) else p for p in param.placements]
    return SimpleNamespace(
        shape=param.shape, ndim=param.ndim, device_mesh=param.device_mesh, placements=placements
    )


def _unsharded_shape(param: ShardTensor) -> torch.Size:
    """The shape of the value before `fully_shard`: on a tensor-parallel mesh, of a local value."""
    tp = param._shard_spec.tp
    return param.shape if tp is None else torch.Size(tp.local_shape)


def read_part(param: ShardTensor, source: Any, device: Any, dtype: Any) -> ShardTensor:
    """Read this rank's part of `source`, a tensor or a slice of a file, of the shape of `param`."""
    parts = [torch.empty(0, device=device, dtype=dtype or param.dtype)]
    for box in param._boxes():
        if box.numel:
            at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            parts.append(source[at].reshape(-1).to(device=device, dtype=dtype))
    return ShardTensor(torch.cat(parts), tuple(param.shape), param._shard_spec)
