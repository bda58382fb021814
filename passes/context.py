"""The context of passes: the facts that a pass reads beside the graph."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from shardc.passes.estimate.hardware import Profile
from shardc.passes.nodes import describe_collective
from shardc.runtime.checks.words import bytes_like
from shardc.runtime.layout.spec import Moved

Facts = Callable[[bool], list[str]]
"""`facts(by_number)` gives the lines that ranks compare. By number, a line has the numbers of units
and no names: equal blocks, which run one graph, have equal lines."""


class NotAgreed(Exception):
    """Ranks have not agreed on a graph in an earlier compile."""


@dataclass(frozen=True)
class Recall:
    """Agreements of ranks from an earlier compile.

    A recall asks no rank, and raises `NotAgreed` where ranks have not agreed.

    Attributes:
        seconds: given a phase, facts and the compute seconds of this rank, returns those that all
            ranks plan with.
        collectives: given a finished graph and its phase, raises unless ranks agreed on its
            collectives.
    """

    seconds: Callable[[str, Facts, list[float]], list[float]]
    collectives: Callable[[GraphModule, str], None]


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of the schedule; equal on all ranks.

    Attributes:
        profile: the device and its links.
        prefetch: how many units ahead gathers start; None: the cost model decides.
        backward_prefetch: as `prefetch`, for the backward, in FSDP1's words: "pre", "post" or
            "none"; "auto" uses `prefetch`.
        forward_hints, backward_hints: for a unit, the units to gather when its forward or backward
            begins.
        reduce_buffers: the most reductions under way; None bounds only their bytes.
        coalesce: whether a pass may merge collectives.
        fused: whether the executor fuses elementwise ops and keeps values in registers (Inductor).
        in_order: whether a kernel on a CPU keeps its place between two matmuls.
        folds: whether repeated stretches may become calls of one body.
        clones: whether the backend clones the input of a reduction (gloo).
        embedding_rows: whether embeddings fetch rows; None: the cost model decides.
        saves_on_host: whether a memory budget may save values on the host.
        states: by input, bytes of the optimizer state of a bucket; a memory budget may move it to
            the host.
        host_room: bytes of the host's memory for saved values and optimizer state together.
    """

    profile: Profile
    prefetch: int | None = None
    backward_prefetch: str = "auto"
    forward_hints: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    backward_hints: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reduce_buffers: int | None = None
    coalesce: bool = True
    fused: bool = True
    in_order: bool = False
    folds: bool = False
    clones: bool = False
    embedding_rows: bool | None = None
    saves_on_host: bool = False
    states: Mapping[int, int] = field(default_factory=dict)
    host_room: float = math.inf

    def wanted(self, phase: str, gathers: Sequence[tuple[int, int]]) -> list[int | None]:
        """The event at which each gather is to start; None where the cost model decides.

        Args:
            phase: the phase of the graph.
            gathers: the unit of each gather, and the event that needs the gather.
        """
        first: dict[int, int] = {}
        for unit, event in gathers:
            first.setdefault(unit, event)
        order = list(first)
        hints = self.backward_hints if phase == "backward" else self.forward_hints
        by_target = {t: unit for unit, targets in hints.items() for t in targets if unit in first}
        distance = self.prefetch
        if phase == "backward" and self.backward_prefetch != "auto":
            distance = 1 if self.backward_prefetch == "pre" else 0
        result: list[int | None] = []
        for unit, event in gathers:
            if unit in by_target:
                result.append(min(event, first[by_target[unit]]))
            elif distance is None:
                result.append(None)
            elif phase == "backward" and self.backward_prefetch == "none":
                result.append(event)
            else:
                result.append(first[order[max(0, order.index(unit) - distance)]])
        return result


@dataclass(frozen=True)
class Budget:
    """A bound on memory, in bytes.

    Attributes:
        nbytes: the bound on all memory of the device.
        static: bytes of segments, optimizer state and the matmul library's workspaces; gradients
            count where the backward makes them.
        margin: the share of a graph's bytes that stays free for memory unknown to the model.
        given: the bound as the user wrote it, for errors.
    """

    nbytes: int
    static: int
    margin: float = 0.0
    given: int | float | str = field(default=0, repr=False, compare=False)

    @property
    def room(self) -> int:
        """The most bytes that a graph may hold in the model of memory."""
        return int((self.nbytes - self.static) * (1 - self.margin))

    def needed(self, peak: int) -> int:
        """The smallest bound with room for a peak of `peak` bytes."""
        return self.static + math.ceil(peak / (1 - self.margin))

    def shown(self, count: int) -> str:
        """A count of bytes as text, in the unit of the bound."""
        return bytes_like(count, self.given)

    def __str__(self) -> str:
        shown, given = self.shown(self.nbytes), str(self.given)
        if given.lower().endswith("b"):
            return given
        return f"{given} ({shown})" if "." in given else shown


