"""The values of a report: buckets, collectives, compute, memory, findings.

Every time is in seconds on one clock, which starts with the step: the forward, then the backward,
then the optimizer. Every size is in bytes on one rank. Nothing here knows graphs or torch; tables,
pictures and comparisons are made of these values only, so a report that was saved as JSON is as
good as a fresh one.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self


@dataclass(frozen=True)
class BucketRow:
    """One flat bucket.

    Attributes:
        name: its unit's name, "(root)" for the outermost; "layers.0[1]" where a unit has several.
        unit: the unit's name.
        tensors, parameters: how many tensors it holds, and how many elements they have.
        dtype, gathered_dtype: as stored, and as gathered.
        nbytes: bytes of the gathered whole, padding included.
        padding: the share of it that no parameter has.
        segment: bytes that each rank keeps.
        trained: whether it gets a gradient.
        reshard: whether it is freed after the forward and gathered again.
        used: whether any graph gathers it.
        extended: whether its parameter's subclass says itself what is sent of it.
    """

    name: str
    unit: str
    tensors: int
    parameters: int
    dtype: str
    gathered_dtype: str
    nbytes: int
    padding: float
    segment: int
    trained: bool
    reshard: bool
    used: bool = True
    extended: bool = False


ROW_KINDS = ("fetch_rows", "return_rows")
"""Kinds of what looks up rows of a table, and sends their gradients back: several messages."""


@dataclass(frozen=True)
class CollectiveRow:
    """One collective, in the order in which they are started.

    Attributes:
        phase: "forward" or "backward".
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", or one of `ROW_KINDS`.
        buckets: the names of the buckets it moves: several where it is coalesced.
        ranks: among how many ranks it goes.
        nbytes: bytes of the whole (gathered, before it is reduced, or sent to all ranks).
        before: the first op that is computed after it was started.
        needed_by: the first op that is computed after the wait for it.
        issued: when it is started; it may queue behind others.
        start, end: when the wire carries it.
        waited: when compute comes to the wait.
        exposed: how long compute stands still there.
        dtype: what it sends; int8 also stands for float8.
        in_steps: whether it goes in two steps, or is one of two: across nodes, and inside of them.
    """

    phase: str
    kind: str
    buckets: tuple[str, ...]
    ranks: int
    nbytes: int
    before: str
    needed_by: str
    issued: float
    start: float
    end: float
    waited: float
    exposed: float
    dtype: str = ""
    in_steps: bool = False

    @property
    def brings_parameters(self) -> bool:
        """Whether it brings parameters, and not gradients."""
        return self.kind in ("all_gather", "fetch_rows")

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends for it, in rings."""
        return self.nbytes * (self.ranks - 1) / self.ranks * (2 if self.kind == "all_reduce" else 1)

    @property
    def seconds(self) -> float:
        """How long the wire carries it."""
        return self.end - self.start

    @property
    def hidden(self) -> float:
        """How much of that time compute goes on."""
        return max(0.0, self.seconds - self.exposed)


@dataclass(frozen=True)
class Op:
    """One op that computes; ops without cost (views) are left out.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        name: the op: "mm".
        module: where it comes from in the model: "layers.0.mlp.up"; "" where it is not known.
        start, seconds: when, and for how long.
    """

    phase: str
    name: str
    module: str
    start: float
    seconds: float


