"""`shardc plan`: the layout that `fully_shard` would give a model, from its shapes alone.

The command runs the planner of `fully_shard` without a mesh, so it needs neither ranks nor memory.
Figures of the compiled graphs (activations, when buckets are gathered, seconds) are left out.
"""

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardc.commands.arguments import (
    add_precision,
    add_profile,
    add_target,
    read_precision,
    read_profile,
)
from shardc.commands.target import EXAMPLE, load_model
from shardc.reports.terminal import Column, table, wrap
from shardc.runtime.checks.words import dtype_name, format_bytes, plural

if TYPE_CHECKING:
    from shardc.commands.planned import UnitGroup
    from shardc.sharding.unit_plan import UnitPlan

NAME = "plan"
SUMMARY = "show how a model would be sharded over any number of ranks, without running it"
DESCRIPTION = """\
Show how fully_shard(model, units="auto") lays a model out: its units (repeated blocks, and what is
left), the flat buckets of each, and what a rank keeps of them. Needs no GPU and no other process,
and no memory for a model on the meta device.

The target names a function that takes no arguments and returns the model, or (model, example
inputs); build it under torch.device("meta").
"""
EPILOG = f"""\
example:
  shardc plan {EXAMPLE} --world-size 1024 --mp bf16

A bucket is gathered and reduced as a whole, and cut into equal segments, one a rank; padding is
what aligns parameters and segments. Adam's state is two values a parameter. Activations, and the
buckets that are gathered at a time, come on top of what a rank keeps.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardc plan`."""
    add = parser.add_argument
    add_target(parser)
    add_precision(parser)
    add_profile(parser, "the links that large units are split into buckets for")
    add("--json", action="store_true", help="print JSON: all sizes in bytes, every unit by name")


def run(args: argparse.Namespace) -> int:
    """Plan the model and print the table, or JSON."""
    model, _ = load_model(args.target)
    from shardc.commands.planned import group_units, plan_model, total

    profile = read_profile(args)
    policy = read_precision(args)
    plans = plan_model(model, args.world_size, policy, profile)
    groups, totals = group_units(model, plans), total(plans)
    if args.json:
        head = {"model": args.target, "world_size": args.world_size, "profile": profile.name}
        units = [{"names": group.names, "buckets": _buckets(group.plan)} for group in groups]
        print(json.dumps({**head, "units": units, "totals": totals}, indent=2))
    else:
        ranks = plural(args.world_size, "rank")
        print(wrap(f"{args.target} over {ranks}, buckets split for {profile.name}") + "\n")
        without = () if args.wire else (_ON_THE_WIRE,) if args.mp else (_GATHERED, _ON_THE_WIRE)
        print(f"{_table(groups, without)}\n\n{_summary(totals)}")
    return 0


# -- print ---------------------------------------------------------------------------------------


_GATHERED = Column("gathered", "right", goes=3)
_ON_THE_WIRE = Column("on the wire", "right", goes=4)
_COLUMNS = (
    Column("unit (how many)", least=32),
    Column("parameters", "right"),
    Column("dtype"),
    Column("bytes", "right", goes=2),
    _GATHERED,
    _ON_THE_WIRE,
    Column("segment", "right"),
    Column("padding %", "right", goes=1),
)


def _table(groups: Sequence["UnitGroup"], without: Collection[Column]) -> str:
    rows = []
    for group in groups:
        for index, bucket in enumerate(_buckets(group.plan)):
            cells = (
                "" if index else group.label,
                f"{bucket['parameters']:,}",
                bucket["dtype"] + ("" if bucket["requires_grad"] else ", frozen"),
                format_bytes(bucket["bytes"]),
                format_bytes(bucket["gathered_bytes"]),
                format_bytes(bucket["wire_bytes"]),
                format_bytes(bucket["segment_bytes"]),
                f"{100 * bucket['padding_fraction']:.3f}",
            )
            pairs = zip(_COLUMNS, cells, strict=True)
            rows.append([cell for column, cell in pairs if column not in without])
    return table([c for c in _COLUMNS if c not in without], rows, elsewhere="--json")


def _summary(totals: Mapping[str, Any]) -> str:
    sizes = totals["bytes_per_rank"].values()
    names = ("parameters", "gradients", "Adam's state")
    kept = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in zip(names, sizes, strict=True)
    )
    alone = totals["units"] == 1
    lines = (
        "One row a bucket; the figures are those of each unit of a row.",
        *(["No blocks repeat: the whole model is one unit and is gathered at once."] * alone),
        f"{plural(totals['parameters'], 'parameter')}; units: {totals['units']}, buckets: "
        f"{totals['buckets']}, padding: {100 * totals['padding_fraction']:.3f}%",
        f"a rank keeps: {kept}; together {format_bytes(sum(sizes))}",
    )
    return "\n".join(map(wrap, lines))


def _buckets(plan: "UnitPlan") -> list[dict[str, Any]]:
    """The figures of each bucket of a unit; `wire_bytes` counts the messages of all ranks."""
    from shardc.commands.planned import segment_bytes

    found = []
    for layout in plan.layouts:
        gathered = plan.settings.dtypes(layout.dtype, evaluating=False)[0]
        nbytes, form = layout.numel * gathered.itemsize, plan.settings.wire_format(layout, "gather")
        sent = layout.world_size * form.row_bytes(layout.segment) if form is not None else nbytes
        found.append(
            {
                "parameters": layout.used,
                "tensors": len(layout.slots),
                "dtype": dtype_name(layout.dtype),
                "requires_grad": layout.requires_grad,
                "bytes": layout.numel * layout.dtype.itemsize,
                "gathered_dtype": dtype_name(gathered),
                "gathered_bytes": nbytes,
                "wire_bytes": sent,
                "segment_bytes": segment_bytes(layout),
                "padding_fraction": layout.padding_fraction,
            }
        )
    return found
