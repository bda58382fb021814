"""The torch.compile backend: from a captured graph to code that runs.

`compile_graph` is the compile, stage by stage; `passes.pipeline` lists the passes of each stage.
`lowering` runs the passes over the graphs that AOT autograd makes, and folds blocks that repeat.
Between stages, ranks agree on the buckets that they read and on the collectives that they send;
inside `choose_kept` and `schedule` they agree on choices and times.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from shardc.backend.compile_cache import cache_of
from shardc.backend.frames import with_room_for_frames
from shardc.backend.graph_plan import (
    CompilePlan,
    buckets_by_input,
    distinct_labels,
    held_by_input,
    number_units,
)
from shardc.backend.lowering import Run, lower, settings_of_plan
from shardc.backend.options import Options
from shardc.backend.reads import agree_on_reads, telling_buckets
from shardc.backend.recompiled import why_again
from shardc.backend.regional import (
    buckets_of_the_runtime,
    expect_equal_pieces,
    giving,
    with_taken,
)
from shardc.backend.stages import PASSES, Stages
from shardc.passes import pipeline
from shardc.passes.context import PassContext
from shardc.passes.repeat.trace_once import Calls, call_once
from shardc.passes.rewrite.give_gathered import given_by
from shardc.passes.rewrite.insert_unshard import slots_read
from shardc.passes.rewrite.take_gathered import taken_by
from shardc.passes.runner import run_passes
from shardc.runtime import compat
from shardc.runtime.checks.meta import check_start
from shardc.runtime.checks.telling import warn_once
from shardc.runtime.layout.spec import any_spec


@compat.failing_in_words
def shardc_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; `torch.compile(model, backend="shardc")` calls it.

    Raises:
        ValueError: an unknown option.
        RuntimeError: ranks disagree on the collectives, or the forward updates a parameter.
    """
    return compile_graph(gm, example_inputs, Options.parse(options), mode)


shardc_backend.check_options = Options.parse  # type: ignore[attr-defined]


@with_room_for_frames
def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    parsed: Options,
    mode: str | None = None,
    run: Run | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with checked options; `run` takes the place of the executor."""
    with Stages(_is_first_of_job(), why_again(compat.recompile_reason(), gm)) as stages:
        pipeline.check()
        compat.forget_classes(gm)
        _warn_if_nothing_is_sharded()

        # The Dynamo graph: one gather a bucket, or full parameters as inputs.
        buckets = buckets_by_input(gm)
        check_start(dict.fromkeys(bucket.owner for bucket in buckets.values()))
        numbers, labels = number_units(buckets), distinct_labels(buckets)
        held = held_by_input(gm, labels)
        named = {at: (labels[at], numbers[bucket.owner]) for at, bucket in buckets.items()}
        first = PassContext("dynamo", named, buckets_of_the_runtime(gm, buckets))
        with stages.stage(PASSES):
            gm = run_passes(gm, first, pipeline.DYNAMO_PASSES)
        slots, taken = slots_read(gm), taken_by(gm)
        expect_equal_pieces(buckets, taken)

        # Ranks agree on the buckets that the graph reads; it may fetch rows in place of tables.
        replays = compat.replays(parsed.inductor, mode)
        read_here = {at: buckets[at] for at in slots}
        plan = CompilePlan(parsed, read_here, slots, numbers, stages, replays, held)
        reads, together, alone = agree_on_reads(plan)
        with stages.stage(PASSES):
            if not replays:
                ctx = replace(plan.context("dynamo"), number=first.number)
                done = len(pipeline.DYNAMO_PASSES)
                gm = run_passes(gm, ctx, pipeline.READ_PASSES, done)

            given = given_by(gm)

            # Blocks that repeat become calls, which AOT autograd traces once.
            if parsed.fold:
                lowered = parsed.executor == "inductor"
                plan.bodies = call_once(gm, settings_of_plan(plan, mode) if lowered else None)

        # AOT autograd makes the joint graph, and a forward and a backward, which are lowered.
        inputs = with_taken(example_inputs, taken)
        with cache_of(plan, run is None, together, alone, _hints(inputs)) as cache:
            if cache is None:
                plan.trace_bodies(gm)  # else the cache traces them, if it has no such graph
            compiled = lower(gm, inputs, plan, mode, run, cache)
        plan.bodies = Calls()  # a loaded graph has not inlined the bodies

        # Each call reads the buckets, and its backward tells them the slots that it differentiates.
        # The joint graph, this one or that of a loaded graph, knows these slots.
        if plan.joint is not None:
            slots_of = plan.joint.slots_of
            reads = [replace(read, slots=slots_of(read.position, read.slots)) for read in reads]
        return telling_buckets(giving(compiled, taken), reads, given)


def _hints(inputs: Sequence[Any]) -> str:
    """The values of the dynamic sizes of inputs."""
    values = (compat.symbol_values(each) for each in inputs)
    return repr([sorted((str(k), v) for k, v in known.items()) for known in values])


def _warn_if_nothing_is_sharded() -> None:
    if not any_spec():
        warn_once(
            "nothing sharded",
            "backend='shardc' compiles a model with nothing sharded, as Inductor would: call "
            "fully_shard on it first",
        )


def _is_first_of_job() -> bool:
    """Whether this is rank 0 of real ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return world is not None and world.rank() == 0 and not compat.is_fake_group(world)
