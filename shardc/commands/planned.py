"""The rows of `shardc plan`: the units of a model as `fully_shard` would plan them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import OffloadPolicy

from shardc.commands.errors import FoundProblem
from shardc.passes.estimate.hardware import Profile
from shardc.runtime.layout.layout import BucketLayout
from shardc.runtime.unit.precision import MixedPrecisionPolicy
from shardc.sharding.checks import check_ignored, check_model, check_modules
from shardc.sharding.unit_plan import UnitPlan, plan_units

ADAM_STATES = 2


def plan_model(
    model: nn.Module, world_size: int, policy: MixedPrecisionPolicy, profile: Profile
) -> list[UnitPlan]:
    """The units of `fully_shard(model, units="auto", mp_policy=policy)` on `world_size` ranks.

    Raises:
        FoundProblem: `fully_shard` would refuse the model, or the model has no parameters; the
            message has the reason.
    """
    options = {
        "reshard_after_forward": None,
        "mp_policy": policy,
        "offload_policy": OffloadPolicy(),
    }
    try:
        modules = check_modules(model)
        alone = check_ignored(modules, None)
        plans = plan_units(modules, "auto", options, alone, world_size, profile)
        params = [param for plan in plans for param in plan.params.values()]
        check_model(modules, params, range(world_size), world_size, None)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise FoundProblem(f"fully_shard would refuse this model: {error}") from error
    if not params:
        raise FoundProblem(
            f"the {type(model).__name__} has no parameters: there is nothing to shard"
        )
    return plans


@dataclass(frozen=True)
class UnitGroup:
    """Units of equal layout, by name in the model; the figures of `plan` hold for each unit."""

    names: tuple[str, ...]
    plan: UnitPlan

    @property
    def label(self) -> str:
        """The name of the group in a table."""
        if len(self.names) == 1:
            return self.names[0] or "(root)"
        return f"{self.names[0]} .. {self.names[-1]} ({len(self.names)})"


def group_units(model: nn.Module, plans: Iterable[UnitPlan]) -> list[UnitGroup]:
    """Group plans of equal class and layout, whose names in the model differ in numbers only."""
    names = {module: name for name, module in model.named_modules()}
    groups: dict[Any, list[tuple[str, UnitPlan]]] = {}
    for plan in plans:
        module = plan.modules[0]
        pattern = re.sub(r"\d+", "*", names[module])
        groups.setdefault((pattern, type(module), plan.layouts), []).append((names[module], plan))
    return [UnitGroup(tuple(name for name, _ in group), group[0][1]) for group in groups.values()]


def total(plans: Sequence[UnitPlan]) -> dict[str, Any]:
    """The sums over all buckets: counts, and the most bytes that a rank keeps, padding included.

    Frozen parameters have no gradient. Adam's two moments have the dtype of the parameters.
    """
    layouts = [layout for plan in plans for layout in plan.layouts]
    used = sum(layout.used for layout in layouts)
    numel = sum(layout.numel for layout in layouts)
    gradients = sum(segment_bytes(layout) for layout in layouts if layout.requires_grad)
    return {
        "parameters": used,
        "units": len(plans),
        "buckets": len(layouts),
        "padding_fraction": (numel - used) / numel if numel else 0.0,
        "bytes_per_rank": {
            "parameters": sum(segment_bytes(layout) for layout in layouts),
            "gradients": gradients,
            "adam": ADAM_STATES * gradients,
        },
    }


def segment_bytes(layout: BucketLayout) -> int:
    """Bytes that a rank keeps of a bucket."""
    return layout.segment * layout.dtype.itemsize
