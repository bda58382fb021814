"""Lowering: Inductor, or the eager executor, takes a Dynamo graph through AOT autograd.

AOT autograd calls back, in this order:

    _finish_joint     the joint graph, traced                       then it cuts it in two
    _finish_halves    forward and backward, together
    _finish_graph     the forward, then the backward                and then lowers each

Bodies of blocks that repeat are traced before (`CompilePlan.trace_bodies`). A graph that is loaded
from the cache goes through none of this: `CompileCache` takes over the decisions kept with it.
Inductor's own cache is asked after `_finish_graph`, so no pass is ever skipped on one rank alone.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.fx import GraphModule

from shardc.backend.compile_cache import CompileCache, around
from shardc.backend.executor import eager_executor
from shardc.backend.graph_plan import Call, CompilePlan, joint_listeners
from shardc.backend.recorded import recorded
from shardc.backend.repro import write_repro
from shardc.backend.stages import INDUCTOR, PASSES
from shardc.passes import pipeline
from shardc.passes.budget.choose import choose_kept
from shardc.passes.budget.read_first import choose_read_first
from shardc.passes.context import PassContext
from shardc.passes.contract import name_of
from shardc.passes.dump import dump_code
from shardc.passes.nodes import groups_in, groups_named_in
from shardc.passes.rewrite.cut_tail import cut_tail
from shardc.passes.rewrite.used_slots import differentiated
from shardc.passes.rewrite.verify import check_collectives, collective_sequence
from shardc.passes.runner import copy_graph, run_on_halves, run_passes
from shardc.runtime import compat
from shardc.runtime.checks.telling import is_first_to_tell, warn_once
from shardc.runtime.watch.entering import BoxedGraph, naming_failures
from shardc.runtime.watch.progress import label_of

log = logging.getLogger("shardc")

Run = Callable[[GraphModule], BoxedGraph]
"""Makes a finished graph callable."""


def lower(
    gm: GraphModule,
    inputs: Sequence[Any],
    plan: CompilePlan,
    mode: str | None,
    run: Run | None = None,
    cache: CompileCache | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph; `run`, if given, makes its forward and backward callable.

    With a `cache`, AOT autograd looks for the graph there first.
    """
    if plan.options.executor == "eager":
        return _with_executor(gm, inputs, plan, run or run_eagerly)
    return _with_inductor(gm, inputs, plan, mode, run, cache)