KINDS = ("segments", "optimizer", "gradients", "activations", "gathered", "workspaces")
"""What memory is held for: parameters' segments, the optimizer's state, gradients (reduced or not),
values of the model (saved or passing), gathered buckets, what the matmul library keeps."""


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes held from `seconds` on, one figure for each of `KINDS`.

    `where` is the op after which it is so.
    """

    seconds: float
    held: tuple[int, ...]
    where: str = ""

    @property
    def total(self) -> int:
        """Everything."""
        return sum(self.held)


@dataclass(frozen=True)
class Finding:
    """Something worth changing: what was seen, and what to do about it."""

    kind: str
    what: str
    advice: str


@dataclass(frozen=True)
class CurveRow:
    """A way to run the step within some memory.

    Attributes:
        setting: what people call it ("full checkpointing, resharded"); "" for a point of the curve.
        nbytes: what a rank holds at most.
        seconds: the step.
        gathered, buckets: how many buckets stay gathered after the forward, of how many that may.
        ahead: how many units may be gathered ahead.
        again: what is computed again in the backward, in words.
        on_host: bytes that the forward saves on the host.
        copied: what that is, in words.
        states_on_host: bytes of the optimizer's state that wait there meanwhile.
    """

    setting: str
    nbytes: int
    seconds: float
    gathered: int
    buckets: int
    ahead: int
    again: str
    on_host: int = 0
    copied: str = "nothing"
    states_on_host: int = 0


@dataclass(frozen=True)
class Record:
    """A step: what was asked for, what it does, and what it costs.

    Attributes:
        model: the model's class.
        world_size: ranks that share each bucket.
        copies: how many copies of the model there are (HSDP).
        profile: the name of the hardware that times are for.
        settings: what else was asked for, in words by name.
        tokens: tokens of a step on one rank (elements of the first integer input); 0 if unknown.
        flops: floating-point operations of a step on one rank, of matmuls and their like.
        peak_flops: what the device could do in a second.
        buckets, collectives, ops, memory, findings: see there.
        curve: step time against memory, where it was asked for, least memory first; then usual
            settings.
        kinds: of values that may be computed again, cheapest per byte first.
        formulas: totals as functions of `W` and `T` (`shardc.reports.formulas`), as sympy's texts.
    """

    model: str
    world_size: int
    copies: int
    profile: str
    settings: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0
    peak_flops: float = 0.0
    buckets: tuple[BucketRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    ops: tuple[Op, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
    findings: tuple[Finding, ...] = ()
    formulas: dict[str, str] = field(default_factory=dict)
    curve: tuple[CurveRow, ...] = ()
    kinds: tuple[str, ...] = ()

    # -- totals ------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float:
        """From the start of the step until all compute and all transfers are done."""
        ends = [op.start + op.seconds for op in self.ops] + [c.end for c in self.collectives]
        return max(ends, default=0.0)

    @property
    def compute_seconds(self) -> float:
        """All compute, the optimizer's included."""
        return sum(op.seconds for op in self.ops)

    @property
    def wire_seconds(self) -> float:
        """How long the wire is in use."""
        return sum(collective.seconds for collective in self.collectives)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that communication adds to the step."""
        return self.step_seconds - self.compute_seconds

    @property
    def flops_used(self) -> float:
        """The share of the device's peak that the step reaches (model FLOPs utilisation)."""
        possible = self.peak_flops * self.step_seconds
        return self.flops / possible if possible else 0.0

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step, in rings."""
        return sum(collective.sent_bytes for collective in self.collectives)

    @property
    def peak(self) -> MemoryPoint:
        """The moment at which most memory is held."""
        nothing = MemoryPoint(0.0, (0,) * len(KINDS))
        return max(self.memory, key=lambda point: point.total, default=nothing)

    # -- JSON --------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON takes it, with the totals under "summary"."""
        return {"summary": self.summary(), **dataclasses.asdict(self)}

    def summary(self) -> dict[str, Any]:
        """The totals, by name: seconds and bytes."""
        peak = self.peak
        return {
            "step_seconds": self.step_seconds,
            "compute_seconds": self.compute_seconds,
            "wire_seconds": self.wire_seconds,
            "exposed_seconds": self.exposed_seconds,
            "sent_bytes": self.sent_bytes,
            "flops_used": self.flops_used,
            "peak_bytes": peak.total,
            "peak_at": peak.where,
            "peak_parts": dict(zip(KINDS, peak.held, strict=True)),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read back the result of `to_dict`.

        Raises:
            ValueError: it is not that.
        """
        rows: dict[str, Any] = {
            "buckets": BucketRow,
            "collectives": CollectiveRow,
            "ops": Op,
            "memory": MemoryPoint,
            "findings": Finding,
            "curve": CurveRow,
        }
        try:
            given = {f.name: values[f.name] for f in dataclasses.fields(cls)}
            given["kinds"] = tuple(given["kinds"])
            for name, row in rows.items():
                given[name] = tuple(row(**_tuples(entry)) for entry in given[name])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a report of shardc: {error}") from error
        return cls(**given)


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
