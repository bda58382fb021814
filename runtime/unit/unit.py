"""A unit: what one call of `fully_shard` made, modules that are gathered and reduced together."""

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

    Modules hold their unit and its buckets, never the other way round: a graph that a module keeps
    (an auxiliary loss, say) holds buckets, and would keep the module that it is kept by.

    Attributes:
        given: its modules.
        asked_reshard: `reshard_after_forward` as the user gave it; None is settled by `is_root`.
        settings: what else was asked; shared with the buckets.
        device: where the unit is computed.
        ignored: parameters that are left alone by calls on outer modules too.
        skipped: modules that are.
        name: the name of its first module in the outermost unit, for messages.
        number: in the order in which this process made units.
        on_meta: whether something below its modules may still be on the meta device, or have no
            values on other ranks.
        mixed: whether its parameters had values on some ranks only when they were sharded.
        differs: a parameter that had other values on other ranks then.
        summoned: whether its modules hold full parameters, and so compute in their dtype.
        before_gathers: waits for what its next gather shall wait for.
        around: the unit around it, if there is one.
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

    def __post_init__(self, given: tuple[nn.Module, ...]) -> None:
        self._modules = tuple(weakref.ref(module) for module in given)
        for bucket in self.buckets:
            bucket.unit = self
        gathered = tuple(weakref.ref(bucket.gathered) for bucket in self.buckets)
        for module in given:
            weakref.finalize(module, _forget_views, self._modules, gathered).atexit = False

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that still exist."""
        return tuple(module for ref in self._modules if (module := ref()) is not None)

    @property
    def is_root(self) -> bool:
        """Whether no other unit is around it."""
        return self.around is None

    @property
    def outermost(self) -> "Unit":
        """The unit around it and all others; itself if it is the root."""
        around = None if self.around is None else self.around()
        return self if around is None else around.outermost

    @property
    def training(self) -> bool:
        """Whether the first of its modules that exists is in training mode."""
        return next((module.training for module in self.modules), True)

    @property
    def hints(self) -> tuple[object, ...]:
        """The user's wishes for the schedule; targets as distances, equal for equal blocks."""
        settings = self.settings
        ahead = tuple(unit.number - self.number for unit in settings.forward_prefetch)
        back = tuple(unit.number - self.number for unit in settings.backward_prefetch)
        buffers = settings.reduce_buffers
        return (ahead, back, buffers) if ahead or back or buffers else ()

    def await_updates(self) -> None:
        """A gather is about to start: wait for what it shall wait for."""
        if self.before_gathers is not None:
            self.before_gathers()
            self.before_gathers = None

    def change(self, **settings: object) -> None:
        """Set some of the settings, and have graphs that use the unit compiled anew."""
        for name, value in settings.items():
            self.settings.put(name, value)
        for bucket in self.buckets:
            bucket.key.follow_settings()

    def note_meta(self) -> None:
        """Look again for what is on meta, after states were moved."""
        self.on_meta = self.lacks_values or any(map(states_on_meta, self.modules))

    @property
    def is_as_sharded(self) -> bool:
        """Whether a bucket of it was not written since `fully_shard`."""
        return any(bucket.is_as_sharded for bucket in self.buckets)

    @property
    def lacks_values(self) -> bool:
        """Whether some ranks had no values for it, and have not been given them."""
        return self.mixed and self.is_as_sharded

    def put_into(self, around: "Unit | None") -> None:
        """Set the unit around this one, or none."""
        self.around = None if around is None else weakref.ref(around)
        self.settle()

    def settle(self) -> None:
        """Decide what None means, as FSDP2 does: reshard, except the outermost unit."""
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
        """Arguments of the forward on the unit's device (where no other unit is around) and in its
        dtype."""
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
    modules: Sequence[weakref.ref[nn.Module]], all_gathered: Sequence[weakref.ref[Gathered]]
) -> None:
    """With the last module of a unit go the full parameters that it gave: their graph has buckets.

    A cycle through autograd, which the garbage collector does not see.
    """
    if all(module() is None for module in modules):
        for reference in all_gathered:
            gathered = reference()
            if gathered is not None:
                gathered.reset()
