"""Sharded parameters that several modules share, also parameters that are tied after sharding.

A module that takes over the parameter of another module takes over the parameter's slot. The slot
of the replaced parameter stays in its bucket, where no module reads it: the gradient is None, the
memory is kept.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from shardc.runtime import compat
from shardc.runtime.modules.parameters import GivenValue
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.params import SlotRef, TakenSlot
from shardc.runtime.unit.unit import Unit

if TYPE_CHECKING:
    from shardc.runtime.modules.modules import ShardedParameters


def holders_of(slot: SlotRef) -> set[tuple[nn.Module, str]]:
    """The modules that hold a parameter, each with the parameter's name in the module.

    The modules are searched below the outermost unit.
    """
    below = slots_below(slot.bucket.owner.outermost.modules)
    return {(holder, name) for holder, name, other in below if _lead_to_one(other, slot)}


def slots_below(roots: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    """The slots of modules and of the modules below, each with its holder and its name there."""
    for root in roots:
        for holder in root.modules():
            for name, slot in vars(holder).get("_shardc_slots", {}).items():
                yield holder, name, slot


def _lead_to_one(slot: SlotRef | GivenValue, other: SlotRef) -> bool:
    return slot.bucket is other.bucket and slot.index == other.index


def note_shared(root: nn.Module) -> None:
    """Mark the slots of sharded parameters below `root` that have several holders."""
    seen = set[SlotRef]()
    for _, _, slot in slots_below([root]):
        slot.is_shared |= slot in seen
        seen.add(slot)


def refuse_summoned(module: "ShardedParameters", name: str, param: nn.Parameter) -> None:
    """Raise where `param` is the summoned form of another parameter: values would be copied."""
    slot = module._shardc_slots[name]
    own = slot.slot if isinstance(slot, GivenValue) else slot
    for _, _, other in slots_below(own.bucket.owner.outermost.modules):
        given = isinstance(other, GivenValue) and other.given is param
        if given and not _lead_to_one(other.slot, own):
            raise NotImplementedError(
                f"'{name}' of {module._shardc_class.__name__}: tie it to "
                f"'{other.slot.name}' outside of summon_full_params, which would copy"
            )


def buckets_of(slots: Mapping[str, SlotRef | GivenValue], own: Unit | None) -> tuple[Bucket, ...]:
    """The buckets that a call of a module opens: of its unit, and of parameters that it holds."""
    held = [slot.bucket for slot in slots.values() if slot.bucket is not None]
    return tuple(dict.fromkeys([*(own.buckets if own else ()), *held]))


def tie(module: "ShardedParameters", name: str, slot: SlotRef, param: nn.Parameter) -> None:
    """Tie: `module` holds `param`, a sharded parameter of another module, in place of its own.

    Raises:
        NotImplementedError: `param` is sharded over other ranks.
    """
    taken: SlotRef = param._slot  # type: ignore[attr-defined]
    if slot.bucket.ranks != taken.bucket.ranks:
        raise NotImplementedError(
            f"'{name}' of {module._shardc_class.__name__} and '{taken.name}' are sharded over "
            "different ranks and cannot be tied: tie them before fully_shard"
        )
    taken.is_shared = True
    module._shardc_slots[name] = TakenSlot(taken.bucket, taken.index, is_shared=True)
    compat.put_parameter(module, name, param)
    own = vars(module).get("_shardc_unit")
    vars(module)["_shardc_buckets"] = buckets_of(module._shardc_slots, own)