def _with_executor(
    gm: GraphModule, inputs: Sequence[Any], plan: CompilePlan, run: Run
) -> Callable[..., Any]:
    def compile_one(phase: str, graph: GraphModule, _: Sequence[Any]) -> Any:
        plan.bodies.inline(graph)
        finished = _finish_graph(plan, graph, phase)[0]
        return recorded(finished, run(finished))

    def partition(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs = compat.min_cut_partition(_finish_joint(plan, graph), *args, **kwargs)
        _finish_halves(plan, *graphs)
        return graphs

    forward, backward = (partial(compile_one, phase) for phase in ("forward", "backward"))
    return compat.compile_aot(gm, inputs, forward, backward, partition)


def _with_inductor(
    gm: GraphModule,
    inputs: Sequence[Any],
    plan: CompilePlan,
    mode: str | None,
    run: Run | None,
    cache: CompileCache | None,
) -> Callable[..., Any]:
    patches = settings_of_plan(plan, mode)
    patches[compat.JOINT_PASS] = compat.joint_pass(
        partial(_finish_joint, plan),
        repr([name_of(step) for step in pipeline.JOINT_PASSES]),
        patches.get(compat.JOINT_PASS),
    )
    if plan.edits_halves or pipeline.HALVES_PASSES != pipeline.CHOSEN_PASSES:
        patches[compat.PARTITIONER] = compat.partitioner(
            partial(_finish_halves, plan),
            repr([name_of(step) for step in pipeline.HALVES_PASSES]),
            patches.get(compat.PARTITIONER),
        )
    if plan.bodies:
        compat.before_joint_passes(patches, plan.bodies.inline_unfinished)

    def inner_compile(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = "backward" if kwargs.get("is_backward") else "forward"
        graph, ctx = _finish_graph(plan, graph, phase)
        if run is not None:
            return run(graph)
        replays, head, tail = kwargs.get("cudagraphs"), graph, None
        if phase == "backward" and not replays:
            head, tail = cut_tail(graph)
        replayed = groups_named_in(graph) if replays else []
        call = plan.calls[ctx.phase] = Call(groups_in(graph), replayed, tail)
        try:
            with plan.stages.stage(INDUCTOR):
                compiled = _compile(head, inputs, ctx, plan, kwargs)
        except compat.inductor_error() as error:
            where = write_repro(head, ctx.stem, kwargs, error)
            if not plan.options.fallback:
                error.args = (f"{error}\n\n{where}", *error.args[1:])
                raise
            _warn_fallback(ctx.phase, error, where)
            return run_eagerly(graph)
        dump_code(compiled, ctx.stem)
        return around(call, compiled)

    return compat.compile_fx(gm, inputs, inner_compile, patches, cache)


# -- the graphs that AOT autograd makes ----------------------------------------------------------


def _finish_joint(plan: CompilePlan, gm: GraphModule) -> GraphModule:
    """Choose a step within the memory budget, and run the passes over the joint graph."""
    with plan.stages.stage(PASSES):
        plan.bodies.inline(gm)
        plan.joint = differentiated(gm)
        ctx = plan.context("joint")
        for look in joint_listeners:
            look(gm, ctx, plan)
        plan.kept = choose_kept(gm, ctx)
        return run_passes(gm, replace(ctx, kept=plan.kept), pipeline.JOINT_PASSES)


def _finish_halves(plan: CompilePlan, forward: GraphModule, backward: GraphModule) -> None:
    """Run the passes over forward and backward together, right after the cut."""
    with plan.stages.stage(PASSES):
        if plan.options.keep_read_first:
            plan.kept = choose_read_first(forward, backward, plan.context("joint"))
        run_on_halves(forward, backward, plan.context("joint"), pipeline.HALVES_PASSES)
        for half in (forward, backward):
            half.recompile()


def _finish_graph(
    plan: CompilePlan, gm: GraphModule, phase: str
) -> tuple[GraphModule, PassContext]:
    """Run the last passes over a forward or backward graph, agree on its collectives, and record
    its plan."""
    ctx = plan.context(phase)
    with plan.stages.stage(PASSES):
        gm = run_passes(gm, ctx, pipeline.GRAPH_PASSES)
    plan.agreements.collectives(gm, ctx.phase, groups_in(gm))
    plan.record(gm, ctx)
    return gm, ctx


# -- lower a graph -------------------------------------------------------------------------------


def settings_of_plan(plan: CompilePlan, mode: str | None) -> dict[str, object]:
    """Inductor's settings for a compile, without the passes of shardc.

    Frugal settings keep memory as planned: on accelerators always, on CPUs only with a budget. On
    CPUs without a budget, Inductor reuses buffers, which spares page faults.
    """
    planned = plan.options.memory_budget is not None or plan.device != "cpu"
    frugal = compat.frugal_settings() if planned else {}
    given = compat.mode_options(mode) | plan.options.inductor
    return frugal | given | compat.order_settings()


def _compile(
    graph: GraphModule,
    inputs: Sequence[Any],
    ctx: PassContext,
    plan: CompilePlan,
    kwargs: dict[str, Any],
) -> Any:
    """Compile a copy of a graph by Inductor, folded where the graph repeats and Inductor allows it.

    Inductor edits the copy. A graph on which Inductor fails is written down and runs without it.
    """
    check = partial(check_collectives, collective_sequence(graph))
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


def run_eagerly(graph: GraphModule, others: Sequence[str] = ()) -> BoxedGraph:
    """Run a finished graph by the eager executor; errors of collectives name missing ranks.

    `others` are groups of collectives that the graph waits for, or calls compiled code for.
    """
    groups = list(dict.fromkeys([*groups_in(graph), *others]))
    return naming_failures(eager_executor(graph), groups)


def _warn_fallback(phase: str, error: Exception, where: str) -> None:
    reason = f"{' '.join(str(error).split())[:500]} ({where})"
    log.info("Inductor could not compile a %s graph: %s", phase, reason)
    text = f"Inductor could not compile a {phase} graph; it runs op by op instead: {reason}"
    warn_once("fallback", text, by_one_rank=True)
