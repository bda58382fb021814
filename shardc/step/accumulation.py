"""Micro-batches of a step: buckets that stay gathered between them, and one reduction for all.

The first call of a step runs as usual, and `Watched` counts its backwards and its gathers. From
these, `plan_accumulation` chooses the units whose buckets stay gathered. Later calls that run the
Python of the step are `Arranged`: units have other settings until the last forward, and their own
again when the call ends. Settings shape compiled graphs, so a model is compiled for the first
micro-batch (which gathers), for those in between and, where gradients wait, for the last.

The plan holds for all arguments of a step: ranks may get batches of different shapes, and must send
the same messages.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardc.backend.options import check_known
from shardc.passes.estimate.cost import gather_seconds
from shardc.passes.estimate.hardware import Amount, Profile, budget_bytes, current_profile
from shardc.runtime import compat
from shardc.runtime.checks.arguments import check_value, hints_of
from shardc.runtime.checks.meta import units_in
from shardc.runtime.checks.optimizer_hooks import Turn, before_steps
from shardc.runtime.checks.telling import warn_once
from shardc.runtime.unit.backward_pass import watchers
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.settings import Settings
from shardc.runtime.unit.unit import Unit
from shardc.runtime.watch.agreement import Statement, agree
from shardc.runtime.watch.progress import Label, progress
from shardc.step.room import Room, gathered_bytes, waiting_bytes

_T = TypeVar("_T")


class NotArranged(Exception):
    """The micro-batches of a step run as they are; the text says why."""


@dataclass(frozen=True)
class Accumulate:
    """A user's wishes for the micro-batches of a step.

    Attributes:
        gathered_bytes: bytes of buckets that may stay gathered between micro-batches: a count, a
            text such as "2GiB", or a fraction of the device's memory.
        reduce_once: whether gradients wait, and are reduced once, in the last backward.
    """

    gathered_bytes: Amount = 0
    reduce_once: bool = False

    @staticmethod
    def parse(given: Mapping[str, Any]) -> "Accumulate":
        """Check a user's dict of wishes, and make an `Accumulate`.

        Raises:
            TypeError, ValueError: another key or value, or nothing is asked for.
        """
        check_value("accumulate", given, dict)
        hints = hints_of(Accumulate)
        check_known(given, [*hints], "key of accumulate")
        for name, value in given.items():
            check_value(f"accumulate '{name}'", value, hints[name])
        asked = Accumulate(**given)
        if not asked.nbytes(current_profile("cpu")) and not asked.reduce_once:
            raise ValueError("accumulate: give gathered_bytes, reduce_once or both")
        return asked

    def nbytes(self, profile: Profile) -> int:
        """Bytes of buckets that may stay gathered on a device with this profile."""
        if not self.gathered_bytes:
            return 0
        return budget_bytes(self.gathered_bytes, profile, "gathered_bytes")


@dataclass(frozen=True)
class _Model:
    """The plan for the units inside of one root.

    Attributes:
        units: the root and the units inside.
        micro_batches: the number of backwards.
        kept: the units whose buckets stay gathered.
    """

    units: tuple[Unit, ...]
    micro_batches: int
    kept: tuple[Unit, ...]


@dataclass(frozen=True)
class Accumulation:
    """The plan for the micro-batches of a step.

    Attributes:
        models: the models with several backwards.
        reduce_once: whether gradients are reduced in the last backward only.
        kept: the names of the units whose buckets stay gathered.
        nbytes: the bytes of these buckets, gathered.
        seconds: the time of the gathers that a step has no more, on the wire of the profile.
        left_out: the units that do not fit a memory budget, in words; "" if all fit.
    """

    models: tuple[_Model, ...] = field(repr=False)
    reduce_once: bool
    kept: tuple[str, ...]
    nbytes: int
    seconds: float
    left_out: str = ""

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that stay gathered."""
        return _buckets_in(unit for model in self.models for unit in model.kept)


# -- the first call -------------------------------------------------------------------------------


