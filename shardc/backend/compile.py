"""The torch.compile backend: from a captured graph to something that runs.

The stages and their passes are listed in `passes.pipeline`; between stages ranks agree on what they
read and on what they send. Forward and backward graphs are finished inside `inner_compile`, so also
where Inductor's graph cache hits; then Inductor lowers them, or the eager executor runs them.
"""

import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from shardc.backend.compile_cache import CompileCache
from shardc.backend.executor import eager_executor
from shardc.backend.frames import with_room_for_frames
from shardc.backend.graph_plan import Plan, buckets_by_input, distinct_labels, number_units
from shardc.backend.options import Options
from shardc.backend.recompiled import in_words
from shardc.backend.recomputed import note_readings
from shardc.backend.regional import buckets_of_the_runtime, giving, with_taken
from shardc.backend.repro import write_repro
from shardc.backend.stages import INDUCTOR, PASSES, Stages
from shardc.passes import pipeline
from shardc.passes.context import PassContext
from shardc.passes.contract import name_of
from shardc.passes.dump import dump_code, is_wanted
from shardc.passes.nodes import groups_in, groups_named_in
from shardc.passes.repeat.trace_once import Calls, call_once
from shardc.passes.rewrite.insert_unshard import slots_read
from shardc.passes.rewrite.take_gathered import taken_by
from shardc.passes.rewrite.verify import check_collectives, collective_sequence
from shardc.passes.runner import copy_graph, run_passes
from shardc.runtime import compat
from shardc.runtime.checks.start import check_start
from shardc.runtime.checks.telling import is_first_to_tell, warn
from shardc.runtime.layout.spec import any_spec
from shardc.runtime.unit.accumulate import flush_when_done
from shardc.runtime.unit.bucket import Bucket, bucket_of
from shardc.runtime.watch.agreement import Statement, rounds
from shardc.runtime.watch.entering import BoxedGraph, naming_failures
from shardc.runtime.watch.progress import label_of, progress

log = logging.getLogger("shardc")

Run = Callable[[GraphModule], BoxedGraph]
"""What makes a finished graph run."""


@compat.failing_in_words
def shardc_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; what `torch.compile(model, backend="shardc")` calls.

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
    """The same with options that are checked already; `run` takes the place of the executor."""
    with Stages(_is_first_of_job(), in_words(compat.recompile_reason(), gm)) as stages:
        return _compile_graph(gm, example_inputs, parsed, mode, run, stages)


def _compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    parsed: Options,
    mode: str | None,
    run: Run | None,
    stages: Stages,
) -> Callable[..., Any]:
    pipeline.check()
    compat.forget_classes(gm)
    _warn_if_nothing_is_sharded()
    buckets = buckets_by_input(gm)
    check_start(dict.fromkeys(bucket.owner for bucket in buckets.values()))
    numbers = number_units(buckets)
    labels = distinct_labels(buckets)
    names = {place: (labels[place], numbers[bucket.owner]) for place, bucket in buckets.items()}
    outside = buckets_of_the_runtime(gm, buckets)
    first = PassContext("dynamo", names, outside)
    with stages.stage(PASSES):
        gm = run_passes(gm, first, pipeline.DYNAMO_PASSES)
    slots, taken = slots_read(gm), taken_by(gm)
    replays = compat.replays(parsed.inductor, mode)
    read = {place: buckets[place] for place in slots}
    plan = Plan(parsed, read, slots, numbers, stages, replays)
    agreed = _agree_on_reads(plan)
    if not replays:
        ctx = replace(plan.context("dynamo"), number=first.number)
        with stages.stage(PASSES):
            gm = run_passes(gm, ctx, pipeline.READ_PASSES, done=len(pipeline.DYNAMO_PASSES))
    inputs = with_taken(example_inputs, taken)
    with stages.stage(PASSES):
        if parsed.fold:
            lowered = parsed.executor == "inductor"
            plan.bodies = call_once(gm, _settings(plan, mode) if lowered else None)
    if parsed.executor == "eager":
        compiled = _compile_eager(gm, inputs, plan, run or _run_eagerly)
    elif run is not None:
        compiled = _compile_inductor(gm, inputs, plan, mode, run)
    else:
        cache = CompileCache(plan, agreed.together, agreed.alone, _hints(inputs), _naming_inductor)
        wanted = _can_cache(plan)
        if not wanted:
            cache.bypassed()
        with cache.waited_for():
            compiled = _compile_inductor(gm, inputs, plan, mode, None, cache if wanted else None)
    plan.bodies = Calls()  # a graph that was loaded has not inlined them
    reads = agreed.reads
    if plan.joint is not None:
        slots_of = plan.joint.slots_of
        reads = [replace(read, slots=slots_of(read.position, read.slots)) for read in reads]
    return _noting_used_slots(giving(compiled, taken), reads)


