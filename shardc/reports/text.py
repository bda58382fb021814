"""A record as text: summary, findings, buckets, collectives."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardc.reports.memory_curve import curve_table
from shardc.reports.record import KINDS, BucketRow, CollectiveRow, Record
from shardc.reports.terminal import PAGE, Column, pairs, table, wrap
from shardc.runtime.checks.words import format_bytes, format_seconds, plural
from shardc.runtime.watch.progress import in_short

_ENDS = 2
"""How many rows are shown at each end of the rows that differ in numbers only."""


def report_text(record: Record, every_row: bool = False, width: int | None = None) -> str:
    """The printed text of a report; arguments as for `Report.text`."""
    parts = [
        wrap(_heading(record), width),
        pairs(summary_rows(record), width),
        _findings(record, width),
        curve_table(record, width),
        bucket_table(record.buckets, every_row, width, PAGE),
        collective_table(record.collectives, every_row, width, PAGE),
        formula_table(record, width),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(record: Record) -> str:
    copies = f", {plural(record.copies, 'copy', 'copies')}" if record.copies > 1 else ""
    ranks = plural(record.world_size, "rank")
    settings = "".join(f", {name}={value}" for name, value in record.settings.items())
    return f"{record.model} over {ranks}{copies}, {record.profile}{settings}"


def summary_rows(record: Record) -> list[tuple[str, str]]:
    """The totals in words: (name, value)."""
    summary, peak = record.summary(), record.peak
    rows = [("step", format_seconds(record.step_seconds))]
    if record.tokens:
        rate = record.tokens / record.step_seconds
        rows.append(("tokens/s a rank", f"{rate:,.0f} ({plural(record.tokens, 'token')} a step)"))
    if record.flops:
        rows.append(("FLOPs used", f"{record.flops_used:.1%} of the device's peak"))
    rows += [
        ("compute", format_seconds(record.compute_seconds)),
        ("wire", f"{format_seconds(record.wire_seconds)} ({format_bytes(record.sent_bytes)} sent, "
            f"{plural(len(record.collectives), 'message')})"),
        ("exposed", f"{format_seconds(record.exposed_seconds)} "
            f"({summary['exposed_seconds'] / (record.step_seconds or 1):.1%} of the step)"),
        ("peak memory", f"{format_bytes(peak.total)}, at {peak.where}"),
    ]  # fmt: skip
    parts = zip(KINDS, peak.held, strict=True)
    return rows + [(f"- {kind}", format_bytes(size)) for kind, size in parts]


def _findings(record: Record, width: int | None) -> str:
    if not record.findings:
        return "Nothing to change was found."
    lines = ["Findings"]
    for finding in record.findings:
        lines.append(wrap(f"{finding.kind}: {finding.what}.", width, "- ", "  "))
        lines.append(wrap(f"What to do: {finding.advice}.", width, "  ", "  "))
    return "\n".join(lines)


_BUCKET_COLUMNS = (
    Column("bucket", least=16),
    Column("parameters", "right", goes=2),
    Column("dtype"),
    Column("gathered", "right"),
    Column("padding %", "right", goes=1),
    Column("segment", "right"),
    Column("after forward", goes=3),
)


def bucket_table(
    buckets: Sequence[BucketRow],
    every_row: bool = False,
    width: int | None = None,
    elsewhere: str = "",
) -> str:
    """One row a bucket; without `every_row`, only the first and last of rows that are alike."""
    rows = [
        [
            bucket.name,
            f"{bucket.tensors} ({bucket.parameters:,})",
            bucket.dtype + ("" if bucket.trained else ", frozen"),
            format_bytes(bucket.nbytes),
            f"{100 * bucket.padding:.3f}",
            format_bytes(bucket.segment),
            ("resharded" if bucket.reshard else "kept") if bucket.used else "not gathered",
        ]
        for bucket in buckets
    ]
    keys = [_pattern(bucket.name) for bucket in buckets]
    shown = rows if every_row else list(_ends(rows, keys))
    return table(_BUCKET_COLUMNS, shown, width, elsewhere)


def _together(buckets: Sequence[str]) -> str:
    """Names of buckets in one word; neighbours share the name of their module: "layers.2+3"."""
    names = in_short(buckets).split("+")
    parts = names[:1]
    for before, name in pairwise(names):
        (module, dot, own), other = name.rpartition("."), before.rpartition(".")[0]
        parts.append(own if dot and module == other else name)
    return "+".join(parts)


_COLLECTIVE_COLUMNS = (
    Column("", "right"),
    Column("phase", goes=6),
    Column("collective"),
    Column("of", least=24),
    Column("bytes", "right", goes=5),
    Column("started before", goes=1, least=24),
    Column("waited for before", goes=2, least=24),
    Column("time", "right", goes=4),
    Column("hidden", "right", goes=3),
    Column("exposed", "right"),
)


def collective_table(
    collectives: Sequence[CollectiveRow],
    every_row: bool = False,
    width: int | None = None,
    elsewhere: str = "",
) -> str:
    """One row a collective, in the order of the starts; "" without collectives."""
    if not collectives:
        return ""
    rows = [
        [
            str(number),
            row.phase,
            row.kind.replace("_", "-") + (f", {plural(row.ranks, 'rank')}" * row.in_steps),
            _together(row.buckets),
            format_bytes(row.nbytes),
            row.before,
            row.needed_by,
            format_seconds(row.seconds),
            format_seconds(row.hidden),
            format_seconds(row.exposed) if row.exposed else "-",
        ]
        for number, row in enumerate(collectives)
    ]
    keys = [_pattern(row.phase, row.kind, *row.buckets) + f" {row.ranks}" for row in collectives]
    shown = rows if every_row else list(_ends(rows, keys, collectives))
    return table(_COLLECTIVE_COLUMNS, shown, width, elsewhere)


def formula_table(record: Record, width: int | None = None) -> str:
    """The totals as formulas; "" unless the record has formulas of tokens."""
    if "FLOPs" not in record.formulas:
        return ""
    heading = "Totals with W ranks and T tokens a rank"
    return f"{heading}\n{pairs(list(record.formulas.items()), width)}"


def _pattern(*names: str) -> str:
    return re.sub(r"\d+", "*", " ".join(names))


def _ends(
    rows: Sequence[list[str]], keys: Sequence[str], collectives: Sequence[CollectiveRow] = ()
) -> Iterator[list[str]]:
    """The rows without the middle rows of each key; a row tells how many were left out."""
    total = {key: keys.count(key) for key in set(keys)}
    seen: dict[str, int] = {}
    left_out: list[int] = []
    for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
        number = seen[key] = seen.get(key, 0) + 1
        if _ENDS < number <= total[key] - _ENDS:
            left_out.append(index)
            continue
        if len(left_out) == 1:
            yield rows[left_out[0]]
        elif left_out:
            yield _left_out(left_out, len(row), collectives)
        left_out = []
        yield row


def _left_out(indices: list[int], width: int, collectives: Sequence[CollectiveRow]) -> list[str]:
    row = [""] * width
    row[min(3, width - 1) if collectives else 0] = f"... {len(indices)} like these"
    if collectives:
        exposed = sum(collectives[index].exposed for index in indices)
        row[-1] = format_seconds(exposed) if exposed else "-"
    return row
