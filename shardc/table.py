"""`describe`: the buckets of a sharded model as a table, before anything has run."""

from collections.abc import Iterable

from tabulate import tabulate
from torch import nn

from shardc.reports.words import format_bytes
from shardc.runtime.bucket import Bucket
from shardc.units import units_of

_HEADERS = ["unit", "parameters", "dtype", "bucket", "padding", "segment", "reshard"]


def describe(model: nn.Module) -> str:
    """One row a bucket: unit, parameters, bytes gathered, padding, bytes this rank keeps.

    Args:
        model: a module on whose parts `fully_shard` was called.
    """
    return bucket_table(
        (name or "(root)", bucket)
        for name, module in units_of(model).items()
        for bucket in module._shardc_unit.buckets
    )


def bucket_table(named: Iterable[tuple[str, Bucket]]) -> str:
    """One row a bucket, given with its name."""
    rows = []
    for name, bucket in named:
        layout, size = bucket.layout, bucket.segment.element_size()
        rows.append(
            [
                name,
                f"{len(layout.slots)} ({layout.used:,})",
                str(bucket.segment.dtype).removeprefix("torch.")
                + ("" if layout.requires_grad else ", frozen"),
                format_bytes(layout.numel * size),
                f"{100 * layout.padding_fraction:.2f}%",
                format_bytes(layout.segment * size),
                "yes" if bucket.reshard_after_forward else "no",
            ]
        )
    return tabulate(rows, headers=_HEADERS, disable_numparse=True)
