"""Precision of a unit, and the casts that it asks for on the way in and out of its modules."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):
    """torch's `MixedPrecisionPolicy` with what FSDP1's `MixedPrecision` has beside it.

    Attributes:
        param_dtype: of gathered parameters and of the computation; None: as stored.
        reduce_dtype: what gradients are reduced and accumulated in; None: `param_dtype`.
        output_dtype: what floating-point outputs of the unit's modules are cast to.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.
        buffer_dtype: of floating-point buffers while they live; they are saved as they were.
        keep_low_precision_grads: leave gradients in the dtype they were reduced in.
        full_precision_in_eval: do without all casts while the unit's module is in `eval()`.
        gather_wire_dtype: `torch.int8` or `torch.float8_e4m3fn`: what parameters are gathered in,
            with a scale for each block; None: `param_dtype`. Storage, gradients and compute keep
            their dtypes. A gathered element is off by at most 0.4% of the largest value of its
            block (int8), or by 6.3% of itself (float8); twice that with `wire_seed`.
        reduce_wire_dtype: `torch.int8`: what gradients are sent in, to be summed in float32; None:
            `reduce_dtype`. Each rank's part of the sum is off by at most 0.4% as above.
        wire_block: elements that share a scale on the wire.
        wire_seed: of stochastic rounding on the wire; None rounds to the nearest.
    """

    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    full_precision_in_eval: bool = False
    gather_wire_dtype: torch.dtype | None = None
    reduce_wire_dtype: torch.dtype | None = None
    wire_block: int = 128
    wire_seed: int | None = None

    @property
    def quantises(self) -> bool:
        """Whether anything travels in fewer bits."""
        return self.gather_wire_dtype is not None or self.reduce_wire_dtype is not None

    @staticmethod
    def of(policy: fsdp.MixedPrecisionPolicy) -> "MixedPrecisionPolicy":
        """`policy` with the defaults of what torch's class does not have."""
        if isinstance(policy, MixedPrecisionPolicy):
            return policy
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `fn` applied to every tensor in it; what holds none of them comes back as it is.

    Looks into tuples, lists, sets, dicts, dataclasses and packed sequences.
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
    """Casts floating-point tensors, leaves others."""

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return tensor.to(dtype)

    return cast


def moved_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Moves tensors that are elsewhere."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    return move


def keep_buffers_in(
    dtype: torch.dtype | None, modules: Iterable[nn.Module], skipped: Iterable[nn.Module] = ()
) -> None:
    """Cast the floating-point buffers below `modules`; state dicts have them as they were.

    Those of modules in `skipped` stay as they are.
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
