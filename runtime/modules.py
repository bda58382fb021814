"""Sharded modules: the same objects under a subclass whose parameters read through their bucket.

A module that holds sharded parameters gets a cached subclass of its class with one property a
parameter (never one class an instance: compiled code is shared by class). `_parameters`,
`named_parameters()` and `state_dict()` stay as they were; only attribute access goes to the bucket.
The methods overridden here are those that would otherwise detach a parameter from its segment
without a word.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.runtime import compat
from shardc.runtime.bucket import Bucket, SlotRef
from shardc.runtime.communicators import own_group

_classes: dict[tuple[type, tuple[str, ...], type], type] = {}


class ShardedParameters:
    """Mixin of every module that holds sharded parameters of its own."""

    _shardc_class: type[nn.Module]
    _shardc_slots: dict[str, SlotRef]
    _shardc_buckets: tuple[Bucket, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Constructing the class again (slicing a Sequential does) gives the plain module."""
        return cls._shardc_class(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eager = () if torch.compiler.is_compiling() else self._shardc_buckets
        for bucket in eager:
            bucket.depth += 1
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            for bucket in eager:
                bucket.leave()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As `nn.Module.register_parameter`, but not over a sharded parameter."""
        if name in self._shardc_slots:
            _refuse_replacing(self, name)
        super().register_parameter(name, param)  # type: ignore[misc]

    def __delattr__(self, name: str) -> None:
        if name in self._shardc_slots:
            _refuse_replacing(self, name)
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            f"a sharded {self._shardc_class.__name__} cannot be copied or pickled: copy the module "
            "before fully_shard, or take its state_dict()"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_segments(self, fn, recurse)  # type: ignore[arg-type]


def _refuse_replacing(module: Any, name: str) -> NoReturn:
    raise NotImplementedError(
        f"'{name}' of {module._shardc_class.__name__} is sharded and cannot be replaced or "
        "removed; write its values in place: param.copy_(full_tensor)"
    )


def make_unit(unit: "Unit") -> None:
    """Make `unit.modules` sharded modules, and give properties to all that hold sharded parameters.

    Units inside become inner ones: what they left to the compiler is settled anew.
    """
    for root in unit.modules:
        for module in root.modules():
            _install_properties(module, unit if module in unit.modules else None)
            if isinstance(module, ShardedModule) and module._shardc_unit is not unit:
                module._shardc_unit.settle(is_root=False)
    unit.settle(is_root=True)


def _install_properties(module: nn.Module, unit: "Unit | None") -> None:
    slots = {
        name: param._slot
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
        if hasattr(param, "_slot")
    }
    if unit is None and not slots:
        return
    own = unit or getattr(module, "_shardc_unit", None)
    buckets = [slot.bucket for slot in slots.values()]
    state = vars(module)
    state["_shardc_slots"] = slots
    state["_shardc_buckets"] = tuple(dict.fromkeys([*(own.buckets if own else ()), *buckets]))
    if own is not None:
        state["_shardc_unit"] = own
    mixin = ShardedModule if own is not None else ShardedParameters
    original = getattr(module, "_shardc_class", type(module))
    module.__class__ = _subclass(original, tuple(slots), mixin)


def _subclass(cls: type, names: tuple[str, ...], mixin: type) -> type:
    key = (cls, names, mixin)
    if key not in _classes:
        body: dict[str, Any] = {name: _parameter(name) for name in names}
        if issubclass(cls, nn.RNNBase):
            body |= compat.rnn_properties()
        # The original's name, too: transformers looks up by it what a model records, and saves it.
        for attribute in ("__module__", "__qualname__", "__doc__"):
            body[attribute] = getattr(cls, attribute)
        body["_shardc_class"] = cls
        _classes[key] = type(cls.__name__, (mixin, cls), body)
    return _classes[key]


def _parameter(name: str) -> property:
    def read(self: ShardedParameters) -> Tensor:
        slot = self._shardc_slots[name]
        if not torch.compiler.is_compiling():
            held = self._parameters[name]  # type: ignore[attr-defined]
            if held is not slot.bucket.params[slot.index]:  # `functional_call` swapped it in
                return held
        return slot.value()

    return property(compat.inline_only(read))


@dataclass(eq=False)
class Unit:
    """What one call of `fully_shard` made: modules that are gathered and reduced together.

    `reshard_after_forward` is what the user asked for; None is settled by `is_root`. `ignored`
    parameters are left alone by calls on outer modules too.
    """

    modules: tuple[nn.Module, ...]
    buckets: tuple[Bucket, ...]
    mesh: DeviceMesh
    reshard_after_forward: bool | None
    ignored: frozenset[nn.Parameter]
    is_root: bool = True
    number: int = field(default_factory=itertools.count().__next__)
    forward_prefetch: tuple["Unit", ...] = ()
    backward_prefetch: tuple["Unit", ...] = ()
    reduce_buffers: int | None = None

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            bucket.unit, bucket.owner = self.number, self

    @property
    def hints(self) -> tuple[object, ...]:
        """The user's wishes for the schedule; targets as distances, equal for equal blocks."""
        ahead = tuple(unit.number - self.number for unit in self.forward_prefetch)
        back = tuple(unit.number - self.number for unit in self.backward_prefetch)
        return (ahead, back, self.reduce_buffers) if ahead or back or self.reduce_buffers else ()

    def refresh(self) -> None:
        """Have graphs that use the unit compiled anew."""
        for bucket in self.buckets:
            bucket.refresh_signature()

    def settle(self, is_root: bool) -> None:
        """Decide what None means, as FSDP2 does: reshard, except the outermost unit."""
        self.is_root = is_root
        asked = self.reshard_after_forward
        for bucket in self.buckets:
            bucket.reshard_after_forward = (not is_root) if asked is None else asked
            bucket.refresh_signature()


class ShardedModule(ShardedParameters):
    """Mixin of every module that `fully_shard` was called on."""

    _shardc_unit: Unit

    def set_modules_to_forward_prefetch(self, modules: Sequence["ShardedModule"]) -> None:
        """Gather these units when this one's forward begins, whatever the cost model says.

        A hint for the next compile, as FSDP2's method of that name is for the next forward.

        Raises:
            ValueError: something in `modules` is not sharded.
        """
        self._shardc_unit.forward_prefetch = _units(modules)
        self._shardc_unit.refresh()

    def set_modules_to_backward_prefetch(self, modules: Sequence["ShardedModule"]) -> None:
        """The same for the backward."""
        self._shardc_unit.backward_prefetch = _units(modules)
        self._shardc_unit.refresh()

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Let at most so many reductions be under way, each with its unreduced gradients.

        Without a number their bytes are bounded, by those of two units.

        Raises:
            ValueError: less than one.
        """
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for unit in _own_units(self, recurse):
            unit.reduce_buffers = max_input_buffers
            unit.refresh()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True, high_priority: bool = False
    ) -> None:
        """Reduce on a communicator of its own, so that it can overlap gathers on the wire.

        Every rank of the mesh calls it. `high_priority` puts its kernels on such a stream (NCCL).
        """
        for unit in _own_units(self, recurse):
            for bucket in unit.buckets:
                bucket.reduce_group = (
                    own_group(bucket.group, "reduce", high_priority) if enable else None
                )
            unit.refresh()

    def set_separate_all_gather_group(
        self, enable: bool = True, *, recurse: bool = True, high_priority: bool = False
    ) -> None:
        """Gather on a communicator of its own; as `set_separate_reduce_scatter_group`."""
        for unit in _own_units(self, recurse):
            for bucket in unit.buckets:
                bucket.gather_group = (
                    own_group(bucket.group, "gather", high_priority) if enable else None
                )
            unit.refresh()


def share_comm_ctx(modules: Sequence[ShardedModule]) -> None:
    """FSDP2's call for pipeline stages on one device: they shall share streams and buffers.

    Units over the same ranks share their communicators anyway, so this only checks `modules`.

    Raises:
        ValueError: something in `modules` is not sharded.
    """
    _units(modules)


def _units(modules: Sequence[Any]) -> tuple[Unit, ...]:
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise ValueError(f"expected modules given to fully_shard, got {type(module).__name__}")
    return tuple(module._shardc_unit for module in modules)


def _own_units(module: Any, recurse: bool) -> list[Unit]:
    inside = module.modules() if recurse else [module]
    found = [m._shardc_unit for m in inside if isinstance(m, ShardedModule)]
    return list(dict.fromkeys(found))


_LATER = (
    "unshard", "reshard", "set_requires_gradient_sync", "set_requires_all_reduce",
    "set_is_last_backward", "set_reshard_after_forward", "set_reshard_after_backward",
    "set_all_reduce_hook",
    "set_post_optim_event", "set_reduce_scatter_divide_factor", "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms", "set_unshard_in_backward",
    "set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm",
    "set_custom_all_gather", "set_custom_reduce_scatter", "set_reduce_scatter_unused_params",
    "reset_iter_state",
)  # fmt: skip
"""Methods of FSDP2's `FSDPModule` that are not built yet: they say so, by name."""


def _not_built(name: str) -> Callable[..., NoReturn]:
    def method(self: ShardedModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}() is not supported by shardc yet")

    method.__name__ = name
    return method


for _name in _LATER:
    setattr(ShardedModule, _name, _not_built(_name))


# -- .to(), .double(), .to_empty() ---------------------------------------------------------------

_applied: set[Bucket] | None = None


def apply_to_segments(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool) -> Any:
    """`module._apply(fn)` where segments take the place of the parameters that view them.

    Raises:
        NotImplementedError: `module` is only a part of a unit; its bucket has one dtype and device.
    """
    global _applied
    outermost = _applied is None
    if outermost:
        _applied = set()
    try:
        _apply_to_buckets(module, fn)
        with compat.without_parameters(module, module._shardc_slots):  # type: ignore[arg-type]
            super(ShardedParameters, module)._apply(fn, recurse)  # type: ignore[misc]
    finally:
        if outermost:
            _applied = None
    return module


def _apply_to_buckets(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    assert _applied is not None
    inside = set(module.modules())
    buckets = dict.fromkeys(
        bucket for m in inside if isinstance(m, ShardedParameters) for bucket in m._shardc_buckets
    )
    todo = [bucket for bucket in buckets if bucket not in _applied]
    for bucket in todo:
        if not bucket.unit_modules & inside:
            raise NotImplementedError(
                f"{module._shardc_class.__name__} is part of a sharded unit whose parameters "  # type: ignore[union-attr]
                "share one dtype and device: convert the unit's module instead"
            )
    for bucket in todo:
        _applied.add(bucket)
        bucket.apply(fn)