class Watched:
    """A context around the first call of a step, which runs as usual.

    Attributes:
        backwards: the number of backwards, by root.
        gathers: the number of gathers, by label of the bucket.
        first: the labels of the buckets that the first gather of the call moved.
        reduced: the labels of the buckets whose gradients were reduced, in order.
        is_late: whether a backward followed an update.
        is_set: whether the step set settings of units.
    """

    def __init__(self) -> None:
        self.backwards = Counter[Unit]()
        self.gathers = Counter[str]()
        self.first: tuple[str, ...] = ()
        self.reduced: list[str] = []
        self.is_late = self.is_set = False
        self._backwards = _Backwards(self._count)
        self._updated = False

    def __enter__(self) -> "Watched":
        self._writes = Settings.writes
        self._heard: list[Label] = []
        self._before, progress.heard = progress.heard, self._heard
        self._backwards.watch()
        self._hook = register_optimizer_step_pre_hook(self._update)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        self._backwards.leave()
        progress.heard = self._before
        self.is_set = self._writes != Settings.writes
        gathers = [label.buckets for label in self._heard if label.kind == "all_gather"]
        self.gathers.update(name for names in gathers for name in names)
        self.first = gathers[0] if gathers else ()
        reductions = (label for label in self._heard if label.kind == "reduce_scatter")
        self.reduced = [name for label in reductions for name in label.buckets]

    def _update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._updated = True

    def _count(self, roots: Iterable[Unit]) -> None:
        self.backwards.update(roots)
        self.is_late = self.is_late or self._updated


class _Backwards:
    """Calls `ended` with the roots that a backward differentiated, when all else of it is done."""

    def __init__(self, ended: Callable[[Sequence[Unit]], None]) -> None:
        self._ended = ended
        self._roots: dict[Unit, None] = {}
        self._number = -1

    def watch(self) -> None:
        watchers.append(self._note)

    def leave(self) -> None:
        watchers.remove(self._note)

    def _note(self, buckets: Iterable[Bucket]) -> None:
        number = compat.backward_number()
        if number != self._number and not compat.in_nested_backward():
            self._number, self._roots = number, {}  # a backward that raised has no end
        if not self._roots:
            # Reductions end, and gradients that wait are looked at, in calls that come later.
            compat.when_outermost_backward_ends(lambda: compat.when_backward_ends(self._end))
        self._roots.update(dict.fromkeys(bucket.owner.outermost for bucket in buckets))

    def _end(self) -> None:
        roots, self._roots = self._roots, {}
        self._ended(list(roots))


# -- the plan -------------------------------------------------------------------------------------


def plan_accumulation(asked: Accumulate, watched: Watched) -> Accumulation:
    """The plan for later calls of the step that was watched. All ranks call it, and agree.

    Buckets whose gathers take longest per byte stay gathered first. Models that were compiled
    within a memory budget stay within it.

    Raises:
        NotArranged: the micro-batches stay as they are.
        RuntimeError: ranks have other numbers of backwards, or ask for something else.
    """
    several = {root: count for root, count in watched.backwards.items() if count > 1}
    if not several:
        raise NotArranged("it has one backward, so there are no micro-batches")
    if watched.is_late:
        raise NotArranged(
            "a backward follows an update: which backwards are micro-batches of one update is not "
            "known"
        )
    if watched.is_set:
        raise NotArranged(
            "it changes settings of units itself (no_sync, set_reshard_after_backward and the "
            "like): leave them out"
        )
    inside = {root: units_inside(root) for root in several}
    for unit in (unit for units in inside.values() for unit in units):
        _check_settings(unit)
    device = next(iter(several)).device.type
    profile = current_profile(device)
    every = _buckets_in(unit for units in inside.values() for unit in units)
    room = Room.beside(every, waiting_bytes(every, asked.reduce_once))
    given = asked.nbytes(profile), inside, watched.gathers, profile
    wanted, fitting = _choose(*given), _choose(*given, room)
    models, left = list[_Model](), room.left()
    for root, count in several.items():
        facts = [f"{count} micro-batches", f"reduce once: {asked.reduce_once}"]
        own = [unit for unit in inside[root] if unit in fitting]
        first = _buckets_in(inside[root])[0]
        subject = "the micro-batches of a step"
        chosen, left = agreed(subject, facts, inside[root], own, first, left)
        models.append(_Model(inside[root], count, chosen))
    kept = [unit for model in models for unit in model.kept]
    out = {} if left is None else {u.name: u.buckets for u in wanted if u not in kept}
    left_out = room.words(left or 0, out, _buckets_in(kept)) if out else ""
    if not kept and not asked.reduce_once:
        raise NotArranged(
            left_out
            or f"no unit that is gathered more than once fits into gathered_bytes="
            f"{asked.gathered_bytes!r}"
        )
    return Accumulation(
        tuple(models),
        asked.reduce_once,
        tuple(unit.name for unit in kept),
        sum(map(_gathered_bytes, kept)),
        sum(_seconds_of(unit, watched.gathers, profile) for unit in kept),
        left_out,
    )


