"""The plan of one Dynamo graph: contexts of the passes over its graphs, and their decisions."""

import functools
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from shardc.backend.agreements import Agreements, Recalled
from shardc.backend.options import Options
from shardc.backend.stages import PASSES, Stages
from shardc.passes.budget.trial import Phase
from shardc.passes.context import (
    MARGIN,
    MARGIN_OF_DEVICES,
    Budget,
    Kept,
    PassContext,
    Recall,
    ScheduleOptions,
)
from shardc.passes.estimate.hardware import (
    Profile,
    as_profile,
    budget_bytes,
    current_profile,
    host_bytes,
    workspace_bytes,
)
from shardc.passes.estimate.memory import Liveness, Saved, Storages
from shardc.passes.nodes import groups_in, is_collective, is_host_copy, is_wait, kind_of
from shardc.passes.repeat.trace_once import Calls
from shardc.passes.rewrite.cut_tail import Tail
from shardc.passes.rewrite.used_slots import Differentiated
from shardc.passes.rewrite.verify import collective_sequence
from shardc.runtime import compat
from shardc.runtime.groups.backends import backend_of
from shardc.runtime.unit.bucket import Bucket, bucket_of
from shardc.runtime.unit.bucket_spec import is_elsewhere
from shardc.runtime.unit.unit import Unit

_numbers = itertools.count()

_OF_HOST = 0.8
"""The default fraction of a rank's share of the host's memory that a memory budget may use."""


