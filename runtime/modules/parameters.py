"""The `_parameters` of sharded modules: reads in a forward give full parameters, as `self.weight`.

`_parameters` always holds the sharded parameters. A value that takes a parameter's place for a
while is a `GivenValue` in the module's table of slots, which every read looks up. Dynamo guards on
the class of a slot, so a `GivenValue` needs no guard of its own.

Inside a `no_grad` of a forward that records gradients, `parameters()` gives sharded parameters:
code that walks through parameters there writes to them (a moving average), and only writes to
sharded parameters last. Compiled code is refused such a write: its gathers would not see it.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import wrapped
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.eager import suspends_gradients
from shardc.runtime.unit.params import SlotRef


@compat.inline_only
def as_read(given: Tensor, bucket: Bucket) -> Tensor:
    """Convert `given`, in the place of a parameter of `bucket`: full, in the forward's dtype.

    A sharded value is gathered now, by every rank, so graphs and uncompiled code read a plain
    tensor. Its gradient is averaged over the ranks, as the parameter's gradient would be.
    """
    if isinstance(given, ShardTensor) and torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            "functional_call inside of compiled code takes no sharded tensors: call it outside of "
            "compiled code, or give it whole tensors (.full_tensor())"
        )
    low = None if bucket.owner.summoned else bucket.key.reading_code().param_dtype
    value = _whole(given) if isinstance(given, ShardTensor) else given
    return value if low is None or not value.is_floating_point() else value.to(low)


def _whole(sharded: ShardTensor) -> Tensor:
    full, tp = sharded.full_tensor(), sharded._shard_spec.tp
    return full if tp is None else wrapped(tp.local_of(full), tp)


class GivenValue:
    """A value in a parameter's place: `functional_call` and `summon_full_params` put it there.

    Attributes:
        bucket: None; by this a read tells a `GivenValue` from a `SlotRef`.
        index: the index of the parameter.
        slot: the parameter's own `SlotRef`.
        given: the value that was put in the parameter's place.
        value: the result of a read: `given`, full and in the dtype of the forward.
    """

    @compat.inline_only
    def __init__(self, slot: SlotRef, given: Tensor | None) -> None:
        self.bucket = None
        self.index = slot.index
        self.slot = slot
        self.given = given
        self.value = given if given is None else as_read(given, slot.bucket)


Slots = dict[str, SlotRef | GivenValue]
Reader = Callable[[compat.Held], Tensor | None]


class Parameters(dict[str, nn.Parameter | None]):
    """The parameters of one sharded module, by name.

    Args:
        params: the parameters by name, as the module held them.
        slots: the module's table of slots, shared with the module.
        readers: the functions that read the sharded parameters, by name.
        cls: the module's class before sharding.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter | None]],
        slots: Slots,
        readers: Mapping[str, Reader],
        cls: type,
    ) -> None:
        super().__init__(params)
        self._shardc_slots = slots
        self._shardc_class = cls
        self._readers = readers

    @compat.inline_only
    def __getitem__(self, name: str) -> compat.Held:
        slot = self._shardc_slots.get(name)
        if slot is None:
            return super().__getitem__(name)
        bucket = slot.bucket
        if bucket is None or torch.compiler.is_dynamo_compiling() or bucket.gathered.depth > 0:
            return self._readers[name](self)
        return super().__getitem__(name)

    @compat.inline_only
    def get(self, name: str, default: compat.Held = None) -> compat.Held:
        return self[name] if name in self else default  # noqa: SIM401

    @compat.inline_only
    def items(self) -> compat.Held:
        if not self._differs():
            return super().items()
        return [(name, self._listed(name)) for name in self]

    @compat.inline_only
    def values(self) -> compat.Held:
        if not self._differs():
            return super().values()
        return [self._listed(name) for name in self]

    @compat.inline_only
    def copy(self) -> compat.Held:
        return dict(self.items())

    @compat.inline_only
    def _differs(self) -> bool:
        """Whether a walk gives other values than this dict holds."""
        if torch.compiler.is_dynamo_compiling():
            return True
        for slot in self._shardc_slots.values():  # an optimizer's step walks through all modules
            bucket = slot.bucket
            if bucket is None or (bucket.gathered.depth > 0 and not _gives_stored()):
                return True
        return False

    @compat.inline_only
    def _listed(self, name: str) -> compat.Held:
        slot = self._shardc_slots.get(name)
        if slot is None or slot.bucket is None:
            return self[name]
        if not torch.compiler.is_dynamo_compiling():
            return super().__getitem__(name) if _gives_stored() else self[name]
        if slot.is_shared:
            compat.stop_compiling(
                f"'{name}' of {self._shardc_class.__name__} is shared by several modules, and "
                "compiled code that walks through parameters() would take it for several: read it "
                "by its attribute, or walk outside of compiled code"
            )
        return self[name]

    @compat.inline_only
    def __setitem__(self, name: str, value: compat.Held) -> None:
        slot = self._shardc_slots.get(name)
        if slot is None:
            super().__setitem__(name, value)
            return
        if torch.compiler.is_dynamo_compiling():
            raise NotImplementedError(
                f"'{name}' of {self._shardc_class.__name__} is sharded and cannot be put into "
                "_parameters by compiled code: call torch.func.functional_call(module, values, "
                "args), outside of compiled code"
            )
        own = slot if isinstance(slot, SlotRef) else slot.slot
        if own.gives(value):
            super().__setitem__(name, own.bucket.params[own.index])
            self._shardc_slots[name] = own
        else:
            self._shardc_slots[name] = GivenValue(own, value)

    @compat.inline_only
    def update(self, *given: compat.Held, **named: compat.Held) -> None:
        for name, value in dict(*given, **named).items():  # dict.update would not call __setitem__
            self[name] = value

    @compat.inline_only
    def __ior__(self, given: compat.Held) -> "Parameters":  # type: ignore[override]
        self.update(given)
        return self

    @compat.inline_only
    def setdefault(self, name: str, default: compat.Held = None) -> compat.Held:
        if name not in self:
            self[name] = default
        return self[name]

    @compat.inline_only
    def __delitem__(self, name: str) -> None:
        if name in self._shardc_slots:
            refuse_removing(self._shardc_class, name)
        super().__delitem__(name)

    @compat.inline_only
    def pop(self, name: str, *default: compat.Held) -> compat.Held:
        if name in self._shardc_slots:
            refuse_removing(self._shardc_class, name)
        return super().pop(name, *default)

    @compat.inline_only
    def popitem(self) -> compat.Held:
        name = next(reversed(self))
        return name, self.pop(name)

    @compat.inline_only
    def clear(self) -> None:
        for name in self._shardc_slots:
            refuse_removing(self._shardc_class, name)
        super().clear()

    @compat.inline_only
    def swap(self, name: str, value: compat.Held) -> compat.Held:
        """Put `value` in the place of a sharded parameter, as `functional_call` does.

        Returns:
            The slot before. A second call with this slot as `value` restores the state, and returns
            the value that was in the place.
        """
        before = self._shardc_slots[name]
        if isinstance(value, (SlotRef, GivenValue)):
            self._shardc_slots[name] = value
            return (
                before.given
                if isinstance(before, GivenValue)
                else before.bucket.params[before.index]
            )
        own = before if isinstance(before, SlotRef) else before.slot
        if torch.compiler.is_dynamo_compiling():
            self._shardc_slots[name] = GivenValue(own, value)
            return before
        if isinstance(value, ShardTensor) and compat.is_fake(value):
            refuse_exporting(self._shardc_class)
        inside = None if value is None else compat.inside_transforms(value)
        if isinstance(inside, ShardTensor) and not isinstance(value, ShardTensor):
            raise NotImplementedError(
                f"torch.func transforms cannot differentiate or map sharded tensors, and '{name}' "
                f"of {self._shardc_class.__name__} was given one: give functional_call whole "
                "tensors (.full_tensor(), on every rank)"
            )
        self._shardc_slots[name] = own if own.gives(value) else GivenValue(own, value)
        return before

    def __deepcopy__(self, memo: compat.Memo) -> "Parameters":
        params = [(name, copy.deepcopy(param, memo)) for name, param in dict.items(self)]
        slots = copy.deepcopy(self._shardc_slots, memo)
        return Parameters(params, slots, self._readers, self._shardc_class)


def refuse_exporting(cls: type) -> NoReturn:
    """Raise for a module that torch.export traces."""
    raise NotImplementedError(
        f"torch.export cannot export a sharded {cls.__name__}, whose values are on all ranks: "
        "export an unsharded copy with the values of get_model_state_dict"
    )


def refuse_removing(cls: type, name: str) -> NoReturn:
    """Raise for the removal of a sharded parameter from a module."""
    raise NotImplementedError(
        f"'{name}' of {cls.__name__} is sharded and cannot be removed; remove it before fully_shard"
    )


def _gives_stored() -> bool:
    """Whether a walk inside a forward gives the stored parameters.

    Dynamo itself walks through a module that it traces, and needs no values. The runtime would
    gather for such a walk, and the graph would take the gathered parameters.
    """
    return suspends_gradients() or compat.compile_id() is not None


@compat.inline_only
def _swap(
    module: nn.Module, name: str, value: compat.Held, swap: Callable[[], compat.Held]
) -> compat.Held:
    held = module._parameters
    if not isinstance(held, Parameters) or name not in held._shardc_slots:
        return swap()
    return held.swap(name, value)


compat.when_swapped(_swap)