def units_inside(root: Unit) -> tuple[Unit, ...]:
    """The root of a model and the units inside, in the order of the modules."""
    return tuple(dict.fromkeys(unit for module in root.modules for unit in units_in(module)))


def _check_settings(unit: Unit) -> None:
    """Raise NotArranged where the user's settings rule out a plan."""
    settings = unit.settings
    if settings.offloaded:
        raise NotArranged("its parameters lie on the host (CPUOffloadPolicy)")
    held = any(bucket.gathered.is_held for bucket in unit.buckets)
    if held or not (settings.sync and settings.reshard_after_backward and settings.all_reduce):
        raise NotArranged(
            f"{unit.name or 'the root'} has settings of the user's own (set_requires_gradient_sync,"
            " set_requires_all_reduce, set_reshard_after_backward, unshard): set them back"
        )


def _choose(
    most: int,
    inside: Mapping[Unit, Iterable[Unit]],
    gathers: Counter[str],
    profile: Profile,
    room: Room | None = None,
) -> list[Unit]:
    """The units that stay gathered: those with most seconds of the wire a byte, as many as fit into
    `most` bytes, and beside the graphs within `room`."""
    seconds = {
        unit: _seconds_of(unit, gathers, profile) for units in inside.values() for unit in units
    }
    chosen: list[Unit] = []
    for unit in sorted(seconds, key=lambda unit: -seconds[unit] / max(_gathered_bytes(unit), 1)):
        nbytes = _gathered_bytes(unit)
        fits = nbytes <= most and (room is None or room.has(_buckets_in([*chosen, unit])))
        if seconds[unit] > 0 and fits:
            chosen.append(unit)
            most -= nbytes
    return chosen


def _seconds_of(unit: Unit, gathers: Counter[str], profile: Profile) -> float:
    """Seconds of the gathers that a step spares if the buckets of a unit stay gathered.

    It is 0 where a bucket is not gathered more than once, as a table whose rows are fetched:
    buckets of a unit have one setting, and such a bucket would be gathered to stay.
    """
    if any(gathers[b.label] < 2 or b.extension is not None for b in unit.buckets):
        return 0.0
    return sum((gathers[b.label] - 1) * gather_seconds(b.key.code, profile) for b in unit.buckets)


def _buckets_in(units: Iterable[Unit]) -> list[Bucket]:
    return [bucket for unit in units for bucket in unit.buckets]


def _gathered_bytes(unit: Unit) -> int:
    return sum(map(gathered_bytes, unit.buckets))


