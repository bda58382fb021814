"""Totals of a step as formulas of the numbers of ranks and tokens, in the syntax of sympy.

`W` is the number of ranks that share a bucket, `T` the number of tokens of a rank's step. Formulas
in `W` follow from the buckets and the messages of one report. Formulas in `T` are lines through two
reports of the same model, one with twice the batch. The lines are exact for FLOPs and for values
kept for the backward, because sequences keep their length. For seconds they are as good as the
roofline is straight between the two batches.
"""

from collections.abc import Callable

import sympy  # type: ignore[import-untyped]

from shardc.passes.estimate.cost import WORLD, collective_seconds
from shardc.passes.estimate.hardware import Profile
from shardc.reports.record import KINDS, Record

TOKENS = sympy.Symbol("T", positive=True)
"""Tokens of one rank's step."""

Formulas = dict[str, str]


def rank_formulas(record: Record, profile: Profile) -> Formulas:
    """Formulas in `W`: bytes that a rank keeps and sends, seconds of the wire."""
    stored = sum(bucket.segment for bucket in record.buckets) * record.world_size
    trained = sum(b.segment for b in record.buckets if b.trained) * record.world_size
    states = record.peak.held[KINDS.index("optimizer")] / (trained / record.world_size or 1)
    own = [row for row in record.collectives if row.kind != "all_reduce"]
    whole = sum(row.nbytes for row in own)
    seconds = collective_seconds(whole, WORLD, profile)
    if own:
        seconds += (len(own) - 1) * collective_seconds(0, WORLD, profile)
    return _texts(
        {
            "segments (bytes)": sympy.Integer(stored) / WORLD,
            "optimizer (bytes)": sympy.nsimplify(round(states * trained)) / WORLD,
            "sent (bytes)": whole * (WORLD - 1) / WORLD,
            "wire (s)": seconds,
        }
    )


def token_formulas(record: Record, doubled: Record) -> Formulas:
    """Formulas in `T`, from the reports of a batch and of twice that batch."""
    kept = KINDS.index("activations")
    read: dict[str, Callable[[Record], float]] = {
        "FLOPs": lambda r: r.flops,
        "compute (s)": lambda r: r.compute_seconds,
        "kept for the backward (bytes)": lambda r: float(_at_backward(r)[kept]),
    }
    formulas = {}
    for name, figure in read.items():
        first, second = figure(record), figure(doubled)
        slope = (second - first) / (doubled.tokens - record.tokens)
        formulas[name] = (first - slope * record.tokens) + slope * TOKENS
    return _texts(formulas)


def _at_backward(record: Record) -> tuple[int, ...]:
    """Bytes held at the end of the forward, one figure for each of `KINDS`."""
    forward = [op.start + op.seconds for op in record.ops if op.phase == "forward"]
    end = max(forward, default=0.0)
    return [point.held for point in record.memory if point.seconds <= end + 1e-12][-1]


def _texts(formulas: dict[str, sympy.Expr]) -> Formulas:
    return {name: str(sympy.sympify(formula)) for name, formula in formulas.items()}