MARGIN, MARGIN_OF_DEVICES = 0.02, 0.03
"""The margins under Inductor, on CPUs and on accelerators. Both cover small buffers, and kernels
that Inductor fuses otherwise than the model. On accelerators, the caching allocator may also leave
a block unsplit that is larger than the request (less than 1 MiB each, none with expandable
segments)."""


UNITS_IN_FLIGHT = 2
"""The most units with a gather under way or not yet read, as in FSDP's `limit_all_gathers`."""


@dataclass(frozen=True)
class Kept:
    """The choice of a memory budget; without one, of `choose_read_first`.

    Attributes:
        among: inputs that are segments of buckets whose reshard is decided here.
        positions: inputs in `among` whose buckets stay gathered until the backward.
        ahead: the most units with a gather under way or not yet read.
        recomputed: names of the joint graph's nodes that the backward computes again.
        recomputes: by kind of value (a text), the number of units that recompute it.
        offloaded: names of the joint graph's nodes that the forward saves on the host, each with
            the name of its unit.
        offloads: by kind of value (a text), the number of units that save it on the host.
        states: inputs that are segments of buckets whose optimizer state waits on the host.
    """

    among: frozenset[int] = frozenset()
    positions: frozenset[int] = frozenset()
    ahead: int = UNITS_IN_FLIGHT
    recomputed: frozenset[str] = frozenset()
    recomputes: Mapping[str, int] = field(default_factory=dict)
    offloaded: Mapping[str, str] = field(default_factory=dict)
    offloads: Mapping[str, int] = field(default_factory=dict)
    states: frozenset[int] = frozenset()

    def reshards(self, moved: "Moved") -> bool:
        """Whether a gathered bucket is freed after the forward."""
        if moved.position in self.among and not moved.spec.kept:
            return moved.position not in self.positions
        return moved.spec.reshard_after_forward


_numbers = itertools.count()


@dataclass(frozen=True)
class PassContext:
    """The facts that a pass reads beside the graph, known before the first pass runs.

    Attributes:
        phase: "dynamo", "joint", "forward", "backward" or "step".
        buckets: label and unit of a bucket, by the input of the Dynamo graph that is its segment.
        outside: inputs in `buckets` whose buckets the eager runtime gathers.
        options: the options of the schedule; None leaves the graph in its order.
        agree_on_seconds: given the collectives of a graph and the compute seconds between their
            events, returns the seconds that all ranks plan with.
        agree_on_choice: given the subject in words, facts, and the choice of this rank, returns the
            choices of all ranks.
        recall: agreements from an earlier compile; None where ranks have nothing to agree on.
        budget: the bound on memory; None for no bound.
        open_positions: inputs that are segments of units whose reshard the compiler decides.
        held: label and bytes of a bucket that stays gathered around the graph, by the input that is
            the whole bucket.
        kept: the choice of the memory budget.
        results: the number of the forward's outputs that the caller gets; saved values follow.
            None where no backward follows.
        number: the number of the graph in this process; None for the graph of a trial.
    """

    phase: str
    buckets: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    outside: frozenset[int] = frozenset()
    options: ScheduleOptions | None = None
    agree_on_seconds: Callable[[Facts, list[float]], list[float]] | None = None
    agree_on_choice: Callable[[str, Facts, str], frozenset[str]] | None = None
    recall: Recall | None = None
    budget: Budget | None = None
    open_positions: frozenset[int] = frozenset()
    held: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    kept: Kept = Kept()
    results: int | None = None
    number: int | None = field(default_factory=_numbers.__next__)

    @property
    def planned(self) -> ScheduleOptions:
        """The options of the schedule, where the graph is scheduled."""
        assert self.options is not None
        return self.options

    @property
    def stem(self) -> str:
        """The prefix of the names of the graph's dumps."""
        return f"{self.number:03d}_{self.phase}"

    def choices(self, subject: str, about: object, nodes: Iterable[Node], own: object) -> list[Any]:
        """The choices of all ranks, as JSON gives them back; without `agree_on_choice`, `own`.

        Args:
            subject: in words.
            about, nodes: the facts: a value, and the collectives of a graph.
        """
        if self.agree_on_choice is None:
            return [own]
        nodes = list(nodes)

        def facts(by_number: bool) -> list[str]:
            return [repr(about), *(describe_collective(node, by_number) for node in nodes)]

        notes = self.agree_on_choice(subject, facts, json.dumps(own, sort_keys=True))
        return [json.loads(note) for note in sorted(notes)]
