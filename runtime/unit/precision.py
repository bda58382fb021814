"""The precision policy of a unit, and its casts of inputs, outputs and buffers."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shardc.runtime.checks.values import Microscaled
from shardc.runtime.layout.wire_format import MICROSCALING


@dataclass(frozen=True)
class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):
    """torch's `MixedPrecisionPolicy` with more settings: of FSDP1's `MixedPrecision`, of the wire.

    Attributes:
        param_dtype: the dtype of gathered parameters and of compute; None: the stored dtype.
        reduce_dtype: the dtype of the reduction and of accumulated gradients; None: `param_dtype`.
        output_dtype: the dtype that floating-point outputs of the unit's modules are cast to.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.
        buffer_dtype: the dtype of floating-point buffers; a state dict has their first dtype.
        keep_low_precision_grads: leave gradients in the dtype of the reduction.
        full_precision_in_eval: cast nothing while the unit's module is in `eval()`.
        gather_wire_dtype: `torch.int8` or `torch.float8_e4m3fn`, the dtype of gathers on the wire,
            with a scale for each block; None: `param_dtype`. Storage, gradients and compute keep
            their dtypes. A gathered element is off by at most 0.4% of the largest value of its
            block (int8), or by 6.3% of itself (float8); with `wire_seed`, by twice as much.
            "mxfp8", "mxfp4" and "nvfp4" are published formats with blocks and scales of their own;
            in 4 bits an element is off by at most 20% of the largest value of its block.
        reduce_wire_dtype: `torch.int8`, the dtype of gradients on the wire, summed in float32;
            None: `reduce_dtype`. Each rank's part of the sum is off by at most 0.4% of the largest
            value of its block.
        wire_block: the number of elements that share a scale on the wire.
        wire_seed: the seed of stochastic rounding on the wire; None rounds to the nearest.
    """

    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    full_precision_in_eval: bool = False
    gather_wire_dtype: torch.dtype | Microscaled | None = None
    reduce_wire_dtype: torch.dtype | None = None
    wire_block: int = 128
    wire_seed: int | None = None

    @property
    def quantises(self) -> bool:
        """Whether gathers or reductions travel in fewer bits."""
        return self.gather_wire_dtype is not None or self.reduce_wire_dtype is not None

    @property
    def blocks(self) -> int:
        """A number of neighbours that is whole blocks on the wire; 0 where nothing is quantised."""
        if not self.quantises:
            return 0
        form = self.gather_wire_dtype
        return math.lcm(self.wire_block, MICROSCALING[form].block if isinstance(form, str) else 1)

    @staticmethod
    def of(policy: fsdp.MixedPrecisionPolicy) -> "MixedPrecisionPolicy":
        """`policy` as an object of this class; settings that torch's class lacks have defaults."""
        if isinstance(policy, MixedPrecisionPolicy):
            return policy
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `fn` to every tensor in `value`; a container in which nothing changes is not copied.

    Containers are tuples, lists, sets, mappings, dataclasses and packed sequences.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        data = fn(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, Mapping):
        new = {key: map_tensors(fn, item) for key, item in value.items()}
        if all(new[key] is value[key] for key in new):
            return value
        return type(value)(**new) if dataclasses.is_dataclass(value) else type(value)(new)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list, set)):
        items = [map_tensors(fn, item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {
            name: new
            for name in names
            if (new := map_tensors(fn, getattr(value, name))) is not getattr(value, name)
        }
        return dataclasses.replace(value, **changed) if changed else value
    return value


def cast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that casts floating-point tensors to `dtype`; others stay as they are."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return tensor.to(dtype)

    return cast


def moved_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that moves tensors to `device`."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return move


def keep_buffers_in(
    dtype: torch.dtype | None, modules: Iterable[nn.Module], skipped: Iterable[nn.Module] = ()
) -> None:
    """Cast the floating-point buffers below `modules`; a state dict has their first dtype.

    Buffers of modules in `skipped` are not cast.
    """
    if dtype is None:
        return
    left_alone = set(skipped)
    for module in dict.fromkeys(m for root in modules for m in root.modules()):
        if module in left_alone or "_shardc_stored" in vars(module):  # an inner unit's policy holds
            continue
        stored = {
            name: buffer.dtype
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and buffer.dtype != dtype
        }
        for name in stored:
            setattr(module, name, getattr(module, name).to(dtype))
        if stored:
            vars(module)["_shardc_stored"] = stored
            module.register_state_dict_post_hook(partial(_save_as_stored, stored))


def _save_as_stored(
    stored: Mapping[str, torch.dtype],
    module: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    _: object,
) -> None:
    for name, dtype in stored.items():
        if prefix + name in state:
            state[prefix + name] = state[prefix + name].to(dtype)
