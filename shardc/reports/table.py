"""`describe`: the buckets of a sharded model as a table, before anything has run."""

from torch import nn

from shardc.reports.assemble import bucket_row
from shardc.reports.text import bucket_table
from shardc.runtime.checks.arguments import checked
from shardc.sharding.units import check_sharded, units_of


@checked
def describe(model: nn.Module) -> str:
    """One row a bucket: parameters, bytes gathered, padding, segment, and whether it is resharded.

    Args:
        model: a module on whose parts `fully_shard` was called.

    Raises:
        ValueError: `fully_shard` was called on no part of the model.
    """
    check_sharded("describe", model)
    units = units_of(model).values()
    rows = [bucket_row(bucket) for unit in units for bucket in unit._shardc_unit.buckets]
    return bucket_table(rows, every_row=True)
