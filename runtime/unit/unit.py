"""A unit: the modules of one `fully_shard` call, which are gathered and reduced together."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.runtime.checks.meta import states_on_meta
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.eager import is_inside_other_unit
from shardc.runtime.unit.full_parameters import Gathered
from shardc.runtime.unit.precision import cast_to, map_tensors, moved_to
from shardc.runtime.unit.settings import Settings


@dataclass(eq=False)
class Unit:
    """The modules of one call of `fully_shard`, gathered and reduced together.

    A module holds its unit and the unit's buckets. A unit holds its modules weakly: a module may
    keep an autograd graph (an auxiliary loss, say), the graph holds buckets, and a bucket that held
    the module would keep it alive.

    Attributes:
        given: the unit's modules.
        asked_reshard: `reshard_after_forward` as the user gave it; for None, `is_root` decides.
        settings: the unit's settings, an object that its buckets share.
        device: the device that computes the unit.
        ignored: parameters that `fully_shard` calls on outer modules leave alone too.
        skipped: modules that `fully_shard` calls on outer modules leave alone too.
        name: the name of the unit's first module in the outermost unit, for messages.
        number: the unit's number in the order in which this process made units.
        on_meta: whether a parameter or buffer below its modules may be on the meta device, or have
            no values on other ranks.
        mixed: whether only some ranks had values for the unit's parameters at `fully_shard`.
        differs: the name of a parameter with different values on the ranks at `fully_shard`, or "".
        summoned: whether the unit's modules hold full parameters and compute in their dtype.
        before_gathers: a wait to call once, before the unit's next gather; None: no wait.
        around: a weak reference to the unit around this one; None for the root.
        joined: whether the call that made the unit around made this one, for another mesh.
    """

    given: InitVar[tuple[nn.Module, ...]]
    buckets: tuple[Bucket, ...]
    mesh: DeviceMesh
    asked_reshard: bool | int | None
    settings: Settings
    device: torch.device
    ignored: frozenset[nn.Parameter]
    skipped: frozenset[nn.Module] = frozenset()
    name: str = ""
    number: int = field(default_factory=itertools.count().__next__)
    on_meta: bool = False
    mixed: bool = False
    differs: str = ""
    summoned: bool = False
    before_gathers: Callable[[], object] | None = None
    around: "weakref.ref[Unit] | None" = None
    joined: bool = False

    def __post_init__(self, given: tuple[nn.Module, ...]) -> None:
        self._modules = tuple(weakref.ref(module) for module in given)
        for bucket in self.buckets:
            bucket.unit = self
        gathered = weakref.WeakSet(bucket.gathered for bucket in self.buckets)
        for module in given:
            weakref.finalize(module, _forget_views, self._modules, gathered).atexit = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that still exist."""
        return tuple(module for ref in self._modules if (module := ref()) is not None)

    @property
    def is_root(self) -> bool:
        """Whether no unit is around this one."""
        return self.around is None

    @property
    def outermost(self) -> "Unit":
        """The root around this unit; the unit itself if it is the root."""
        around = None if self.around is None else self.around()
        return self if around is None else around.outermost

    def joins(self, unit: "Unit | None") -> bool:
        """Whether methods of `unit` act on this unit, too: one call made both."""
        return self.joined and self.around is not None and self.around() is unit

    @property
    def training(self) -> bool:
        """Whether the unit's first module that still exists is in training mode."""
        return next((module.training for module in self.modules), True)

    @property
    def hints(self) -> tuple[object, ...]:
        """The user's hints for the schedule.

        A unit to prefetch is given by its distance from this unit, which is equal in equal blocks.
        """
        settings = self.settings
        ahead = tuple(unit.number - self.number for unit in settings.forward_prefetch)
        back = tuple(unit.number - self.number for unit in settings.backward_prefetch)
        buffers = settings.reduce_buffers
        return (ahead, back, buffers) if ahead or back or buffers else ()

    def await_updates(self) -> None:
        """Call the wait that was set for the unit's next gather (`before_gathers`), once."""
        if self.before_gathers is not None:
            self.before_gathers()
            self.before_gathers = None

    def change(self, **settings: object) -> None:
        """Change settings; graphs with a spec that follows from them are then compiled anew."""
        for name, value in settings.items():
            self.settings.put(name, value)
        for bucket in self.buckets:
            bucket.key.follow_settings()

    def note_meta(self) -> None:
        """Set `on_meta` anew, after parameters or buffers were moved."""
        self.on_meta = self.lacks_values or any(map(states_on_meta, self.modules))

    @property
    def is_as_sharded(self) -> bool:
        """Whether a bucket of the unit was not written since `fully_shard`."""
        return any(bucket.is_as_sharded for bucket in self.buckets)

    @property
    def lacks_values(self) -> bool:
        """Whether some ranks had no values for the unit, and were given none since."""
        return self.mixed and self.is_as_sharded

    def put_into(self, around: "Unit | None") -> None:
        """Set the unit around this one; None makes this unit the root."""
        self.around = None if around is None else weakref.ref(around)
        self.settle()

    def settle(self) -> None:
        """Settle `reshard_after_forward`: for None all units but the root reshard, as in FSDP2."""
        asked = self.asked_reshard
        self.change(reshard_after_forward=(not self.is_root) if asked is None else asked)

    # -- inputs and outputs ------------------------------------------------------------------

    @property
    def converts(self) -> bool:
        """Whether inputs or outputs of the unit's modules may need a cast or a move."""
        policy = self.settings.precision
        casts = policy.cast_forward_inputs and policy.param_dtype is not None
        moves = self.device.type != "cpu"
        return casts or moves or policy.output_dtype is not None

    def prepare_inputs(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Move the arguments of a forward to the unit's device, and cast them to the unit's dtype.

        Only the root, or a unit that is called outside of other units, moves arguments.
        """
        policy = self.settings.precision
        steps: list[Callable[[Tensor], Tensor]] = []
        if self._moves_inputs():
            steps.append(moved_to(self.device))
        casts = policy.cast_forward_inputs and not self._in_full_precision(module)
        if policy.param_dtype is not None and casts:
            steps.append(cast_to(policy.param_dtype))
        for step in steps:
            args = tuple(map_tensors(step, value) for value in args)
            kwargs = {name: map_tensors(step, value) for name, value in kwargs.items()}
        return args, kwargs

    def _moves_inputs(self) -> bool:
        if self.device.type == "cpu":
            return False
        called_alone = not torch.compiler.is_compiling() and not is_inside_other_unit(self)
        return self.is_root or called_alone

    def finish_outputs(self, module: nn.Module, outputs: object) -> object:
        """Cast the outputs of a forward to `output_dtype`."""
        dtype = self.settings.precision.output_dtype
        if dtype is None or self._in_full_precision(module):
            return outputs
        return map_tensors(cast_to(dtype), outputs)

    def _in_full_precision(self, module: nn.Module) -> bool:
        if self.summoned:
            return True
        return self.settings.precision.full_precision_in_eval and not module.training


def _forget_views(
    modules: Sequence[weakref.ref[nn.Module]], all_gathered: weakref.WeakSet[Gathered]
) -> None:
    """Free the full parameters of a unit when its last module is gone: their graph holds buckets.

    The reference cycle goes through autograd, so the garbage collector does not see it.
    """
    if all(module() is None for module in modules):
        for gathered in all_gathered:
            gathered.reset()
