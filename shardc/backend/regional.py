"""Graphs that are pieces of a model that runs eagerly: the runtime gathers for them.

A block compiled by itself, and what a graph break leaves, read buckets that the eager runtime
gathers, ahead and once for all pieces, and whose gradients it reduces. Such a graph is given the
full parameters (`take_gathered`); a graph that holds several units whole gathers for itself.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardc.backend.recomputed import note_readings
from shardc.passes.rewrite.take_gathered import Taken, markers_of
from shardc.runtime import compat
from shardc.runtime.comm.unshard import full_parameters, gather
from shardc.runtime.unit.bucket import Bucket, bucket_of
from shardc.runtime.unit.eager import is_inside_other_unit
from shardc.runtime.unit.regather import saving_handles


def buckets_of_the_runtime(gm: GraphModule, buckets: Mapping[int, Bucket]) -> frozenset[int]:
    """The inputs of a Dynamo graph that are segments of `buckets` which the runtime gathers.

    Several graphs read these, or the forward has read them, or more graphs will read them, because
    this one ends at a break, or the graph is one unit of a model that runs eagerly around it. All
    that follows from the program alone: equal on all ranks, in whichever step they compile.
    """
    segments = {marker.args[0] for marker in markers_of(gm)}
    inputs = gm.graph.find_nodes(op="placeholder")
    read = {p: bucket for p, bucket in buckets.items() if inputs[p] in segments}
    units = {bucket.owner for bucket in read.values()}
    is_one_unit = len(units) == 1 and is_inside_other_unit(*units)
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


def with_taken(example_inputs: Sequence[Any], taken: Sequence[Taken]) -> list[Any]:
    """Example inputs for a graph with what it takes: shapes only, nothing is gathered."""
    examples = list(example_inputs)
    for take in taken:
        bucket: Bucket = bucket_of(example_inputs[take.position])
        code = bucket.key.reading_code()
        with compat.fake_tensors_of_trace():
            if code.extension is not None:  # what its subclass makes of what is gathered
                own = bucket.segment
                segment = torch.empty(own.shape, dtype=own.dtype, device=own.device)
                example = full_parameters(gather(segment, code), code)[take.slot]
            else:
                example = torch.empty(
                    code.shapes[take.slot], dtype=code.compute_dtype, device=bucket.device
                )
        examples.append(example.requires_grad_(code.trainable[take.slot]))
    return examples


def giving(compiled: Callable[..., Any], taken: Sequence[Taken]) -> Callable[..., Any]:
    """`compiled`, given the parameters that it takes; what it saves of them are handles."""
    if not taken:
        return compiled

    @torch.compiler.disable
    def run(*args: Any) -> Any:
        note_readings(dict.fromkeys(bucket_of(args[take.position]).key for take in taken))
        with _open(args, taken) as full, saving_handles() or contextlib.nullcontext():
            return compiled(*args, *full)

    return run


@contextlib.contextmanager
def _open(args: Sequence[Any], taken: Sequence[Taken]) -> Any:
    buckets = dict.fromkeys(bucket_of(args[take.position]) for take in taken)
    for bucket in buckets:
        bucket.gathered.enter()
    try:
        full: list[Tensor] = []
        for take in taken:
            gathered = bucket_of(args[take.position]).gathered
            gathered.views()
            assert gathered.current is not None
            full.append(gathered.current.local_views[take.slot])
        yield full
    finally:
        for bucket in buckets:
            bucket.gathered.leave()