class CompilePlan:
    """State that the graphs of one Dynamo graph share.

    Facts of buckets are read when the plan is made: compiled code outlives its buckets, and equal
    buckets run it.

    Attributes:
        references, slots: the bucket of each input that is a segment, and its slots that are read.
        bodies: the calls of blocks that are traced once, until the Dynamo graph is compiled.
        kept, joint: the decisions and facts of the joint graph, once it is finished.
        calls: by phase, facts of the code that Inductor made.
    """

    def __init__(
        self,
        options: Options,
        buckets: dict[int, Bucket],
        slots: Mapping[int, frozenset[int]],
        numbers: Mapping[Unit, int],
        stages: Stages,
        replays: bool = False,
        held: Mapping[int, tuple[str, int]] | None = None,
    ) -> None:
        self.options = options
        self._held = held or {}
        self._replays = replays
        self.stages = stages
        self.agreements = Agreements(options.agreement_timeout, stages.stage)
        self.slots = slots
        self.number = next(_numbers)
        self.bodies = Calls()
        self.kept = Kept()
        self.joint: Differentiated | None = None
        self.graphs: list[GraphPlan] = []
        self.calls: dict[str, Call] = {}
        self._saved: Saved = {}  # gathered buckets that the forward saves
        self._storages: Storages | None = None  # of the values that the forward saves
        self.references = {position: weakref.ref(bucket) for position, bucket in buckets.items()}
        first = next(iter(buckets.values()), None)
        self.everyone = "" if first is None else first.ranks.everyone
        self.device = "cpu" if first is None else _device_type(first)
        planned = any(bucket.settings.host_is_apart for bucket in buckets.values())
        self._has_link = self.device != "cpu" or planned
        self._for_other_hardware = planned
        here = {at: bucket for at, bucket in buckets.items() if not is_elsewhere(bucket)}
        self._states = {
            position: int(bucket.segment.nbytes * options.optimizer_states)
            for position, bucket in here.items()
            if any(bucket.trainable) and options.optimizer_states
        }
        kept = sum(bucket.segment.nbytes for bucket in here.values()) + sum(self._states.values())
        self.static_bytes = kept + workspace_bytes(self.profile)  # gradients are results
        self.labels = distinct_labels(buckets)
        self._open = frozenset(
            position for position, bucket in buckets.items() if bucket.owner.asked_reshard is None
        )
        over = {(bucket.ranks.shard, bucket.device.type) for bucket in buckets.values()}
        backends = [backend_of(group, device_type) for group, device_type in over]
        self._clones = any(backend.clones for backend in backends)
        self._coalesces = all(backend.coalesces for backend in backends)
        self._schedule = self._schedule_options(numbers)

    def context(self, phase: str) -> PassContext:
        """The context of the passes over a graph of `phase`."""
        results = None if self.joint is None else self.joint.results
        if not self.references or not self.options.schedule:
            return PassContext(phase, results=results, held=self._held)
        everyone, recalled = self.everyone, Recalled()
        return PassContext(
            phase,
            results=results,
            recall=Recall(
                functools.partial(recalled.seconds, everyone),
                lambda gm, phase: recalled.collectives(gm, phase, groups_in(gm)),
            ),
            budget=_budget(self.options, self.profile, self.static_bytes),
            open_positions=self._open,
            held=self._held,
            kept=self.kept,
            agree_on_choice=functools.partial(self.agreements.choices, everyone),
            options=self._schedule,
            agree_on_seconds=functools.partial(self.agreements.seconds, everyone, phase),
        )

    def trace_bodies(self, gm: GraphModule) -> None:
        """Trace the repeated blocks of a Dynamo graph, because this rank compiles it."""
        if self.bodies:
            with self.stages.stage(PASSES):
                self.bodies.trace(gm)

    @property
    def buckets(self) -> dict[int, Bucket]:
        """The buckets that still exist, by input."""
        found = {position: reference() for position, reference in self.references.items()}
        return {position: bucket for position, bucket in found.items() if bucket is not None}

    @property
    def profile(self) -> Profile:
        """The hardware to plan for."""
        given = self.options.profile
        return current_profile(self.device) if given is None else as_profile(given)

    def _schedule_options(self, numbers: Mapping[Unit, int]) -> ScheduleOptions:
        options = self.options
        wishes = {n: unit.settings for unit, n in numbers.items()}
        buffers = [each.reduce_buffers for each in wishes.values() if each.reduce_buffers]
        return ScheduleOptions(
            profile=self.profile,
            prefetch=None if isinstance(options.prefetch, str) else options.prefetch,
            backward_prefetch=options.backward_prefetch or "none",
            forward_hints={n: _numbers_of(s.forward_prefetch, numbers) for n, s in wishes.items()},
            backward_hints={
                n: _numbers_of(s.backward_prefetch, numbers) for n, s in wishes.items()
            },
            reduce_buffers=min(buffers, default=None),
            fused=options.executor == "inductor",
            in_order=options.memory_budget is not None,
            folds=options.executor == "inductor" and options.fold,
            clones=self._clones,
            embedding_rows=None if isinstance(rows := options.embedding_rows, str) else rows,
            coalesce=self._coalesces if options.coalesce is None else options.coalesce,
            saves_on_host=self._has_host and self.options.offload_activations,
            states=self._states if self._has_host and self.options.offload_optimizer_state else {},
            host_room=self._host_room(),
        )

    def _host_room(self) -> float:
        given = self.options.host_memory
        if given is None and (self._for_other_hardware or not self.uses_host):
            return math.inf
        return host_bytes(_OF_HOST if given is None else given)

    @property
    def edits_halves(self) -> bool:
        """Whether a pass of shardc may edit the forward and the backward together."""
        return self.uses_host or self.options.keep_read_first

    @property
    def uses_host(self) -> bool:
        """Whether a memory budget may save values on the host, or let state wait there."""
        wanted = self.options.offload_activations or self.options.offload_optimizer_state
        return wanted and self._has_host and self.options.memory_budget is not None

    @property
    def _has_host(self) -> bool:
        """Whether the device has its own memory, a link to the host's, and no CUDA graphs."""
        return self._has_link and not self._replays and self.profile.host_bandwidth > 0

    def record(self, gm: GraphModule, ctx: PassContext) -> None:
        """Add the plan of a finished graph to `graph_plans`, and call the `listeners`."""
        measured = replace(ctx, options=self._schedule)  # also where the graph is not scheduled
        liveness = Phase(gm, measured, self._storages, self._saved).liveness
        if ctx.phase == "forward":
            self._saved, self._storages = liveness.kept, liveness.storages
        order = [
            kind_of(node)
            for node in gm.graph.nodes
            if is_collective(node) or (is_wait(node) and not is_host_copy(node.args[0]))
        ]
        finished = GraphPlan(
            ctx.phase,
            self.static_bytes,
            liveness,
            collective_sequence(gm),
            order,
            self.number,
            tuple(self.references.values()),
            tuple(self.slots[position] for position in self.references),
            self.profile,
            self.options,
        )
        self._tell(gm, ctx, finished)

    def load(self, joint: Differentiated | None, kept: Kept, graphs: Iterable["GraphPlan"]) -> None:
        """Take over the decisions of a compile of equal graphs, as if this compile made them."""
        self.joint, self.kept = joint, kept
        for graph in graphs:
            references = tuple(self.references.values())
            finished = replace(graph, buckets=references, options=self.options, number=self.number)
            self._tell(None, self.context(graph.phase), finished)

    def facts(self) -> str:
        """Facts that the passes read beside the graph; equal texts and graphs give equal code."""
        own = replace(self.options, inductor={}, agreement_timeout=None)
        slots = [(position, sorted(slots)) for position, slots in self.slots.items()]
        opened = sorted(self._open)
        made_for = [self.device, self.everyone, self.static_bytes, self._clones]
        return repr([own, self.profile, self._schedule, self.labels, slots, opened, made_for])

    def _tell(self, gm: GraphModule | None, ctx: PassContext, finished: "GraphPlan") -> None:
        self.graphs.append(finished)
        graph_plans.append(finished)
        for tell in listeners:
            tell(gm, ctx, self, finished)


