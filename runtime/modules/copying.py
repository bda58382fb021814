"""Copies of sharded modules. A deep copy has new buckets with copied segments, and sends nothing.

`copy.deepcopy` looks into its memo before it copies anything. So new buckets, parameters, units and
empty module shells are made first and put into the memo; then each shell is filled as usual. A copy
has no gradients, gathered buckets or accumulated sums: a copy of an ordinary parameter has no
gradient either. A copy has no compiled code: torch's modules leave it out of their state.

Sharded modules define `__reduce_ex__` for `copy`, not `__deepcopy__`. A wrapper that forwards
unknown attributes to its module (`torch.compile(model)`, torch's `checkpoint_wrapper`) would
forward `__deepcopy__` too, and a copy of the wrapper would be a copy of the module inside.
"""

import copy
from dataclasses import replace
from typing import NoReturn

from torch import nn

from shardc.runtime import compat
from shardc.runtime.modules.late_params import watch_for_late_params
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.params import Place, make_param
from shardc.runtime.unit.settings import Settings
from shardc.runtime.unit.unit import Unit


class Copying:
    """A stand-in for a sharded module that `copy` can copy and that refuses `pickle`.

    Attributes:
        module: the module, or its copy once `copy.deepcopy` has made one.
        is_deep: whether `copy.deepcopy` has made a copy.
    """

    def __init__(self, module: nn.Module, is_deep: bool = False) -> None:
        self.module = module
        self.is_deep = is_deep

    def __deepcopy__(self, memo: compat.Memo) -> "Copying":
        return Copying(copy_sharded(self.module, memo), is_deep=True)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotImplementedError(
            f"a sharded {type(self.module).__name__} cannot be pickled: save its state_dict() "
            "with torch.distributed.checkpoint"
        )


def copied(copying: Copying) -> nn.Module:
    """The copy that `copy` asks for; a shallow copy has the parameters of the original."""
    module = copying.module
    if copying.is_deep:
        return module
    shell: nn.Module = object.__new__(type(module))
    shell.__setstate__(compat.state_of(module))
    vars(shell)["_shardc_copied"] = module  # kept alive: its unit holds it weakly
    return shell


@compat.untraced
def copy_sharded(module: nn.Module, memo: compat.Memo) -> nn.Module:
    """A deep copy of a module that holds sharded parameters. Every rank must make the copy.

    If a unit has several modules, the unit's other modules are copied too, with their memory.

    Raises:
        NotImplementedError: some of the parameters belong to a unit around the module.
    """
    modules, units = _copied_with(module, memo)
    inside = [m for m in modules if "_shardc_slots" in vars(m)]
    for m in inside:
        memo[id(m)] = object.__new__(type(m))
    copies = [_copy_unit(unit, memo) for unit in units]
    for m in inside:
        memo[id(m)].__setstate__(copy.deepcopy(compat.state_of(m), memo))
    for unit, new in zip(units, copies, strict=True):
        for name in ("forward_prefetch", "backward_prefetch"):
            new.settings.put(name, tuple(memo.get(id(u), u) for u in getattr(unit.settings, name)))
        new.put_into(None if unit.around is None else memo.get(id(unit.around())))
    result: nn.Module = memo[id(module)]
    return result


def _copied_with(module: nn.Module, memo: compat.Memo) -> tuple[list[nn.Module], list[Unit]]:
    """The modules and units that are copied with `module` and are not in `memo` yet."""
    modules = [m for m in module.modules() if id(m) not in memo]
    known, units = {id(m) for m in modules} | memo.keys(), dict[Unit, None]()
    for holder in modules:  # the list grows
        for unit in _units_of(holder) if "_shardc_slots" in vars(holder) else ():
            if id(unit) in memo or unit in units:
                continue
            units[unit] = None
            for other in unit.modules:
                if id(other) not in known and module in other.modules():
                    raise NotImplementedError(
                        f"deepcopy of {type(module).__name__}, which holds parameters of the "
                        f"sharded {type(other).__name__} around it: copy that one"
                    )
                added = [m for m in other.modules() if id(m) not in known]
                modules += added
                known |= {id(m) for m in added}
    return modules, list(units)


def _units_of(module: nn.Module) -> list[Unit]:
    """The unit of a sharded module, and the units whose parameters the module holds.

    The module's own unit may have no bucket.
    """
    own = vars(module).get("_shardc_unit")
    owners: list[Unit] = [bucket.owner for bucket in vars(module)["_shardc_buckets"]]
    return owners if own is None else [own, *owners]


def _copy_unit(unit: Unit, memo: compat.Memo) -> Unit:
    settings = replace(unit.settings)
    new = Unit(
        tuple(memo[id(m)] for m in unit.modules),
        tuple(_copy_bucket(bucket, settings, memo) for bucket in unit.buckets),
        unit.mesh,
        unit.asked_reshard,
        settings,
        unit.device,
        frozenset(copy.deepcopy(param, memo) for param in unit.ignored),
        frozenset(copy.deepcopy(m, memo) for m in unit.skipped),
        unit.name,
        on_meta=unit.on_meta,
        mixed=unit.mixed,
        differs=unit.differs,
        joined=unit.joined,
    )
    memo[id(unit)] = new
    watch_for_late_params(new)
    return new


def _copy_bucket(bucket: Bucket, settings: Settings, memo: compat.Memo) -> Bucket:
    segment = bucket.segment.detach().clone()
    if bucket.segment.is_pinned():
        segment = segment.pin_memory()
    extension = bucket.extension and bucket.extension.copied_to(memo)
    new = Bucket(
        bucket.layout, bucket.ranks, settings, segment, bucket.device, bucket.placed, extension
    )
    new.origin = bucket.origin
    memo[id(bucket)] = new
    new.places = {index: Place(new, index) for index in bucket.places}
    for index, (param, flag) in enumerate(zip(bucket.params, bucket.trainable, strict=True)):
        copied = make_param(new, index, param)
        new.params.append(copied)
        memo[id(param)], memo[id(param._slot)] = copied, copied._slot  # type: ignore[attr-defined]
        if flag != new.trainable[index]:
            new.set_trainable(index, flag)
    if bucket.is_as_sharded:
        new.note_first()
    return new
