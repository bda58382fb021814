"""Sharded modules: the same objects under a subclass whose parameters read through their bucket.

A module that holds sharded parameters gets a cached subclass of its class with one property a
parameter (never one class an instance: compiled code is shared by class). Attribute access goes to
the bucket; so do reads of `_parameters` in a forward (`parameters`). The methods overridden here
would otherwise silently detach a parameter from its segment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardc.runtime import compat
from shardc.runtime.checks.meta import note_loaded, require_values, units_in
from shardc.runtime.comm.unshard import unshard_extended
from shardc.runtime.modules.controls import Controls
from shardc.runtime.modules.copying import Copying, copied, copy_sharded
from shardc.runtime.modules.first_step import watch_first_steps
from shardc.runtime.modules.fsdp_names import FSDPNames
from shardc.runtime.modules.late_params import watch_for_late_params
from shardc.runtime.modules.parameters import (
    GivenValue,
    Parameters,
    Slots,
    refuse_exporting,
    refuse_removing,
)
from shardc.runtime.modules.summon import summon_full_params
from shardc.runtime.modules.ties import (
    buckets_of,
    holders_of,
    note_shared,
    refuse_summoned,
    slots_below,
    tie,
)
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import dtensor_as_parameter
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.eager import begin_call, end_call, innermost_unit, open_in_forward
from shardc.runtime.unit.params import (
    SlotRef,
    adopt,
    allocate_unwritten,
    convert,
    is_in_live_graph,
)
from shardc.runtime.unit.unit import Unit

if TYPE_CHECKING:  # the class that follows the mixins among the bases
    _Mixed = nn.Module
else:
    _Mixed = object

Sharded = TypeVar("Sharded", bound="ShardedParameters")

_classes: dict[tuple[type, tuple[str, ...], type], type] = {}


class ShardedParameters(_Mixed):
    """Mixin of every module that holds sharded parameters of its own."""

    _shardc_class: type[nn.Module]
    _shardc_slots: Slots
    _shardc_buckets: tuple[Bucket, ...]

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        """Construct a module of the plain class, as code that slices a Sequential expects."""
        if not hasattr(cls, "_shardc_class"):
            raise TypeError(f"{cls.__name__} has no constructor: fully_shard(module) makes one")
        return cls._shardc_class(*args, **kwargs)

    def _call_open(self, *args: object, **kwargs: object) -> Any:
        # One `try`, also while Dynamo traces it: a graph break inside then leaves the whole frame
        # to Python, where the buckets are open.
        call = None if torch.compiler.is_compiling() else begin_call(self)
        outputs, raised = None, True
        try:
            outputs = super().__call__(*args, **kwargs)
            raised = False
            return outputs
        finally:
            if call is not None:
                end_call(call, outputs, raised)

    __call__ = compat.CallOutsideGraphs(_call_open)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as `nn.Module` does; in the place of a sharded parameter, cut `param` in place.

        If `param` is a sharded parameter of another module, both modules hold it from then on.

        Raises:
            NotImplementedError: `param` is None or full, replaces a parameter that several modules
                share, or is sharded and gets a new name or lies on other ranks.
            ValueError: `param` has another shape.
            RuntimeError: inside a forward, or `param` is on the meta device.
        """
        slot = self._shardc_slots.get(name)
        if vars(self).get(name, self) is None:
            del vars(self)[name]
        if type(param) is Tensor:  # a full parameter
            self._refuse_gathered(name)
        if isinstance(slot, SlotRef) and not slot.bucket.owner.summoned:
            if param is None:
                refuse_removing(self._shardc_class, name)
            if param is slot.bucket.params[slot.index]:
                return
            _check_assigned(self, name, slot, param)
            if hasattr(param, "_slot"):
                tie(self, name, slot, param)
                return
            _check_shared(self, name, slot)
            if slot.bucket.segment.is_meta:
                allocate_unwritten(slot.bucket)
            if isinstance(param, DTensor):  # also a ShardTensor
                _take_over(slot.bucket.params[slot.index], param)
                return
            adopt(slot.bucket, slot.index, param)
            param = slot.bucket.params[slot.index]
        elif isinstance(slot, GivenValue) and param is not None:
            refuse_summoned(self, name, param)
        elif slot is None and param is not None and hasattr(param, "_slot"):
            # `prune` would register it, and fail half-way
            raise NotImplementedError(
                f"'{param._slot.name}' is sharded and cannot be registered in "
                f"{self._shardc_class.__name__} as '{name}' too: prune, tie or reparametrize "
                "before fully_shard"
            )
        super().register_parameter(name, param)

    def _refuse_gathered(self, name: str) -> NoReturn:
        raise NotImplementedError(
            f"'{name}' of {self._shardc_class.__name__} was assigned a full parameter, which is a "
            "temporary of a forward or of unshard(). Assign a parameter of parameters(), outside "
            "of both (to tie), or a copy (.detach().clone())"
        )

    @compat.inline_only
    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter `target`: the full one in its module's forward, else the sharded one.

        Outside of a forward it is the sharded one even where a read gives the full one.
        """
        path, _, name = target.rpartition(".")
        module = self.get_submodule(path)
        if name in vars(module).get("_shardc_slots", ()):
            param = module._parameters[name]
            assert param is not None
            return param
        return super().get_parameter(target)

    def _save_to_state_dict(self, *args: object, **kwargs: object) -> None:
        with torch.no_grad():  # for sharded parameters, also in a forward
            super()._save_to_state_dict(*args, **kwargs)

    def __delattr__(self, name: str) -> None:
        if name in self._shardc_slots:
            refuse_removing(self._shardc_class, name)
        if name in self._parameters:
            vars(self).pop(name, None)
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return copied, (Copying(self),)

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotImplementedError(
            f"torch.jit.script cannot compile a sharded {self._shardc_class.__name__}: script an "
            "unsharded copy with the values of get_model_state_dict, or use torch.compile"
        )

    def _apply(self: Sharded, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Sharded:
        return apply_to_segments(self, fn, recurse)

    def to_empty(self: Sharded, *, device: Any, recurse: bool = True) -> Sharded:
        """Empty as `nn.Module.to_empty` does; on part of a unit, empty the bucket if it is on meta.

        A bucket that is on `device` already stays as it is in that case: a function may call
        `to_empty` on each module of a unit in turn.
        """
        return apply_to_segments(
            self,
            lambda tensor: torch.empty_like(tensor, device=device),
            recurse,
            empties=True,
        )


def _check_reparametrizing(module: nn.Module, name: str) -> None:
    """Raise where `name` of `module` is sharded, or is computed from a sharded parameter.

    torch removes a parametrization from a module's class; a sharded module has another class.
    """
    slots = vars(module).get("_shardc_slots", {})
    held = dict(module.named_modules()).get(f"parametrizations.{name}")
    inner = held is not None and any(isinstance(p, ShardTensor) for p in held.parameters())
    if (
        inner
        or (held is not None and isinstance(module, ShardedParameters))
        or any(f"{name}{ending}" in slots for ending in ("", "_g", "_v", "_orig"))
    ):
        raise NotImplementedError(
            f"'{name}' of {getattr(module, '_shardc_class', type(module)).__name__} is sharded and "
            "cannot be reparametrized: add and remove weight_norm, parametrizations and the like "
            "before fully_shard, or on an unsharded copy with the values of get_model_state_dict"
        )


compat.check_reparametrizing(_check_reparametrizing)


def _check_assigned(
    module: ShardedParameters, name: str, slot: SlotRef, param: nn.Parameter
) -> None:
    bucket, old = slot.bucket, slot.bucket.params[slot.index]
    label = f"'{name}' of {module._shardc_class.__name__}"
    if param.shape != old.shape:
        raise ValueError(
            f"{label} has shape {tuple(old.shape)} and is sharded; it cannot become a parameter of "
            f"shape {tuple(param.shape)}"
        )
    both = {bucket, getattr(param, "_slot", slot).bucket}
    if torch.compiler.is_compiling() or any(each.gathered.depth for each in both):
        raise RuntimeError(f"{label} is sharded and cannot be assigned inside a forward")
    if param.is_meta and not hasattr(param, "_slot"):
        raise RuntimeError(f"{label} is sharded and cannot become a parameter on the meta device")
    if not isinstance(param, DTensor) and is_in_live_graph(param):
        raise RuntimeError(
            f"{label} is sharded and cannot become a parameter that an autograd graph leads to: "
            "drop the outputs of the graph first"
        )


def _check_shared(module: ShardedParameters, name: str, slot: SlotRef) -> None:
    holders = holders_of(slot)
    if len(holders) > 1:
        raise NotImplementedError(
            f"'{name}' of {module._shardc_class.__name__} is sharded and shared by {len(holders)} "
            "modules; assigning one would part them. "
            "Write its values in place: param.copy_(full_tensor)"
        )


def _take_over(param: nn.Parameter, other: nn.Parameter) -> None:
    """Copy the values, `requires_grad` and gradient of `other`, which was assigned, to `param`."""
    with torch.no_grad():
        param.copy_(other)
    param.requires_grad_(other.requires_grad)
    param.grad = other.grad


def make_unit(unit: "Unit") -> None:
    """Make `unit.modules` sharded modules, and give properties to holders of sharded parameters.

    Units inside become inner units: a `reshard_after_forward` of None is settled anew.
    """
    for root in unit.modules:
        compat.mark_as_sharded(root, FSDPNames(root))
        root.register_load_state_dict_post_hook(note_loaded)
        for name, module in root.named_modules():
            _install_properties(module, unit if module in unit.modules else None)
            inner = vars(module).get("_shardc_unit", unit)
            if inner is not unit:
                if inner.is_root:
                    inner.put_into(unit)
                if module is inner.modules[0]:
                    inner.name = name
        note_shared(root)
        _put_apart(root, unit)
    unit.name = type(unit.modules[0]).__name__
    unit.settle()
    unit.note_meta()
    watch_for_late_params(unit)
    watch_first_steps()


def _put_apart(root: nn.Module, unit: "Unit") -> None:
    """Give a `place` to the slots in `unit` of modules that lie in inner units."""
    inner = [m for m in root.modules() if vars(m).get("_shardc_unit", unit) is not unit]
    for _, _, slot in slots_below(inner):
        bucket = slot.bucket
        if bucket in unit.buckets and not (bucket.extension or bucket.placed[slot.index]):
            slot.put_apart()


def _install_properties(module: nn.Module, unit: "Unit | None") -> None:
    slots = {
        name: param._slot
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
        if hasattr(param, "_slot")
    }
    if unit is None and not slots:
        return
    own = unit or vars(module).get("_shardc_unit")
    state = vars(module)
    state["_shardc_slots"] = slots
    state["_shardc_buckets"] = buckets_of(slots, own)
    if own is not None:
        state["_shardc_unit"] = own
    mixin = ShardedModule if own is not None else ShardedParameters
    original = getattr(type(module), "_shardc_class", type(module))
    cls = _subclass(original, tuple(slots), mixin)
    if slots:
        readers = {name: vars(cls)[name].fget for name in slots}
        state["_parameters"] = Parameters(
            dict.items(module._parameters), state["_shardc_slots"], readers, original
        )
        for name, param in dict.items(module._parameters):
            if param is None:  # a `bias`, say: Dynamo is slow to look into a dict of another class
                state[name] = None
    compat.become(module, cls)


def _subclass(cls: type, names: tuple[str, ...], mixin: type) -> type:
    key = (cls, names, mixin)
    if key not in _classes:
        compat.tell_dynamo()
        body: dict[str, object] = {name: _parameter(name) for name in names}
        if issubclass(cls, nn.RNNBase):
            body |= compat.rnn_attributes()
        # The name is the original's: transformers saves it, and looks up recorded outputs by it.
        for attribute in ("__module__", "__qualname__", "__doc__"):
            body[attribute] = getattr(cls, attribute)
        if hasattr(cls, "__deepcopy__"):
            body["__deepcopy__"] = copy_sharded
        body["_shardc_class"] = cls
        # Behind the module's own class: isinstance is true, and no method of FSDP2 is found first.
        bases = (mixin, cls, FSDPModule) if mixin is ShardedModule else (mixin, cls)
        _classes[key] = type(cls.__name__, bases, body)
    return _classes[key]


def _parameter(name: str) -> property:
    def read(self: ShardedParameters | Parameters) -> Tensor | None:
        # In one function: Dynamo traces it for each parameter.
        slot = self._shardc_slots[name]
        bucket, index = slot.bucket, slot.index
        if bucket is None:
            return slot.value  # type: ignore[union-attr]
        if not torch.compiler.is_dynamo_compiling():
            own = bucket.params[index]
            if torch.compiler.is_compiling():  # Dynamo makes a guard on `hasattr`
                if compat.is_exporting():
                    refuse_exporting(self._shardc_class)
                return own
            shared = slot.is_shared  # type: ignore[union-attr]
            is_open = bucket.gathered.is_readable or (shared and open_in_forward(bucket))
            return bucket.gathered.read(index) if is_open else own
        if compat.is_exporting():
            refuse_exporting(self._shardc_class)
        signature, extras = bucket.key.reading()
        if bucket.extension is not None:
            return unshard_extended(bucket.segment, signature, index, extras)
        place = slot.place  # type: ignore[union-attr]
        if place is not None and innermost_unit() not in (None, bucket.owner.number):
            read = torch.ops.shardc.unshard_place
            return read(bucket.segment, signature, place.like, place.marker)
        full = torch.ops.shardc.unshard_slot(bucket.segment, signature, index, extras)
        placed = bucket.placed[index]
        return full if placed is None else dtensor_as_parameter(placed.wrap(full))

    return property(compat.inline_only(read))


class _Flag(property):
    """A flag that Dynamo must not see itself: it would break the graph, or leave out guards.

    From torch 2.14 on, Dynamo asks for the attribute of the class, so for this object.
    """

    def __bool__(self) -> bool:
        return False


@compat.inline_only
def _is_managed(self: nn.Module) -> bool:
    """Say True as FSDP2 does, but not to Dynamo; transformers then generates in step."""
    if torch.compiler.is_dynamo_compiling():  # traced code
        return True
    return getattr(compat.TRACING, "tracing_context", None) is None


def _set_managed(self: nn.Module, value: object) -> None:
    """Ignore a write, by which code around FSDP2 marks a model that it has sharded."""


class ShardedModule(Controls, ShardedParameters):
    """Mixin of every module that `fully_shard` was called on."""

    _shardc_unit: Unit

    def __call__(self, *args: object, **kwargs: object) -> Any:
        unit = self._shardc_unit
        if unit.on_meta:
            require_values(self)
        if not unit.converts:
            return self._call_open(*args, **kwargs)
        args, kwargs = unit.prepare_inputs(self, args, kwargs)
        return unit.finish_outputs(self, self._call_open(*args, **kwargs))

    def compile(self, *args: object, **kwargs: Any) -> None:
        """Compile as `nn.Module.compile`; a container of torch (`nn.Sequential`) is one graph too.

        Raises:
            TypeError, ValueError: options that the backend (`shardc`) does not take.
        """
        compat.check_backend_options(kwargs.get("backend"), kwargs.get("options"))
        compat.compile_calls(self, *args, **kwargs)

    def _get_fsdp_state(self) -> FSDPNames:
        return FSDPNames(self)

    _is_fsdp_managed_module = _Flag(_is_managed, _set_managed)

    def apply(self, fn: Callable[[nn.Module], None]) -> "ShardedModule":
        """Apply `fn` as `nn.Module.apply` does; `fn` sees the full parameters of a unit at a time.

        Every rank must call it, and draw the same random numbers. On the meta device `fn` sees
        sharded parameters.
        """
        if any(bucket.segment.is_meta for bucket in self._shardc_unit.buckets):
            return super().apply(fn)
        with summon_full_params(self, recurse=False):
            return super().apply(fn)


# -- .to(), .double(), .to_empty() ---------------------------------------------------------------


@dataclass(eq=False)
class _Conversion:
    """The function that `_apply` gives to all modules inside, and the buckets converted so far."""

    fn: Callable[[Tensor], Tensor]
    empties: bool
    done: set[Bucket] = field(default_factory=set)

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.fn(tensor)


def apply_to_segments(
    module: Sharded,
    fn: Callable[[Tensor], Tensor],
    recurse: bool,
    empties: bool = False,
) -> Sharded:
    """Run `module._apply(fn)` with segments in the place of the parameters that view them.

    Raises:
        NotImplementedError: `module` is only part of a unit, whose bucket has one dtype and device.
        RuntimeError: an autograd graph leads to a parameter that would be replaced.
    """
    conversion = fn if isinstance(fn, _Conversion) else _Conversion(fn, empties)
    _apply_to_buckets(module, conversion, recurse)
    with compat.without_parameters(module, module._shardc_slots):
        super(ShardedParameters, module)._apply(conversion, recurse)
    if conversion is not fn:
        for unit in units_in(module):
            unit.note_meta()
    return module


def _apply_to_buckets(module: ShardedParameters, conversion: _Conversion, recurse: bool) -> None:
    done = conversion.done
    inside = dict.fromkeys(module.modules() if recurse else [module])  # in a fixed order
    buckets = dict.fromkeys(
        bucket for m in inside if isinstance(m, ShardedParameters) for bucket in m._shardc_buckets
    )
    todo = [bucket for bucket in buckets if bucket not in done]
    is_part = not recurse and any(True for _ in module.children())
    for bucket in [b for b in todo if is_part or inside.keys().isdisjoint(b.owner.modules)]:
        if _stays(bucket, conversion):  # e.g. the unit of a tied weight was converted before
            todo.remove(bucket)
        elif not (conversion.empties and bucket.segment.is_meta):
            raise NotImplementedError(
                f"{module._shardc_class.__name__} is part of a sharded unit whose parameters "
                "share one dtype and device: convert the unit's module instead"
            )
    for bucket in todo:
        _check_dtype(bucket, conversion)
        _check_graphs(bucket, conversion)
    for bucket in todo:
        done.add(bucket)
        convert(bucket, conversion)


def _stays(bucket: Bucket, conversion: _Conversion) -> bool:
    """Whether a conversion leaves the device, the dtype and the values of a bucket as they are."""
    one = torch.ones(1, dtype=bucket.segment.dtype, device=bucket.segment.device)
    made = conversion(one.clone())
    is_alike = made.dtype == one.dtype and made.device == one.device
    return is_alike and (conversion.empties or one.is_meta or torch.equal(made, one))


def _check_graphs(bucket: Bucket, conversion: _Conversion) -> None:
    """Raise where a conversion would replace a parameter that a live autograd graph leads to."""
    if not any(map(compat.is_in_graph, bucket.params)):
        return
    probe = torch.empty(0, dtype=bucket.segment.dtype, device=bucket.segment.device)
    version = probe._version
    if conversion(probe) is probe and probe._version == version:
        return  # it leaves the parameters as they are
    slots = zip(bucket.layout.slots, bucket.params, strict=True)
    name = next((slot.name for slot, param in slots if is_in_live_graph(param)), None)
    if name is not None:
        raise RuntimeError(
            f"parameter '{name}' cannot be converted or moved: an autograd graph leads to it. "
            "Drop the outputs of the graph (a loss, say) first"
        )


def _check_dtype(bucket: Bucket, conversion: _Conversion) -> None:
    """Raise where a conversion would change the dtype inside a tensor subclass."""
    if bucket.extension is None:
        return
    old = bucket.segment.dtype
    new = conversion(torch.empty(0, dtype=old, device=bucket.segment.device)).dtype
    if new != old:
        raise NotImplementedError(
            f"parameter '{bucket.layout.slots[0].name}' is {bucket.extension.cls.__name__} of "
            f"{old} and cannot become {new}: convert the model before fully_shard"
        )
