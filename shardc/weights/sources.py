"""Sources: the trainers' tensors as all ranks know them, from each trainer's own description.

Trainers with equal coordinates of tensor parallelism have equal tables of their tensors, and differ
only in the segment that they hold. So a table travels once, from the first rank that has it, and
each rank adds a few numbers.
"""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import Placed
from shardc.runtime.watch.entering import entering, told
from shardc.state.model_state import model_state
from shardc.weights.adapters import Adapters
from shardc.weights.layouts import Layout, Shape
from shardc.weights.rank_plan import Part, Source


class _Row(NamedTuple):
    """A tensor of one trainer.

    `ring` numbers the groups over which the trainer's tensors are cut; -1: the tensor is not cut.
    """

    name: str
    first: str
    shape: Shape
    dtype: torch.dtype
    offsets: Shape
    box: Shape
    start: int
    segment: int
    ring: int


@dataclass
class Described:
    """The tensors of this rank, by the names that receivers use.

    Attributes:
        values: the tensors themselves.
        rows: the table, one row a name.
        rings: for each group over which tensors are cut, its size and this rank's place in it.
        adapters: the adapters to merge.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)
    rings: list[tuple[int, int]] = field(default_factory=list)
    adapters: Adapters = field(default_factory=Adapters)


def named_tensors(model: nn.Module, adapters: Adapters) -> dict[str, Tensor]:
    """The parameters and persistent buffers by the names under which they are sent.

    Raises:
        ValueError: a tensor is on the meta device.
    """
    state = {name: value for name, value in model_state(model).items() if isinstance(value, Tensor)}
    for name, value in state.items():
        if value.is_meta:
            raise ValueError(
                f"'{name}' is on the meta device and has no values to send: give the model memory "
                "first, shardc.materialize(model) or load_pretrained"
            )
    renamed = ((adapters.sent_as(name), value) for name, value in state.items())
    return {name: value for name, value in renamed if name is not None}


def describe(model: nn.Module, merge_adapters: bool) -> Described:
    """Describe the tensors of this trainer."""
    adapters = Adapters.of(model) if merge_adapters else Adapters()
    described = Described(named_tensors(model, adapters), adapters=adapters)
    rings: dict[str, int] = {}
    first: dict[int, str] = {}  # a tied tensor is one object under all of its names
    for name, value in described.values.items():
        spec = value._shard_spec if isinstance(value, ShardTensor) else None
        if spec is not None and spec.group not in rings:
            rings[spec.group] = len(rings)
            described.rings.append((spec.world_size, spec.rank))
        own_name = first.setdefault(id(value), name)
        shape, numel = tuple(value.shape), value.numel()
        placed = Placed.of(value) if spec is None else spec.tp
        offsets, box = (0,) * len(shape), shape
        if placed is not None:
            offsets, box = placed.offsets, placed.local_shape
        cut = (0, numel, -1) if spec is None else (spec.offset, spec.segment, rings[spec.group])
        described.rows.append(_Row(name, own_name, shape, value.dtype, offsets, box, *cut))
    return described


def local_part(value: Tensor) -> tuple[Tensor, int, Shape]:
    """This rank's elements of a tensor: flat, the place of the first one, the shape of the box."""
    if isinstance(value, ShardTensor):
        spec = value._shard_spec
        box = tuple(value.shape) if spec.tp is None else spec.tp.local_shape
        return value._local, spec.interval()[0], box
    local = compat.local_of(value) if compat.is_dtensor(value) else value
    return local.detach().reshape(-1), 0, tuple(local.shape)


# -- among ranks ---------------------------------------------------------------------------------


class Facts(NamedTuple):
    """The facts that a rank tells all others."""

    table: str
    rings: list[tuple[int, int]]
    layout: Layout | None


PLAN = "an exchange for a plan of weights"


def exchange(
    described: Described, layout: Layout | None, group: dist.ProcessGroup
) -> tuple[dict[str, Source], dict[int, Layout]]:
    """Tell all ranks of `group` the tensors of the trainers and the layouts of the receivers."""
    rows = described.rows
    table = hashlib.sha256(pickle.dumps(rows)).hexdigest() if rows else ""
    facts = told(Facts(table, described.rings, layout), PLAN, group)
    tables: dict[str, list[_Row]] = {}
    for rank, fact in enumerate(facts):
        if fact.table and fact.table not in tables:
            box = [rows]
            with entering("a broadcast of a table of tensors", compat.group_name(group)):
                dist.broadcast_object_list(box, group=group, group_src=rank)
            tables[fact.table] = box[0]
    trainers = [(rank, fact.table, fact.rings) for rank, fact in enumerate(facts) if fact.table]
    layouts = {rank: fact.layout for rank, fact in enumerate(facts) if fact.layout is not None}
    return joined(tables, trainers), layouts


def joined(
    tables: Mapping[str, list[_Row]], trainers: Sequence[tuple[int, str, list[tuple[int, int]]]]
) -> dict[str, Source]:
    """The sources that trainers hold: for each, its table and its place in each ring."""
    boxes: dict[str, dict[tuple[Shape, Shape], Part]] = {}
    sources: dict[str, Source] = {}
    for table, rows in tables.items():
        here = tuple(rank for rank, own, _ in trainers if own == table)
        rings: dict[int, tuple[tuple[int, ...], ...]] = {-1: (here,)}
        count = next(len(places) for _, own, places in trainers if own == table)
        rings |= {ring: _holders(table, ring, trainers) for ring in range(count)}
        for row in rows:
            holders: tuple[tuple[int, ...], ...] = rings[row.ring]
            of = boxes.setdefault(row.name, {})
            have = of.get((row.offsets, row.box))
            if have is not None and have.segment == row.segment and have.start == row.start:
                holders = tuple(a + b for a, b in zip(have.holders, holders, strict=True))
            cut = row.start, row.segment, holders, row.ring >= 0
            of[row.offsets, row.box] = Part(row.offsets, row.box, *cut)
            _note(sources, row)
    return {
        name: Source(source.name, source.shape, source.dtype, tuple(boxes[name].values()))
        for name, source in sources.items()
    }


def _note(sources: dict[str, Source], row: _Row) -> None:
    have = sources.setdefault(row.name, Source(row.first, row.shape, row.dtype, ()))
    if (have.shape, have.dtype) != (row.shape, row.dtype):
        raise RuntimeError(
            f"'{row.name}' is {tuple(have.shape)} {have.dtype} on one trainer and "
            f"{row.shape} {row.dtype} on another: all trainers need the same model"
        )


def _holders(
    table: str, ring: int, trainers: Sequence[tuple[int, str, list[tuple[int, int]]]]
) -> tuple[tuple[int, ...], ...]:
    """For each place of a ring, the ranks that hold its segment."""
    found: list[list[int]] = []
    for rank, own, rings in trainers:
        if own == table:
            size, place = rings[ring]
            found = found or [[] for _ in range(size)]
            found[place].append(rank)
    return tuple(map(tuple, found))