def agreed(
    subject: str,
    facts: list[str],
    every: Sequence[_T],
    own: Iterable[_T],
    bucket: Bucket,
    left: int | None = None,
) -> tuple[tuple[_T, ...], int | None]:
    """The choice out of `every` that counts on all ranks of a bucket, and the bytes that it leaves.

    It is one rank's: measured links, and the order in which a forward gathers, may differ from rank
    to rank. Within memory budgets, every rank must have chosen a unit: the choice fits on each.

    Args:
        left: the bytes that a memory budget leaves on this rank, None without a budget; the fewest
            of all ranks are returned.
    """
    note = json.dumps([[every.index(each) for each in own], left])
    group = compat.resolve_group(bucket.ranks.everyone)
    notes = agree(group, Statement(subject, facts, note), every_time=True)
    indexes, lefts = zip(*map(json.loads, sorted(notes)), strict=True)
    bounds = [each for each in lefts if each is not None]
    chosen = indexes[0]
    if bounds:
        chosen = [index for index in chosen if all(index in each for each in indexes)]
    return tuple(every[index] for index in chosen), min(bounds, default=None)


# -- later calls ----------------------------------------------------------------------------------

_running: "list[Arranged]" = []
"""The calls that run now."""


class Arranged:
    """A context around a call of a step: units have the settings that the plan wants."""

    def __init__(self, plan: Accumulation) -> None:
        self._plan = plan
        self._models = {model.units[0].outermost: model for model in plan.models}
        self._done = Counter[Unit]()
        self._backwards = _Backwards(self._count)

    def __enter__(self) -> None:
        self._before = {
            unit: {
                "reshard_after_forward": unit.settings.reshard_after_forward,
                "reshard_after_backward": unit.settings.reshard_after_backward,
                "sync": unit.settings.sync,
            }
            for model in self._plan.models
            for unit in model.units
        }
        self._backwards.watch()
        _running.append(self)
        before_steps.call(Turn.FEWER, _reduce_in_time)
        for model in self._plan.models:
            for unit in model.kept:
                _change(unit, reshard_after_forward=False, reshard_after_backward=False)
            for unit in model.units if self._plan.reduce_once else ():
                _change(unit, sync=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _running.remove(self)
        self._backwards.leave()
        for model in self._plan.models:
            self._restore(model)
        for model in self._plan.models:
            for bucket in (bucket for unit in model.kept for bucket in unit.buckets):
                if not bucket.gathered.stays:
                    bucket.gathered.drop()

    def _restore(self, model: _Model) -> None:
        for unit in model.units:
            _change(unit, **self._before[unit])

    def _count(self, roots: Iterable[Unit]) -> None:
        """Change settings for the next micro-batch: the last one frees buckets, and reduces."""
        self._done.update(roots)
        for root in roots:
            model = self._models.get(root)
            if model is not None and self._done[root] == model.micro_batches - 1:
                self._end(model)
            elif model is not None and self._done[root] == model.micro_batches:
                self._restore(model)
                _flush(model)  # forwards that all ran before the first backward reduce nothing

    def _end(self, model: _Model) -> None:
        for unit in model.kept:
            _change(unit, reshard_after_backward=self._before[unit]["reshard_after_backward"])
        for unit in model.units:
            _change(unit, sync=self._before[unit]["sync"])

    def reduce_in_time(self) -> None:
        """Reduce gradients that wait before an update, where micro-batches are fewer than planned.

        Every rank calls it.
        """
        for root, model in self._models.items():
            if self._plan.reduce_once and self._done[root] < model.micro_batches:
                warn_once(
                    "fewer micro-batches than planned",
                    f"accumulate: {self._done[root]} of {model.micro_batches} micro-batches ran, "
                    "and gradients wait: they are reduced in optimizer.step(), behind any "
                    "clipping. Use a step for each number of micro-batches, or no reduce_once",
                )
                self._end(model)
                _flush(model)


def _flush(model: _Model) -> None:
    """Reduce the gradients that wait."""
    for bucket in (bucket for unit in model.units for bucket in unit.buckets):
        bucket.gradients.flush()


def _change(unit: Unit, **settings: Any) -> None:
    """Change the settings that differ: a change makes the keys of graphs anew."""
    differ = {k: value for k, value in settings.items() if getattr(unit.settings, k) != value}
    if differ:
        unit.change(**differ)


def _reduce_in_time(optimizer: Optimizer, args: compat.Args, kwargs: compat.Kwargs) -> None:
    for each in _running:
        each.reduce_in_time()
