"""Adapters of PEFT, merged into the values that are sent while the model stays as it is.

The rules are those of PEFT's `merge` for plain LoRA: `scaling * B @ A` is added to the base weight
(transposed for `fan_in_fan_out` and embeddings), rank-stabilised scaling included. A and B are
gathered whole; the product is computed only for the box that is sent. peft is not imported: its
layers are known by the names of their classes.

Refused by name: DoRA and the other variants, `lora_bias`, layers with quantised weights,
convolutions, and other tuners.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardc.state.names import canonical_name
from shardc.state.values import whole

_PREFIX = "base_model.model."


@dataclass
class _Pair:
    """One LoRA of a base weight: `a: (r, in)`, `b: (out, r)`."""

    a: Tensor
    b: Tensor
    scaling: float
    transposed: bool


@dataclass
class Adapters:
    """The active adapters of a model, by the name under which their base weight is sent."""

    pairs: dict[str, list[_Pair]] = field(default_factory=dict)
    wrapped: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> "Adapters":
        """The adapters of `model`.

        Raises:
            ValueError: an active adapter cannot be merged by adding a product of two matrices.
        """
        found = cls(wrapped=True)
        for key, module in model.named_modules():
            classes = {f"{c.__module__}.{c.__name__}" for c in type(module).__mro__}
            if not any(name.endswith(".BaseTunerLayer") for name in classes):
                continue
            name = canonical_name(model, key)
            active = [] if module.disable_adapters else list(module.active_adapters)
            active = [one for one in active if one not in module.merged_adapters]
            pairs = [pair for one in active for pair in _pairs(name, module, one, classes)]
            if pairs:
                found.pairs[f"{_merged_name(name)}.weight"] = pairs
        return found

    def sent_as(self, name: str) -> str | None:
        """The name in the model without adapters; None for a tensor that such a model lacks."""
        if not self.wrapped:
            return name
        parts = name.split(".")
        if any(part.startswith("lora_") for part in parts) or "original_module" in parts:
            return None
        if "modules_to_save" in parts:
            at = parts.index("modules_to_save")
            name = ".".join(parts[:at] + parts[at + 2 :])
        return _merged_name(name)

    def gathered(self, device: torch.device) -> "Adapters":
        """The adapters with whole matrices. Every rank must call it."""
        pairs = {
            name: [
                _Pair(_whole(p.a, device), _whole(p.b, device), p.scaling, p.transposed)
                for p in each
            ]
            for name, each in self.pairs.items()
        }
        return Adapters(pairs, self.wrapped)

    @torch.no_grad()
    def merged(self, name: str, value: Tensor, start: tuple[int, ...]) -> Tensor:
        """`value`, the box of a base weight at `start`, with the products added; for `gathered`."""
        for pair in self.pairs.get(name, ()):
            (r0, c0), (rows, columns) = start, value.shape
            # (out, r) @ (r, in); for a transposed weight (in, r) @ (r, out)
            left, right = (pair.a.T, pair.b.T) if pair.transposed else (pair.b, pair.a)
            left, right = left[r0 : r0 + rows], right[:, c0 : c0 + columns]
            half = value.device.type == "cpu" and left.dtype in (torch.float16, torch.bfloat16)
            product = left.float() @ right.float() if half else left @ right
            delta = (product * pair.scaling).to(left.dtype)
            value = (value + delta).to(value.dtype)
        return value


def _whole(value: Tensor, device: torch.device) -> Tensor:
    return whole(value, device).detach().to(device)


def _merged_name(name: str) -> str:
    return name.removeprefix(_PREFIX).replace(".base_layer", "")


def _pairs(name: str, module: Any, adapter: str, classes: set[str]) -> Iterator[_Pair]:
    linear = "peft.tuners.lora.layer.Linear" in classes
    embedding = "peft.tuners.lora.layer.Embedding" in classes
    reason = None
    if not linear and not embedding:
        reason = f"is a {type(module).__name__}, whose merge is not a sum with B @ A"
    elif adapter in module.lora_variant:
        reason = f"has the variant {type(module.lora_variant[adapter]).__name__}"
    elif module.lora_bias.get(adapter):
        reason = "has lora_bias=True"
    if reason is not None:
        raise ValueError(
            f"merge_adapters: '{name}' with the adapter '{adapter}' {reason}; merge in the model "
            "itself, model.merge_adapter() before and model.unmerge_adapter() after"
        )
    if linear and adapter in module.lora_A:
        a, b = module.lora_A[adapter].weight, module.lora_B[adapter].weight
        yield _Pair(a, b, module.scaling[adapter], module.fan_in_fan_out)
    elif embedding and adapter in module.lora_embedding_A:
        a, b = module.lora_embedding_A[adapter], module.lora_embedding_B[adapter]
        yield _Pair(a, b, module.scaling[adapter], True)
