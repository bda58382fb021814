"""Graphs that are pieces of a model that runs eagerly: the runtime gathers for them.

A piece is a block compiled by itself, or a graph that a break has cut. The eager runtime gathers
the buckets of the pieces, ahead and once for all pieces, and reduces their gradients. A piece is
given the full parameters (`take_gathered`). A graph that holds several whole units gathers for
itself.
"""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardc.backend.recomputed import note_readings
from shardc.passes.rewrite.take_gathered import Taken, marks_of
from shardc.runtime import compat
from shardc.runtime.comm.unshard import full_parameters, gather
from shardc.runtime.unit.bucket import Bucket, bucket_of
from shardc.runtime.unit.eager import is_inside_other_unit
from shardc.runtime.unit.params import slot_of
from shardc.runtime.unit.regather import saving_handles
from shardc.runtime.unit.unit import Unit


def buckets_of_the_runtime(gm: GraphModule, buckets: Mapping[int, Bucket]) -> frozenset[int]:
    """The inputs of a Dynamo graph that are segments of buckets that the runtime gathers.

    The runtime gathers a bucket if several graphs read it, or the forward has read it, or more
    graphs will read it because this graph ends at a break. The runtime gathers all buckets of a
    graph that is one unit of a model that runs eagerly around it; vectors of the unit may lie in a
    bucket of the model. A bucket that is held needs no gather. These facts follow from the program
    alone: they are equal on all ranks, in any step that compiles.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    slots: defaultdict[object, set[Any]] = defaultdict(set)
    for mark in marks_of(gm):
        slots[mark.args[0]].add(mark.args[2])
    read = {p: bucket for p, bucket in buckets.items() if inputs[p] in slots}
    names: defaultdict[Unit, set[str]] = defaultdict(set)
    for position, bucket in read.items():
        read_here = slots[inputs[position]]
        names[bucket.owner] |= {bucket.layout.slots[slot].name for slot in read_here}
    is_one_unit = _is_one_unit(names)
    is_cut = compat.is_cut_by_break(gm)
    return frozenset(
        position
        for position, bucket in read.items()
        if not bucket.gathered.is_held
        and (
            is_one_unit
            or bucket.gathered.is_shared
            or bucket.gathered.is_read
            or (bucket.gathered.depth > 0 and is_cut)
        )
    )


def _is_one_unit(names: Mapping[Unit, Collection[str]]) -> bool:
    """Whether a graph reads one unit of a model that runs eagerly around it.

    Units around that unit may have some of its parameters.

    Args:
        names: the names of the parameters that the graph reads, by unit.
    """
    return any(
        is_inside_other_unit(unit) and all(
            other is unit or all(name.startswith(_prefix(unit, other)) for name in names[other])
            for other in names
        )
        for unit in names
    )  # fmt: skip


def _prefix(unit: Unit, other: Unit) -> tuple[str, ...]:
    """The prefix of names of the unit's parameters in a unit around it; none in another unit."""
    around = unit
    while around.around is not None and (outer := around.around()) is not None:
        around = outer
        if around is other:
            return (unit.name.removeprefix("" if other.is_root else f"{other.name}.") + ".",)
    return ()


def expect_equal_pieces(buckets: Mapping[int, Bucket], taken: Sequence[Taken]) -> None:
    """Let Dynamo compile as many graphs of one module's code as there may be modules.

    A module that is wrapped (`torch.compile(block)`) may read a few slots of a bucket of the model,
    and its neighbour the next few. Dynamo compiles a graph for each, and by default gives up after
    eight. Compiled code is found in the cache.
    """
    appended = [take.position for take in taken if take.slot is not None]
    for position, read in Counter(appended).items():
        compat.allow_recompiles(len(buckets[position].layout.slots) // read)


def with_taken(example_inputs: Sequence[Any], taken: Sequence[Taken]) -> list[Any]:
    """Example inputs for a graph and its taken parameters: shapes only, without any gather."""

    def example(bucket: Bucket, slot: int) -> Tensor:
        code = bucket.key.reading_code()
        with compat.fake_tensors_of_trace():
            if code.extension is not None:  # its subclass computes from the gathered bucket
                own = bucket.segment
                segment = torch.empty(own.shape, dtype=own.dtype, device=own.device)
                full = full_parameters(gather(segment, code), code)[slot]
            else:
                full = torch.empty(
                    code.shapes[slot], dtype=code.compute_dtype, device=bucket.device
                )
        return full.requires_grad_(code.trainable[slot])

    slots = (_slot_of(example_inputs, take) for take in taken)
    return _given(example_inputs, taken, itertools.starmap(example, slots))


def _given(args: Sequence[Any], taken: Sequence[Taken], full: Iterable[Tensor]) -> list[Any]:
    """The inputs of a graph with its taken parameters, the tensors of `full`."""
    given = list(args)
    for take, parameter in zip(taken, full, strict=True):
        if take.slot is None:
            given[take.position] = parameter
        else:
            given.append(parameter)
    return given


def _slot_of(args: Sequence[Any], take: Taken) -> tuple[Bucket, int]:
    source = args[take.position]
    return slot_of(source) if take.slot is None else (bucket_of(source), take.slot)


def giving(compiled: Callable[..., Any], taken: Sequence[Taken]) -> Callable[..., Any]:
    """Wrap `compiled`: it is given its taken parameters, and saves handles in their place."""
    if not taken:
        return compiled

    @torch.compiler.disable
    def run(*args: Any) -> Any:
        slots = [_slot_of(args, take) for take in taken]
        buckets = dict.fromkeys(bucket for bucket, _ in slots)
        note_readings(bucket.key for bucket in buckets)
        with _open(buckets):
            given = _given(args, taken, itertools.starmap(_full, slots))
            with saving_handles() or contextlib.nullcontext():
                return compiled(*given)

    return run


@contextlib.contextmanager
def _open(buckets: Collection[Bucket]) -> Iterator[None]:
    for bucket in buckets:
        bucket.gathered.enter()
    try:
        yield
    finally:
        for bucket in buckets:
            bucket.gathered.leave()


def _full(bucket: Bucket, slot: int) -> Tensor:
    """A full parameter, of a bucket that is gathered now or before."""
    bucket.gathered.views()
    assert bucket.gathered.current is not None
    return bucket.gathered.current.local_views[slot]