# -- lowering ------------------------------------------------------------------------------------


def _compile_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    plan: Plan,
    mode: str | None,
    run: Run | None,
    cache: CompileCache | None = None,
) -> Callable[..., Any]:
    patches = _settings(plan, mode)
    patches[compat.JOINT_PASS] = compat.joint_pass(
        plan.finish_joint,
        repr([name_of(step) for step in pipeline.JOINT_PASSES]),
        patches.get(compat.JOINT_PASS),
    )

    if plan.uses_host:
        patches[compat.PARTITIONER] = compat.partitioner(
            plan.finish_partition, "shardc: saves on the host", patches.get(compat.PARTITIONER)
        )
    if plan.bodies:
        compat.before_joint_passes(patches, plan.bodies.inline_unfinished)
    if cache is None:
        plan.trace_bodies(gm)

    def inner_compile(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        ctx = plan.context("backward" if kwargs.get("is_backward") else "forward")
        graph = _finish_graph(graph, ctx, plan)
        if run is not None:
            return run(graph)
        replayed = groups_named_in(graph) if kwargs.get("cudagraphs") else []
        plan.calls[ctx.phase] = groups_in(graph), replayed
        try:
            with plan.stages.stage(INDUCTOR):
                compiled = _lower(graph, inputs, ctx, plan, kwargs)
        except compat.inductor_error() as error:
            where = write_repro(graph, ctx.stem, kwargs, error)
            if not plan.options.fallback:
                error.args = (f"{error}\n\n{where}", *error.args[1:])
                raise
            _warn_fallback(ctx.phase, error, where)
            return _run_eagerly(graph)
        dump_code(compiled, ctx.stem)
        return _naming_inductor(compiled, *plan.calls[ctx.phase])

    return compat.compile_fx(gm, example_inputs, inner_compile, patches, cache)


def _settings(plan: Plan, mode: str | None) -> dict[str, object]:
    """Inductor's settings for a compile, passes of shardc left out.

    Memory of accelerators is as planned with or without a budget; on CPUs reuse spares page faults.
    """
    planned = plan.options.memory_budget is not None or plan.device != "cpu"
    frugal = compat.frugal_settings() if planned else {}
    given = compat.mode_options(mode) | plan.options.inductor
    return frugal | given | compat.order_settings()


def _lower(
    graph: GraphModule,
    inputs: Sequence[Any],
    ctx: PassContext,
    plan: Plan,
    kwargs: dict[str, Any],
) -> Any:
    """Inductor on a copy of a graph, folded where it repeats and Inductor takes it so.

    What Inductor fails on is written down, and run without it, so it edits the copy.
    """
    check = functools.partial(check_collectives, collective_sequence(graph))
    if plan.options.fold and compat.takes_nested_graphs(kwargs):
        folded = run_passes(graph, ctx, pipeline.FOLD_PASSES, done=len(pipeline.GRAPH_PASSES))
        if folded is not graph:
            try:
                return compat.compile_fx_inner(folded, inputs, label_of, check, **kwargs)
            except compat.inductor_error() as error:
                where = write_repro(graph, f"{ctx.stem}_folded", kwargs, error, True)
                said = "Inductor could not compile a folded %s graph: %s (%s)"
                level = logging.WARNING if is_first_to_tell(f"folded {ctx.phase}") else logging.INFO
                log.log(level, said, ctx.phase, error, where)
    return compat.compile_fx_inner(copy_graph(graph), inputs, label_of, check, **kwargs)


def _compile_eager(
    gm: GraphModule, example_inputs: Sequence[Any], plan: Plan, run: Run
) -> Callable[..., Any]:
    def compile_phase(phase: str) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compile_one(graph: GraphModule, _: Sequence[Any]) -> Any:
            plan.bodies.inline(graph)
            return run(_finish_graph(graph, plan.context(phase), plan))

        return compile_one

    def partition(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs = compat.min_cut_partition(plan.finish_joint(graph), *args, **kwargs)
        plan.finish_partition(*graphs)
        return graphs

    plan.trace_bodies(gm)
    return compat.compile_aot(
        gm, example_inputs, compile_phase("forward"), compile_phase("backward"), partition
    )


def _run_eagerly(graph: GraphModule) -> BoxedGraph:
    run, groups = eager_executor(graph), groups_in(graph)
    return naming_failures(run, groups) if groups else run


def _naming_inductor(compiled: Any, groups: list[str], replayed: list[str]) -> Any:
    """Wrap Inductor's code of a graph: where a collective fails, it is named with the missing
    ranks."""
    if not groups:
        return compiled
    return compat.wrap_compiled(compiled, lambda call: naming_failures(call, groups, replayed))


def _can_cache(plan: Plan) -> bool:
    """Whether the graphs of a plan may come from disk: nobody looks at what single passes do.

    What calls objects of the user by a number of this process is compiled anew.
    """
    named = any(bucket.key.reading_code().names_objects for bucket in plan.buckets.values())
    return compat.can_cache() and pipeline.is_own() and not is_wanted() and not named


def _hints(inputs: Sequence[Any]) -> str:
    """The values of the sizes that are dynamic."""
    values = (compat.symbol_values(each) for each in inputs)
    return repr([sorted((str(k), v) for k, v in known.items()) for known in values])


def _finish_graph(gm: GraphModule, ctx: PassContext, plan: Plan) -> GraphModule:
    """Run the last passes over a forward or backward graph, agree on its collectives, and record
    its plan."""
    with plan.stages.stage(PASSES):
        gm = run_passes(gm, ctx, pipeline.GRAPH_PASSES)
    plan.agreements.collectives(gm, ctx.phase, groups_in(gm))
    plan.record(gm, ctx)
    return gm


# -- agreement -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """A graph's reading of one bucket: which input is its segment, and which slots it reads.

    `elsewhere` are slots that only other ranks read: their gradient is zero here, not None.
    `label` is the name of the bucket it was compiled for.
    """

    position: int
    label: str
    slots: frozenset[int]
    elsewhere: frozenset[int]


@dataclass(frozen=True)
class _AgreedReads:
    """The buckets that ranks agreed that a graph reads.

    Attributes:
        reads: what this rank reads.
        together: the group whose ranks have compared it now and so compile together; None where
            there is no such one.
        alone: whether this rank may be the only one that compiles: no group has compared anything.
    """

    reads: list[_Read]
    together: dist.ProcessGroup | None
    alone: bool


def _agree_on_reads(plan: Plan) -> _AgreedReads:
    """All ranks read the same buckets, in the same order; slots may differ and are united.

    A graph that reads the same again, but waits for gradients, say, or computes none, is another
    one: all ranks come to it together. One that reads equal buckets of equal modules is not: where
    equal blocks, or copies of a model, run one graph, a rank may compile it anew while the others
    do not. Which slots any of them reads counts for all of these.
    """
    by_group: dict[str, list[tuple[int, Bucket, frozenset[int]]]] = {}
    for position, bucket in plan.buckets.items():
        read = (position, bucket, plan.slots[position])
        by_group.setdefault(bucket.ranks.everyone, []).append(read)
    reads, together = [], set[dist.ProcessGroup]()
    for group, members in by_group.items():
        ranks = compat.resolve_group(group)
        before = rounds(ranks)
        facts = [_reading(bucket) for _, bucket, _ in members]
        note = json.dumps([sorted(slots) for *_, slots in members])
        first = min(bucket.origin for _, bucket, _ in members)
        kept_as = [_reading(bucket, bucket.origin - first) for _, bucket, _ in members]
        stated = Statement("the buckets that a graph reads", facts, note, kept_as=kept_as)
        notes = plan.agreements.agree(group, stated)
        for index, (position, _, slots) in enumerate(members):
            union = frozenset(slot for other in notes for slot in json.loads(other)[index])
            reads.append(_Read(position, plan.labels[position], slots, union - slots))
        if rounds(ranks) > before:
            together.add(ranks)
    one = next(iter(together)) if len(together) == len(by_group) == 1 else None
    return _AgreedReads(reads, one, alone=not together)


def _reading(bucket: Bucket, place: int | None = None) -> str:
    """A bucket, and how a graph reads it now. With `place`: any such bucket, by its place."""
    modes = list(bucket.key.reading_code().extras)
    if not torch.is_grad_enabled():
        modes.append("no gradients")
    text = str(bucket)
    if place is not None:
        holders = [f"{type(m).__module__}.{type(m).__qualname__}" for m in bucket.owner.modules]
        text = f"bucket +{place} of {' '.join(holders)} of {bucket.content}"
    return f"{text}, with {' and '.join(modes)}" if modes else text


# -- what runs around a compiled graph -----------------------------------------------------------


def _noting_used_slots(compiled: Callable[..., Any], reads: list[_Read]) -> Callable[..., Any]:
    """Wrap compiled code: the backward of each call tells the buckets which parameters it
    differentiates."""
    if not reads:
        return compiled

    def run(*args: Any) -> Any:
        buckets = [(bucket_of(args[read.position]), read) for read in reads]
        names = _other_names(buckets)
        progress.next_names = names
        updates = [bucket.updates() for bucket, _ in buckets]
        note_readings(read_from.key for read_from, _ in buckets)
        for read_from in dict.fromkeys(read_from for read_from, _ in buckets):
            read_from.owner.await_updates()
            read_from.gathered.renew()
            read_from.gathered.note_graph()
        outputs = compiled(*args)
        if torch.is_grad_enabled():
            nodes = {out.grad_fn for out in outputs if isinstance(out, Tensor)}
            lent = [read_from.gradients.lend() for read_from, _ in buckets]
            sync = [read_from.settings.sync for read_from, _ in buckets]
            begin = functools.partial(_begin_backward, [], names, buckets, updates, lent, sync)
            for node in nodes:
                if node is not None:
                    node.register_prehook(begin)
        return outputs

    return run


@torch.compiler.disable  # compiled autograd would trace it
def _begin_backward(
    begun: list[bool],
    names: dict[str, str],
    buckets: list[tuple[Bucket, _Read]],
    updates: list[int],
    lent: list[tuple[Tensor | None, Tensor | None]],
    sync: list[bool],
    grads: Any,
) -> None:
    """A node that gave a graph's outputs is about to be differentiated; only the first counts.

    Args:
        begun: not empty once the backward has begun.
        names, buckets, updates, lent, sync: what the graph's forward read, by how it was then.
        grads: of the node's outputs.
    """
    if begun:
        return
    begun.append(True)
    compat.when_backward_ends(begun.clear)
    flush_when_done([bucket for (bucket, _), syncs in zip(buckets, sync, strict=True) if syncs])
    progress.next_names = names
    for (bucket, read), before, taken, syncs in zip(buckets, updates, lent, sync, strict=True):
        bucket.gradients.begin_backward(taken)
        if bucket.updates() != before:  # a backward that saved the segment must fail
            torch.autograd.graph.increment_version(bucket.segment)
        bucket.gradients.note_used(read.slots, read.elsewhere, sync=syncs)


def _other_names(buckets: list[tuple[Bucket, _Read]]) -> dict[str, str]:
    """Where equal blocks run one compiled graph: the names of its buckets by those in its code."""
    if all(read.label == bucket.label for bucket, read in buckets):
        return {}
    now = distinct_labels({read.position: bucket for bucket, read in buckets})
    return {read.label: now[read.position] for _, read in buckets}


def _warn_fallback(phase: str, error: Exception, where: str) -> None:
    reason = f"{' '.join(str(error).split())[:500]} ({where})"
    log.info("Inductor could not compile a %s graph: %s", phase, reason)
    if "fallback" not in _warned and is_first_to_tell("fallback"):
        text = f"Inductor could not compile a {phase} graph; it runs op by op instead: {reason}"
        _warn_once("fallback", text)
    _warned.add("fallback")


_warned: set[str] = set()


def _warn_once(topic: str, text: str) -> None:
    if topic not in _warned:
        _warned.add(topic)
        warn(text)


def _warn_if_nothing_is_sharded() -> None:
    if not any_spec():
        _warn_once(
            "nothing sharded",
            "backend='shardc' compiles a model with nothing sharded, as Inductor would: call "
            "fully_shard on it first",
        )


def _is_first_of_job() -> bool:
    """Whether this is rank 0 of real ranks."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return world is not None and world.rank() == 0 and not compat.is_fake_group(world)
