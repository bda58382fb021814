"""A record as text: summary, findings, buckets, collectives."""

import re
from collections.abc import Iterator, Sequence

from tabulate import tabulate

from shardc.reports.memory_curve import curve_table
from shardc.reports.record import KINDS, BucketRow, CollectiveRow, Record
from shardc.reports.words import format_bytes, format_seconds, plural
from shardc.runtime.comm.progress import in_short

_ENDS = 2
"""Of rows that are alike but for a number, as many are shown at each end."""


def report_text(record: Record, every_row: bool = False) -> str:
    """The report as it is printed.

    Args:
        record: the report.
        every_row: show what repeats from block to block too, not only its first and last rows.
    """
    parts = [
        _heading(record),
        summary_table(record),
        _findings(record),
        curve_table(record),
        bucket_table(record.buckets, every_row),
        collective_table(record.collectives, every_row),
        formula_table(record),
    ]
    return "\n\n".join(part for part in parts if part)


def _heading(record: Record) -> str:
    copies = f", {record.copies} copies" if record.copies > 1 else ""
    settings = "".join(f", {name}={value}" for name, value in record.settings.items())
    return f"{record.model} over {record.world_size} ranks{copies}, {record.profile}{settings}"


def summary_rows(record: Record) -> list[tuple[str, str]]:
    """The totals in words: (name, value)."""
    summary, peak = record.summary(), record.peak
    rows = [("step", format_seconds(record.step_seconds))]
    if record.tokens:
        rate = record.tokens / record.step_seconds
        rows.append(("tokens/s a rank", f"{rate:,.0f} ({record.tokens:,} tokens a step)"))
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


def summary_table(record: Record) -> str:
    """`summary_rows` as a table."""
    return tabulate(summary_rows(record), tablefmt="plain", disable_numparse=True)


def _findings(record: Record) -> str:
    if not record.findings:
        return "Nothing to change was found."
    lines = [f"- {f.kind}: {f.what}.\n  What to do: {f.advice}." for f in record.findings]
    return "\n".join(["Findings", *lines])


def bucket_table(buckets: Sequence[BucketRow], every_row: bool = False) -> str:
    """One row a bucket; without `every_row`, the ends of those that are alike."""
    rows = [
        [
            bucket.name,
            f"{bucket.tensors} ({bucket.parameters:,})",
            bucket.dtype + ("" if bucket.trained else ", frozen"),
            format_bytes(bucket.nbytes),
            f"{100 * bucket.padding:.3f}",
            format_bytes(bucket.segment),
            _fate(bucket),
        ]
        for bucket in buckets
    ]
    headers = ["bucket", "parameters", "dtype", "gathered", "padding %", "segment", "after forward"]
    keys = [_pattern(bucket.name) for bucket in buckets]
    return tabulate(
        rows if every_row else list(_ends(rows, keys)),
        headers=headers,
        disable_numparse=True,
        colalign=["left", "right", "left", "right", "right", "right", "left"],
    )


def _fate(bucket: BucketRow) -> str:
    return ("resharded" if bucket.reshard else "kept") if bucket.used else "not gathered"


def collective_table(collectives: Sequence[CollectiveRow], every_row: bool = False) -> str:
    """One row a collective, in the order in which they are started; "" if there are none."""
    if not collectives:
        return ""
    rows = [
        [
            str(number),
            row.phase,
            row.kind.replace("_", "-") + (f", {row.ranks} ranks" if row.in_steps else ""),
            in_short(row.buckets),
            format_bytes(row.nbytes),
            row.before,
            row.needed_by,
            format_seconds(row.seconds),
            format_seconds(row.hidden),
            format_seconds(row.exposed) if row.exposed else "-",
        ]
        for number, row in enumerate(collectives)
    ]
    headers = [
        "", "phase", "collective", "of", "bytes", "started before", "waited for before", "time",
        "hidden", "exposed",
    ]  # fmt: skip
    keys = [_pattern(row.phase, row.kind, *row.buckets) + f" {row.ranks}" for row in collectives]
    shown = rows if every_row else list(_ends(rows, keys, collectives))
    align = ["right", "left", "left", "left", "right", "left", "left", "right", "right", "right"]
    return tabulate(shown, headers=headers, disable_numparse=True, colalign=align)


def formula_table(record: Record) -> str:
    """The totals as formulas, where those of tokens were asked for."""
    if "FLOPs" not in record.formulas:
        return ""
    rows = list(record.formulas.items())
    return tabulate(
        rows, headers=["total", "with W ranks and T tokens a rank"], disable_numparse=True
    )


def _pattern(*names: str) -> str:
    return re.sub(r"\d+", "*", " ".join(names))


def _ends(
    rows: Sequence[list[str]], keys: Sequence[str], collectives: Sequence[CollectiveRow] = ()
) -> Iterator[list[str]]:
    """The rows without the middle ones of equal key; a row says how many were left out."""
    total = {key: keys.count(key) for key in set(keys)}
    seen: dict[str, int] = {}
    left_out: list[int] = []
    for index, (row, key) in enumerate(zip(rows, keys, strict=True)):
        number = seen[key] = seen.get(key, 0) + 1
        if _ENDS < number <= total[key] - _ENDS:
            left_out.append(index)
            continue
        if left_out:
            yield _left_out(left_out, len(row), collectives)
            left_out = []
        yield row


def _left_out(indices: list[int], width: int, collectives: Sequence[CollectiveRow]) -> list[str]:
    row = [""] * width
    row[min(3, width - 1) if collectives else 0] = f"... {len(indices)} more like these"
    if collectives:
        exposed = sum(collectives[index].exposed for index in indices)
        row[-1] = format_seconds(exposed) if exposed else "-"
    return row
