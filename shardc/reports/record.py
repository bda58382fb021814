"""The values of a report: buckets, collectives, compute, memory, findings.

Every time is in seconds on one clock, which starts with the step: the forward, then the backward,
then the optimizer. Every size is in bytes on one rank. This module imports no graphs and no torch.
Tables, pictures and comparisons are made of these values only, so a report that was saved as JSON
is as good as a fresh one.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Self


@dataclass(frozen=True)
class BucketRow:
    """One flat bucket.

    Attributes:
        name: the unit's name, "(root)" for the root; "layers.0[1]" if a unit has several buckets.
        unit: the unit's name.
        tensors, parameters: how many tensors it holds, and how many elements the tensors have.
        dtype, gathered_dtype: the dtype of the segment, and of the gathered bucket.
        nbytes: bytes of the gathered bucket, padding included.
        padding: the share of the bucket that is padding.
        segment: bytes that each rank keeps.
        trained: whether the bucket gets a gradient.
        reshard: whether the gathered bucket is freed after the forward and gathered again.
        used: whether any graph gathers the bucket.
        extended: whether the class of its parameter makes the message itself.
        gathered: when it is gathered: pairs of times.
        seconds: of a gather of it alone.
        may_stay: whether a step may keep it gathered (`can_stay_gathered`).
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
    gathered: tuple[tuple[float, float], ...] = ()
    seconds: float = 0.0
    may_stay: bool = True


ROW_KINDS = ("fetch_rows", "return_rows")
"""Kinds of collectives that fetch rows of a table, and return the rows' gradients."""


@dataclass(frozen=True)
class CollectiveRow:
    """One collective; a record lists collectives in the order of their starts.

    Attributes:
        phase: "forward", "backward", or "optimizer": a gather for the next step.
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", or one of `ROW_KINDS`.
        buckets: the names of the buckets it moves; several if the collective is coalesced.
        ranks: how many ranks take part.
        nbytes: bytes of the whole: gathered, or unreduced, or sent to all ranks.
        before: the first op after the start of the collective.
        needed_by: the first op after the wait for the collective.
        issued: when the collective is started; it may queue behind others.
        start, end: when the wire begins and ends to carry it.
        waited: when compute comes to the wait.
        exposed: how long compute stands still in the wait.
        dtype: of the elements that it sends; int8 also stands for float8 and 4 bits.
        in_steps: whether it goes in two steps, or is one of the two: across nodes, inside of nodes.
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
        """Whether the collective brings parameters, and not gradients."""
        return self.kind in ("all_gather", "fetch_rows")

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends for the collective, in rings."""
        return self.nbytes * (self.ranks - 1) / self.ranks * (2 if self.kind == "all_reduce" else 1)

    @property
    def seconds(self) -> float:
        """Seconds for which the wire carries the collective."""
        return self.end - self.start

    @property
    def hidden(self) -> float:
        """Seconds for which the wire carries the collective and compute goes on."""
        return max(0.0, self.seconds - self.exposed)


@dataclass(frozen=True)
class Op:
    """One op that computes; ops without cost (views) are left out.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        name: the op: "mm".
        module: the module of the model that it is from: "layers.0.mlp.up"; "" if unknown.
        start, seconds: when it starts, and how long it takes.
    """

    phase: str
    name: str
    module: str
    start: float
    seconds: float


KINDS = ("segments", "optimizer", "gradients", "activations", "gathered", "workspaces")
"""Uses of memory: segments of parameters, the optimizer's state, gradients (reduced or not), values
of the model (saved or passing), gathered buckets, workspaces of the matmul library."""


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes held from `seconds` on, one figure for each of `KINDS`.

    `where` is the op after which the bytes are held.
    """

    seconds: float
    held: tuple[int, ...]
    where: str = ""

    @property
    def total(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.held)


@dataclass(frozen=True)
class Finding:
    """A problem of a step: its kind, the observation, and advice."""

    kind: str
    what: str
    advice: str


@dataclass(frozen=True)
class CurveRow:
    """A way to run the step within some memory.

    Attributes:
        setting: its usual name ("full checkpointing, resharded"); "" for a point of the curve.
        nbytes: the most bytes that a rank holds.
        seconds: of the step.
        gathered, buckets: how many buckets stay gathered after the forward, and how many may.
        ahead: how many units may be gathered ahead.
        again: the values that the backward computes again, in words.
        on_host: bytes that the forward saves on the host.
        copied: the values that the forward saves on the host, in words.
        states_on_host: bytes of the optimizer's state that wait on the host during the step.
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


ROWS: dict[str, type[Any]] = {
    "buckets": BucketRow,
    "collectives": CollectiveRow,
    "ops": Op,
    "memory": MemoryPoint,
    "findings": Finding,
    "curve": CurveRow,
}
"""The class of the rows in each field of a record that has rows."""


@dataclass(frozen=True)
class Record:
    """A step: its settings, its plan, and its costs.

    Attributes:
        model: the model's class.
        world_size: ranks that share each bucket.
        copies: how many copies of the model there are (HSDP).
        profile: the name of the hardware that times are for.
        settings: other settings that differ from their defaults, in words by name.
        tokens: tokens of a step on one rank (elements of the first integer input); 0 if unknown.
        flops: floating-point operations of a step on one rank, in matmuls and ops like them.
        peak_flops: operations a second of the device, in the dtype of most operations.
        buckets, collectives, ops, memory, findings: rows; see the class of each.
        curve: step time against memory if the user asked for it, least memory first; then usual
            settings.
        kinds: of values that may be computed again, cheapest per byte first.
        formulas: totals as functions of `W` and `T` (`shardc.reports.formulas`), as sympy texts.
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
        """Seconds from the start of the step until all compute and all transfers are done."""
        ends = [op.start + op.seconds for op in self.ops] + [c.end for c in self.collectives]
        return max(ends, default=0.0)

    @property
    def compute_seconds(self) -> float:
        """Seconds of all compute, the optimizer's step included."""
        return sum(op.seconds for op in self.ops)

    @property
    def wire_seconds(self) -> float:
        """Seconds for which the wire is in use."""
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
        """The point at which most memory is held."""
        nothing = MemoryPoint(0.0, (0,) * len(KINDS))
        return max(self.memory, key=lambda point: point.total, default=nothing)

    # -- JSON --------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The record as values for JSON, with the totals under "summary"."""
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
        """Read back the result of `to_dict`, also of a version without the newest fields.

        Raises:
            ValueError: `values` is no result of `to_dict`.
        """
        try:
            given = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
            given["kinds"] = tuple(given.get("kinds", ()))
            for name, row in ROWS.items():
                given[name] = tuple(row(**_tuples(entry)) for entry in given.get(name, ()))
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"not a report of shardc: {error}") from error


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: _tuple(value) for name, value in entry.items()}


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
