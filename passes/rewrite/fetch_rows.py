"""Dynamo graph: fetch the rows that an embedding looks up, and not the whole table.

    before:  w = unshard(segment, a1b2)[0];  x = embedding(ids, w)
    after:   x = look_up(segment, ids, a1b2, 0)

Most of the exposed communication at both ends of a step comes from a table: a gather of a gigabyte,
for a few thousand rows, and a reduction of a gradient that is almost all zeros. If another op reads
the table too (a tied head), that op keeps its gather.

The number of ids decides: the fetch must take less than `WORTH` of the time of gather and reduction
on the wire. All ranks fetch, or none.
"""

import inspect
import json
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.estimate.cost import evaluate, rows_bytes, rows_seconds, whole_seconds
from shardc.passes.estimate.hardware import Profile
from shardc.passes.nodes import describe_spec, reach
from shardc.runtime import compat
from shardc.runtime.comm.unshard import look_up, unshard
from shardc.runtime.layout.spec import Moved, UnshardSpec

WORTH = 0.5
"""The share of the time of gather and reduction that a fetch may take. The bandwidth of a ring is
well known, the bandwidth of an exchange less so, and the host waits for an exchange."""
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_CALL = inspect.signature(torch.nn.functional.embedding)


@dataclass(frozen=True)
class _Lookup:
    """A call of `embedding` on a parameter of a gathered bucket.

    Attributes:
        call, ids: the node of the call, and the node of the ids.
        padding: the row without a gradient, or -1.
        read, gather: the node of the parameter, and the node that gathers its bucket.
        moved, slot: the bucket, and the place of the parameter in it.
    """

    call: Node
    ids: Node
    padding: int
    read: Node
    gather: Node
    moved: Moved
    slot: int

    def seconds(self, profile: Profile, count: float) -> float:
        """Seconds to fetch `count` rows and to return their gradients."""
        spec, r = self.moved.spec, self.moved.spec.reduction
        _, rows, width = spec.table(self.slot)

        def seconds_of(dtype: torch.dtype, back: bool) -> float:
            nbytes = rows_bytes(count, rows, width, spec.world_size, dtype, back)
            return float(rows_seconds(nbytes, spec.world_size, profile, back))

        seconds = seconds_of(spec.compute_dtype, back=False)
        if any(spec.trainable):
            seconds += seconds_of(r.dtype or spec.compute_dtype, back=True)
        return seconds


@contract(needs="gathers")
def fetch_rows(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Look up rows of a table if the lookup takes less time than gather and reduction."""
    options = ctx.options
    if options is None or options.embedding_rows is False or ctx.agree_on_choice is None:
        return gm
    # All ranks find the same tables worth a fetch of one row, and compare notes on these tables.
    found = [each for each in _lookups(gm) if _wins(each, 1, ctx)]
    if not found:
        return gm

    def facts(by_number: bool) -> list[str]:
        names = [each.moved.unit if by_number else each.moved.label for each in found]
        specs = [describe_spec(each.moved.spec) for each in found]
        return [
            f"{name}: {each.slot} of {s}" for each, name, s in zip(found, names, specs, strict=True)
        ]

    mine = [_wins(each, _count(each.ids), ctx) for each in found]
    notes = ctx.agree_on_choice("which embeddings fetch rows", facts, json.dumps(mine))
    for each, *wanted in zip(found, *map(json.loads, notes), strict=True):
        if all(wanted):
            _replace(each)
    return gm


def _lookups(gm: GraphModule) -> Iterator[_Lookup]:
    """The calls of `embedding` that could fetch rows."""
    opens, _ = compat.region_nodes()
    if any(node.target in opens for node in gm.graph.nodes):
        return  # function transforms act on the ids, and cannot see into the op
    for call in gm.graph.find_nodes(op="call_function", target=torch.nn.functional.embedding):
        given = _CALL.bind(*call.args, **call.kwargs).arguments
        ids, read, padding = given["input"], given["weight"], given.get("padding_idx")
        plain = not any(given.get(n) for n in ("max_norm", "scale_grad_by_freq", "sparse"))
        if not (plain and isinstance(read, Node) and read.target is operator.getitem):
            continue
        if hasattr(ids.meta["example_value"], "__tensor_flatten__"):
            continue  # jagged tensors and DTensors: no op of shardc takes a subclass
        gather, slot = read.args[0], cast(int, read.args[1])
        if not isinstance(gather, Node) or gather.target is not unshard:
            continue
        moved = cast(Moved, gather.args[1])
        rows = moved.spec.shapes[slot][0]
        padding = -1 if padding is None else padding % rows
        before = reach(lambda node: node.all_input_nodes, ids)
        if _can_fetch(moved.spec, slot) and not any(node.target is unshard for node in before):
            yield _Lookup(call, ids, padding, read, gather, moved, slot)


def _can_fetch(spec: UnshardSpec, slot: Any) -> bool:
    """Whether a fetch can replace the bucket's gather and reduction, and segments hold whole rows.

    No other code may take part in the transfer of the bucket's parameters and gradients.
    """
    r = spec.reduction
    asked = (spec.gather, spec.extension, spec.memory, r.function, r.scatter, r.memory, r.hook)
    waits = spec.extras or spec.outside or (r.replicas is not None and not r.all_reduce)
    if waits or spec.world_size == 1 or any(each is not None for each in asked):
        return False
    if spec.compute_dtype not in _DTYPES or len(spec.shapes[slot]) != 2:
        return False
    start, rows, width = spec.table(slot)
    segment = spec.numel // spec.world_size
    return rows * width > 0 and start % width == 0 and segment % width == 0


def _wins(lookup: _Lookup, count: float, ctx: PassContext) -> bool:
    if ctx.planned.embedding_rows:
        return True
    spec, profile = lookup.moved.spec, ctx.planned.profile
    is_alone = len(spec.shapes) == 1  # otherwise the other parameters may need the gather
    return is_alone and lookup.seconds(profile, count) < WORTH * whole_seconds(spec, profile)


def _count(ids: Node) -> float:
    sizes = ids.meta["example_value"].shape
    return float(math.prod(evaluate(compat.size_expr(s), compat.symbol_values(s)) for s in sizes))


def _replace(lookup: _Lookup) -> None:
    call, graph = lookup.call, lookup.call.graph
    segment, moved = lookup.gather.args[0], lookup.moved
    with graph.inserting_before(call):
        rows = graph.call_function(
            look_up, (segment, lookup.ids, moved, lookup.slot, lookup.padding)
        )
    rows.meta = dict(call.meta)
    call.replace_all_uses_with(rows)
    for node in (call, lookup.read, lookup.gather):
        if not node.users:
            graph.erase_node(node)
