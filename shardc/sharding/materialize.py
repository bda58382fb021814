"""Values for a model that was built on the meta device: each rank makes only its part.

Sharding comes first: it costs nothing on meta. Then segments and buffers get memory, and each
module initialises itself. A random initialiser draws one full parameter at a time, and the rank
keeps its interval. So with equal seeds, all ranks together hold the values of one process, bit by
bit. A rank never holds more than its part of the model and one full parameter.

The order is FSDP1's: breadth first, parents before children, so a child's own initialiser has the
last word. A model whose parents adjust the values of their children (transformers' GPT-2) has a
function of its own that knows the order: call this function after `model.to_empty(device=...)`.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.checks.arguments import Must, check_value
from shardc.runtime.checks.meta import check_start
from shardc.runtime.modules.modules import ShardedModule
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.unit.params import allocate, parameter_like
from shardc.runtime.unit.unit import Unit
from shardc.runtime.watch.agreement import Statement, agree, decline

InitFn = Annotated[
    Callable[[nn.Module], Any],
    Must("a function (it is given each module that owns meta parameters)"),
]


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    init_fn: InitFn | None = None,
) -> nn.Module:
    """Allocate and initialise the parameters and buffers of `model` on meta, sharded or not.

    Each module that owns meta parameters or buffers is initialised once, parents first, under
    `torch.no_grad()`. Other modules, and parts that `fully_shard` was told to ignore, are left
    alone. Tied parameters stay tied. A module is passed over if the modules before it initialised
    all of its states.

    Args:
        model: usually the model given to `fully_shard`; every rank of its mesh calls this, with the
            same random seed. A model that is not sharded gets whole values.
        device: the device of the values; None: the device that the model was sharded for (with CPU
            offload, the host).
        init_fn: called with each module to initialise; None: its `reset_parameters()`.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no module, or `init_fn` cannot be called.
        ValueError: modules without `reset_parameters`, by name; nothing is changed then.
        RuntimeError: ranks differ in the states on meta or, with copies of the model (HSDP), in the
            states of their random generators; or an initialiser failed: the error names the module.
    """
    check_value("materialize: model", model, nn.Module)
    initialise((model,), init_fn, None if device is None else torch.device(device))
    return model


def initialise(
    modules: Sequence[nn.Module],
    init_fn: InitFn | None,
    device: torch.device | None = None,
    seeds_may_differ: bool = False,
) -> None:
    """Materialise the modules of one call of `fully_shard`.

    `seeds_may_differ`: the caller makes copies of the model equal afterwards.
    """
    inside = dict.fromkeys(m for root in modules for m in root.modules())
    units = list(dict.fromkeys(m._shardc_unit for m in inside if isinstance(m, ShardedModule)))
    _agree_on_work(modules, units, init_fn, seeds_may_differ)
    todo = list(_owners_of_meta(modules, units))
    _allocate(todo, units, device)
    initialised: set[int] = set()
    for owner in todo:
        keys = {id(state) for state in owner.states.values()}
        if not keys <= initialised:
            initialised |= keys
            _initialise(owner, init_fn)
    for unit in units:
        unit.note_meta()


# -- the work to do ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Owner:
    """A module with states of its own on meta, by attribute."""

    name: str
    module: nn.Module
    states: dict[str, Tensor]

    def __str__(self) -> str:
        kind = getattr(self.module, "_shardc_class", type(self.module))
        return f"'{self.name}' ({kind.__name__})"


def _owners_of_meta(modules: Sequence[nn.Module], units: list[Unit]) -> Iterator[_Owner]:
    """The modules with states on meta, breadth first, each once; ignored parts are left out."""
    skipped = {m for unit in units for m in unit.skipped}
    ignored = {param for unit in units for param in unit.ignored}
    queue, seen = deque(("", module) for module in modules), set(modules)
    while queue:
        name, module = queue.popleft()
        states: dict[str, Tensor] = {
            **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
            **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
        }
        on_meta = {n: t for n, t in states.items() if t.is_meta and t not in ignored}
        if on_meta:
            yield _Owner(name, module, on_meta)
        for child_name, child in module.named_children():
            if child not in seen and child not in skipped:
                seen.add(child)
                queue.append((f"{name}.{child_name}".lstrip("."), child))


def _agree_on_work(
    modules: Sequence[nn.Module], units: list[Unit], init_fn: Any, seeds_may_differ: bool
) -> None:
    """Raise on every rank if a rank cannot initialise its model, or if ranks differ in the work."""
    what = "what materialize initialises"
    of_group = {bucket.ranks.everyone: bucket.ranks for unit in units for bucket in unit.buckets}
    left = list(of_group)
    try:
        check_value("materialize: init_fn", init_fn, InitFn | None)
        check_start(unit for unit in units if unit.lacks_values)
        owners = list(_owners_of_meta(modules, units))
        if init_fn is None:
            _check_resettable(owners)
        while left:
            group = left.pop(0)
            facts = [f"{owner}: {sorted(owner.states)}" for owner in owners]
            if of_group[group].copies > 1 and owners and not seeds_may_differ:
                facts.append(generator_fact(units[0].device))
            agree(compat.resolve_group(group), Statement(what, facts), every_time=True)
    except (TypeError, ValueError, RuntimeError) as error:
        for group in left:
            decline(compat.resolve_group(group), what, str(error))
        raise


def _check_resettable(owners: list[_Owner]) -> None:
    missing = [
        str(owner)
        for owner in owners
        if not callable(getattr(owner.module, "reset_parameters", None))
    ]
    if missing:
        raise ValueError(
            f"modules with parameters or buffers on meta have no reset_parameters(): "
            f"{', '.join(missing)}. Define it, or give an init_fn"
        )


def generator_fact(device: torch.device) -> str:
    """The state of this rank's generators; with unequal states, copies of a model differ."""
    state = torch.get_rng_state().numpy().tobytes()
    if device.type != "cpu":
        state += torch.get_device_module(device).get_rng_state(device).numpy().tobytes()
    return f"random state {hashlib.sha256(state).hexdigest()[:12]} (seed all ranks alike)"


# -- the work itself -----------------------------------------------------------------------------


def _allocate(todo: list[_Owner], units: list[Unit], device: torch.device | None) -> None:
    for unit in units:
        for bucket in unit.buckets:
            if bucket.segment.is_meta:
                allocate(bucket, device)
    default = device or (units[0].device if units else torch.get_default_device())
    made: dict[int, Tensor] = {}  # tied states once
    for owner in todo:
        for name, state in owner.states.items():
            if not isinstance(state, ShardTensor):
                if id(state) not in made:
                    made[id(state)] = _like(state, default)
                setattr(owner.module, name, made[id(state)])


def _like(state: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(state.detach(), device=device)
    return parameter_like(state, new) if isinstance(state, nn.Parameter) else new


def _initialise(owner: _Owner, init_fn: InitFn | None) -> None:
    try:
        with torch.no_grad():
            if init_fn is None:
                owner.module.reset_parameters()  # type: ignore[operator]
            else:
                init_fn(owner.module)
    except Exception as error:
        called = "reset_parameters()" if init_fn is None else "the given function"
        raise RuntimeError(f"initialising {owner} by {called} failed: {error}") from error