def number_units(buckets: Mapping[int, Bucket]) -> dict[Unit, int]:
    """Number units by their first bucket among a graph's inputs, alike on all ranks."""
    owners = dict.fromkeys(bucket.owner for bucket in buckets.values())
    return {unit: number for number, unit in enumerate(owners)}


def distinct_labels(buckets: Mapping[int, Bucket]) -> dict[int, str]:
    """The labels of buckets, by input; of buckets with one label, the later ones get a number.

    A graph may read buckets of equal names: the buckets of a model and of its copy.
    """
    by_label: dict[str, list[Bucket]] = {}
    found = {}
    for position, bucket in sorted(buckets.items()):
        alike = by_label.setdefault(bucket.label, [])
        if bucket not in alike:
            alike.append(bucket)
        number = alike.index(bucket) + 1
        found[position] = bucket.label + (f" ({number})" if number > 1 else "")
    return found


def buckets_by_input(gm: GraphModule) -> dict[int, Bucket]:
    """The buckets whose segments are inputs of a Dynamo graph."""
    tensors = enumerate(map(compat.real_input, gm.graph.find_nodes(op="placeholder")))
    return {i: bucket_of(t) for i, t in tensors if t is not None and hasattr(t, "shardc_bucket")}


def held_by_input(gm: GraphModule, labels: Mapping[int, str]) -> dict[int, tuple[str, int]]:
    """The label and bytes of each input of a Dynamo graph that is a bucket held gathered.

    `labels` has the labels of the buckets, by the input that is the segment.
    """
    tensors = list(map(compat.real_input, gm.graph.find_nodes(op="placeholder")))
    held = {}
    for position, label in labels.items():
        segment = tensors[position]
        full = None if segment is None else bucket_of(segment).gathered.held
        if full is not None:
            held[id(full)] = label, full.nbytes
    return {at: held[id(tensor)] for at, tensor in enumerate(tensors) if id(tensor) in held}


def _device_type(bucket: Bucket) -> str:
    """The type of device that computes a bucket, which may have no memory yet."""
    computes = bucket.owner.device if bucket.device.type == "meta" else bucket.device
    return computes.type


def _numbers_of(wanted: Iterable[Unit], numbers: Mapping[Unit, int]) -> tuple[int, ...]:
    return tuple(numbers[unit] for unit in wanted if unit in numbers)


def _budget(options: Options, profile: Profile, static: int) -> Budget | None:
    if options.memory_budget is None:
        return None
    margin = MARGIN_OF_DEVICES if profile.workspace else MARGIN
    return Budget(
        nbytes=budget_bytes(options.memory_budget, profile),
        static=static,
        margin=margin if options.executor == "inductor" else 0.0,
        given=options.memory_budget,
    )


@dataclass(frozen=True)
class Call:
    """Facts of a graph compiled by Inductor, for the code around its call.

    Attributes:
        groups: the groups of its collectives.
        replayed: the groups over which a CUDA graph replays them.
        tail: the end of the graph, which Inductor did not compile.
    """

    groups: Sequence[str] = ()
    replayed: Sequence[str] = ()
    tail: Tail | None = None


@dataclass(frozen=True, eq=False)
class GraphPlan:
    """The plan of one graph.

    Attributes:
        phase: "forward" or "backward".
        static: bytes of segments, optimizer state and workspaces.
        liveness: bytes that the graph itself holds after each node.
        collectives: its collectives, in order.
        order: the kinds of its collectives and waits, in order.
        number: the number of its `CompilePlan`, equal for the graphs of one Dynamo graph.
        buckets: the buckets that the Dynamo graph reads.
        slots: the slots that it reads of each bucket.
        profile, options: the profile and the options of the plan.
        notes: notes of listeners on the graph, kept with the compiled code.
    """

    phase: str
    static: int
    liveness: Liveness
    collectives: list[str]
    order: list[str]
    number: int
    buckets: tuple[weakref.ref[Bucket], ...]
    slots: tuple[frozenset[int], ...]
    profile: Profile
    options: Options
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes at the peak of the graph, the static bytes included."""
        return self.static + self.liveness.peak

    @property
    def budget(self) -> Budget | None:
        """The memory budget that the graph was compiled with."""
        return _budget(self.options, self.profile, self.static)


graph_plans: deque[GraphPlan] = deque(maxlen=64)
"""The plans of the graphs compiled last in this process, newest last."""

joint_listeners: list[Callable[[GraphModule, PassContext, CompilePlan], None]] = []
"""Called with every joint graph, before the first decision for it."""

listeners: list[Callable[[GraphModule | None, PassContext, CompilePlan, GraphPlan], None]] = []
"""Called with every finished graph and its plan, before it is lowered; with None in place of a
graph that is loaded."""
