"""The context of passes: what they are given beside the graph."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule

from shardc.passes.estimate.hardware import Profile
from shardc.runtime.checks.words import bytes_like
from shardc.runtime.layout.spec import Moved

Facts = Callable[[bool], list[str]]
"""Lines that ranks compare. Given True, they number a graph's units and do not name them: equal
blocks, which run one graph, say the same."""


class NotAgreed(Exception):
    """Ranks have not agreed on something yet."""


@dataclass(frozen=True)
class Recall:
    """Agreements of ranks from an earlier compile. It asks no rank, and raises `NotAgreed`.

    Attributes:
        seconds: given a phase and facts, the compute seconds that all ranks plan with.
        collectives: given a finished graph and its phase, raises unless ranks send what it does.
    """

    seconds: Callable[[str, Facts], list[float]]
    collectives: Callable[[GraphModule, str], None]


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of the schedule; equal on all ranks.

    Attributes:
        profile: the device and its links.
        prefetch: how many units ahead gathers start; None leaves it to the cost model.
        backward_prefetch: the same for the backward, in FSDP1's words: "pre", "post" or "none";
            "auto" leaves it to `prefetch`.
        forward_hints, backward_hints: units to gather when another's forward or backward begins.
        reduce_buffers: how many reductions may be under way; None bounds their bytes only.
        coalesce: whether collectives may be merged.
        fused: whether the executor fuses elementwise ops, and keeps them in registers (Inductor).
        in_order: whether kernels on CPUs stay between the matmuls that they are between.
        folds: whether what repeats may become calls of one body.
        clones: whether the backend clones what it reduces (gloo).
        embedding_rows: whether embeddings fetch rows; None leaves it to the cost model.
        saves_on_host: whether a memory budget may have values saved on the host.
        states: bytes of the optimizer's state of each bucket whose state a memory budget may have
            wait on the host, by input.
        host_room: bytes of the host's memory for both.
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
        """The event at which each gather, given as (unit, event), is asked for, if it is."""
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
        nbytes: of everything.
        static: of segments and optimizer state; gradients count where the backward makes them.
        margin: what is left free for what the model does not see, as a share of what graphs hold.
        given: the bound as the user wrote it, for errors.
    """

    nbytes: int
    static: int
    margin: float = 0.0
    given: int | float | str = field(default=0, repr=False, compare=False)

    @property
    def room(self) -> int:
        """Bytes that a graph may hold, by the model of memory."""
        return int((self.nbytes - self.static) * (1 - self.margin))

    def needed(self, peak: int) -> int:
        """The least bound with room for `peak`."""
        return self.static + math.ceil(peak / (1 - self.margin))

    def shown(self, count: int) -> str:
        """So many bytes, in the units of the bound."""
        return bytes_like(count, self.given)

    def __str__(self) -> str:
        shown, given = self.shown(self.nbytes), str(self.given)
        if given.lower().endswith("b"):
            return given
        return f"{given} ({shown})" if "." in given else shown


MARGIN, MARGIN_OF_DEVICES = 0.02, 0.03
"""Under Inductor: small buffers, and kernels that are fused otherwise than the model thinks; on
accelerators, besides, blocks larger than was asked for, which the caching allocator does not split
(less than 1 MiB each, none with expandable segments)."""


UNITS_IN_FLIGHT = 2
"""FSDP's `limit_all_gathers`: as many units may be under way or waiting to be read."""


@dataclass(frozen=True)
class Kept:
    """The choice of a memory budget.

    Attributes:
        among: inputs that are segments of units whose reshard was left to the budget.
        positions: those of them that stay gathered until the backward.
        ahead: how many units may be under way or waiting to be read.
        recomputed: names of the joint graph's nodes that the backward computes again.
        recomputes: the same in words: what kind of value, in how many units.
        offloaded: names of the joint graph's nodes that the forward saves on the host, each with
            the name of its unit.
        offloads: the same in words, as `recomputes`.
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
        """Whether the gathered bucket is freed after the forward."""
        if moved.position in self.among:
            return moved.position not in self.positions
        return moved.spec.reshard_after_forward


_numbers = itertools.count()


@dataclass(frozen=True)
class PassContext:
    """Facts that passes are given beside the graph, known before they start.

    Attributes:
        phase: "dynamo", "joint", "forward" or "backward".
        buckets: name and unit of the bucket, per input of the Dynamo graph that is a segment.
        outside: those of these inputs whose buckets the eager runtime gathers.
        options: what the schedule is planned with; None leaves the graph in its order.
        agree_on_seconds: given the collectives of a graph and the compute seconds between their
            events, the seconds that all ranks plan with.
        agree_on_choice: given what is chosen, in words, facts, and what this rank would choose: the
            choices of all ranks.
        recall: what ranks agreed on before; None where nobody is to agree with.
        budget: what memory the plan may use; None for no bound.
        open_positions: inputs that are segments of units whose reshard is left to the compiler.
        kept: what was decided within the budget.
        results: how many outputs of the forward are the caller's; behind them is what it saves.
            None where no backward follows.
        number: the number of the graph in this process; None for one that is only tried.
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
    kept: Kept = Kept()
    results: int | None = None
    number: int | None = field(default_factory=_numbers.__next__)

    @property
    def stem(self) -> str:
        """The beginning of the names of the graph's dumps."""
        return f"{self.number:03d}_{self.phase}"
