"""`describe`: the buckets of a sharded model as a table, before anything has run."""

from torch import nn

from shardc.reports.assemble import bucket_row
from shardc.reports.terminal import wrap
from shardc.reports.text import bucket_table
from shardc.runtime.checks.arguments import checked
from shardc.runtime.checks.words import some
from shardc.sharding.units import check_sharded, units_of

_NAMED = 5
"""The most parameters in the line below the table."""


@checked
def describe(model: nn.Module) -> str:
    """One row a bucket: parameters, bytes gathered, padding, segment, and whether it is resharded.

    A line names the parameters that ranks cut inside rows; their `to_local()` is 1-D.

    Args:
        model: a module on whose parts `fully_shard` was called.

    Raises:
        ValueError: `fully_shard` was called on no part of the model.
    """
    check_sharded("describe", model)
    buckets = {
        bucket: unit
        for unit, module in units_of(model).items()
        for bucket in module._shardc_unit.buckets
    }
    cut = [
        f"{unit}.{name}".lstrip(".")
        for bucket, unit in buckets.items()
        for name in bucket.layout.cut_inside_rows
    ]
    shown = bucket_table(list(map(bucket_row, buckets)), every_row=True)
    if not cut:
        return shown
    why = "whole rows would need more padding"
    return f"{shown}\n\n" + wrap(f"Flat parts, cut inside rows ({why}): {some(cut, _NAMED)}.")
