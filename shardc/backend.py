"""The torch.compile backend: from a captured graph to something that runs, in one visible list.

    Dynamo graph      insert_unshard            markers become one gather a bucket
    joint graph       find_used_slots           parameters without gradient keep None
                      choose_kept               what stays gathered, within a memory budget
                      tag_reshard               gathered weights are recomputed or saved
    forward, backward bucket                    neighbours in one message where it costs nothing
                      schedule                  collectives behind compute
                      write_gradients           matmuls write into the reduction's input
                      verify, agree             invariants; one sequence on all ranks
    lowering          Inductor | eager executor

The last two rows run inside `inner_compile`, so they also run where Inductor's graph cache hits.
"""

import difflib
import functools
import json
import logging
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardc.passes.bucket import bucket
from shardc.passes.budget import choose_kept
from shardc.passes.context import (
    UNITS_IN_FLIGHT,
    Budget,
    PassContext,
    ScheduleOptions,
    is_collective,
    is_wait,
    kind_of,
    spec_of_node,
)
from shardc.passes.insert_unshard import insert_unshard
from shardc.passes.memory import Liveness, measure_liveness, segment_inputs
from shardc.passes.profiles import Profile, as_profile, budget_bytes, current_profile
from shardc.passes.reshard import tag_reshard
from shardc.passes.runner import run_passes
from shardc.passes.schedule import schedule
from shardc.passes.used_slots import find_used_slots
from shardc.passes.verify import collective_sequence, verify
from shardc.passes.write_gradients import write_gradients
from shardc.runtime import compat
from shardc.runtime.agreement import agree
from shardc.runtime.bucket import Bucket
from shardc.runtime.collectives import naming_failures
from shardc.runtime.executor import eager_executor

log = logging.getLogger("shardc")

DYNAMO_PASSES = [insert_unshard]
JOINT_PASSES = [find_used_slots, choose_kept, tag_reshard]
GRAPH_PASSES = [bucket, schedule, write_gradients, verify]


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., backend="shardc", options={...})` takes.

    Attributes:
        executor: "inductor", or "eager" to run the same graphs op by op.
        fallback: run a graph that Inductor cannot compile in the eager executor, with a warning.
        inductor: settings of `torch._inductor.config` for this compile.
        schedule: False leaves collectives where they are used.
        profile: the hardware to plan for, by name or as a `Profile`; default: what `calibrate` or
            `set_profile` set, else the device's.
        prefetch: "auto", or how many units ahead gathers start (0: none).
        backward_prefetch: FSDP1's, for the backward: "auto", "pre", "post" or None.
        memory_budget: bytes a step may use on this device, segments, gradients and optimizer state
            included: a count, a text such as "70GB" or "16GiB", or a fraction of the device's
            memory. Units whose `reshard_after_forward` is None stay gathered where there is room.
        optimizer_states: copies of the parameters that the optimizer keeps (2: Adam).
        agreement_timeout: seconds ranks wait for each other when they compare their sequences of
            collectives; default: the process group's timeout.
    """

    executor: str = "inductor"
    fallback: bool = True
    inductor: dict[str, Any] = field(default_factory=dict)
    schedule: bool = True
    profile: Profile | str | None = None
    prefetch: int | str = "auto"
    backward_prefetch: str | None = "auto"
    memory_budget: int | float | str | None = None
    optimizer_states: float = 2.0
    agreement_timeout: float | None = None

    @staticmethod
    def parse(given: dict[str, Any] | None) -> "Options":
        """Check a user's dict. Raises ValueError naming the option and what it may be."""
        given = given or {}
        known = [f.name for f in fields(Options)]
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise ValueError(
                    f"unknown shardc option '{name}'{hint} (known: {', '.join(known)})"
                )
        options = Options(**given)
        if options.executor not in ("inductor", "eager"):
            raise ValueError(f"executor must be 'inductor' or 'eager', got {options.executor!r}")
        if options.prefetch != "auto" and not (
            isinstance(options.prefetch, int) and options.prefetch >= 0
        ):
            raise ValueError(
                f"prefetch must be 'auto' or a count of units, got {options.prefetch!r}"
            )
        if options.backward_prefetch not in ("auto", "pre", "post", None):
            raise ValueError(
                "backward_prefetch must be 'auto', 'pre', 'post' or None, "
                f"got {options.backward_prefetch!r}"
            )
        profile = as_profile(options.profile) if options.profile is not None else None
        if options.memory_budget is not None:
            if not options.schedule:
                raise ValueError("memory_budget needs schedule=True")
            budget_bytes(options.memory_budget, profile or current_profile("cpu"))
        return options


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
    parsed = Options.parse(options)
    ctx = PassContext(phase="dynamo")
    gm = run_passes(gm, ctx, DYNAMO_PASSES)
    _warn_if_nothing_is_sharded()
    used = _agree_on_reads(gm, ctx, parsed)
    lower = _compile_eager if parsed.executor == "eager" else _compile_inductor
    plan = _Plan(parsed, _buckets(gm, ctx))
    joint = plan.joint
    compiled = lower(gm, example_inputs, plan, mode)
    if len(joint.differentiated) == len(gm.graph.find_nodes(op="placeholder")):
        used = [replace(r, slots=joint.differentiated[r.position]) for r in used]
    return _noting_used_slots(compiled, used)


class _Plan:
    """What the graphs of one Dynamo graph share: options, bucket by input, the joint context."""

    def __init__(self, options: Options, buckets: dict[int, Bucket]) -> None:
        self.options = options
        self.buckets = buckets
        self.joint = self.context("joint")

    def context(self, phase: str) -> PassContext:
        """The context of the passes over a graph of that phase."""
        if not self.buckets:
            return PassContext(phase)
        first = next(iter(self.buckets.values()))
        budget = self._budget(first.segment.device.type)
        if not self.options.schedule:
            return PassContext(phase)
        return PassContext(
            phase,
            budget=budget,
            open_positions=frozenset(
                position
                for position, bucket in self.buckets.items()
                if bucket.owner is not None and bucket.owner.reshard_after_forward is None
            ),
            kept=frozenset() if phase == "joint" else self.joint.kept,
            units_in_flight=UNITS_IN_FLIGHT if phase == "joint" else self.joint.units_in_flight,
            agree_on_count=functools.partial(_agree_on_count, first.group, self.options),
            options=self._schedule_options(first.segment.device.type),
            units={position: bucket.unit for position, bucket in self.buckets.items()},
            agree_on_seconds=functools.partial(_agree_on_seconds, first.group, self.options, phase),
        )

    @property
    def static_bytes(self) -> int:
        """Bytes of segments and the optimizer's states; gradients are what the backward gives."""
        states = 1 + self.options.optimizer_states
        return sum(
            int(bucket.segment.nbytes * (states if any(bucket.trainable) else 1))
            for bucket in self.buckets.values()
        )

    def _budget(self, device_type: str) -> Budget | None:
        options = self.options
        if options.memory_budget is None:
            return None
        profile = current_profile(device_type) if options.profile is None else options.profile
        return Budget(
            nbytes=budget_bytes(options.memory_budget, as_profile(profile)),
            static=self.static_bytes,
            fused=options.executor == "inductor",
        )

    def _schedule_options(self, device_type: str) -> ScheduleOptions:
        options = self.options
        profile = current_profile(device_type) if options.profile is None else options.profile
        units = {bucket.unit: bucket.owner for bucket in self.buckets.values() if bucket.owner}
        buffers = [unit.reduce_buffers for unit in units.values() if unit.reduce_buffers]
        backward = options.backward_prefetch
        return ScheduleOptions(
            profile=as_profile(profile),
            prefetch=None if isinstance(options.prefetch, str) else options.prefetch,
            backward_prefetch=None if backward == "auto" else backward or "none",
            forward_hints={
                n: tuple(t.number for t in u.forward_prefetch) for n, u in units.items()
            },
            backward_hints={
                n: tuple(t.number for t in u.backward_prefetch) for n, u in units.items()
            },
            reduce_buffers=min(buffers, default=None),
        )


def _buckets(gm: GraphModule, ctx: PassContext) -> dict[int, Bucket]:
    """The bucket of every input that is a segment."""
    placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {
        position: compat.real_input(node).shardc_bucket  # type: ignore[union-attr]
        for position, node in placeholders
        if node.name in ctx.used
    }


# -- lowering ------------------------------------------------------------------------------------


def _compile_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    plan: _Plan,
    mode: str | None,
) -> Callable[..., Any]:
    patches = compat.mode_options(mode)
    patches |= {
        # Inductor's own memory-driven order would undo any schedule of collectives.
        "reorder_for_peak_memory": False,
        **compat.keeping_collectives_in_order(),
        "joint_custom_post_pass": compat.joint_pass(
            lambda graph: run_passes(graph, plan.joint, JOINT_PASSES),
            repr([step.__name__ for step in JOINT_PASSES]),
        ),
        **plan.options.inductor,
    }

    def inner_compile(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        phase = "backward" if kwargs.get("is_backward") else "forward"
        graph = _finish_graph(graph, phase, plan)
        try:
            compiled = compat.compile_fx_inner(graph, inputs, **kwargs)
        except compat.InductorError as error:
            if not plan.options.fallback:
                raise
            _warn_fallback(phase, error)
            return _naming(graph)(eager_executor(graph, inputs))
        return compat.wrap_compiled(compiled, _naming(graph))

    return compat.compile_fx(gm, example_inputs, inner_compile, patches)


def _compile_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    plan: _Plan,
    mode: str | None,
) -> Callable[..., Any]:
    def compile_phase(phase: str) -> Callable[[GraphModule, Sequence[Any]], Any]:
        def compile_graph(graph: GraphModule, inputs: Sequence[Any]) -> Any:
            graph = _finish_graph(graph, phase, plan)
            return _naming(graph)(eager_executor(graph, inputs))

        return compile_graph

    def partition(graph: GraphModule, *args: Any, **kwargs: Any) -> Any:
        return compat.min_cut_partition(
            run_passes(graph, plan.joint, JOINT_PASSES), *args, **kwargs
        )

    return compat.compile_aot(
        gm, example_inputs, compile_phase("forward"), compile_phase("backward"), partition
    )


def _naming(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have what runs `gm` say what a lost peer means."""
    groups = _groups(gm)
    return lambda call: naming_failures(call, groups[0]) if groups else call


def _finish_graph(gm: GraphModule, phase: str, plan: _Plan) -> GraphModule:
    """What every forward and backward graph goes through before it is lowered."""
    ctx = plan.context(phase)
    gm = run_passes(gm, ctx, GRAPH_PASSES)
    _agree_on_collectives(gm, phase, plan.options)
    liveness = measure_liveness(
        gm,
        owns_inputs=phase == "backward",
        fused=plan.options.executor == "inductor",
        ignored=segment_inputs(gm, ctx.units),
    )
    order = [kind_of(node) for node in gm.graph.nodes if is_collective(node) or is_wait(node)]
    graph_plans.append(
        GraphPlan(phase, plan.static_bytes, liveness, collective_sequence(gm), order)
    )
    return gm


@dataclass(frozen=True)
class GraphPlan:
    """What was decided for one graph.

    Attributes:
        phase: "forward" or "backward".
        static: bytes of segments and optimizer state.
        liveness: what the graph itself holds after each node.
        collectives: its collectives, in order.
        order: the kinds of its collectives and waits, in order.
    """

    phase: str
    static: int
    liveness: Liveness
    collectives: list[str]
    order: list[str]

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of the graph, everything counted."""
        return self.static + self.liveness.peak


graph_plans: deque[GraphPlan] = deque(maxlen=64)
"""The plans of the graphs compiled last in this process, newest last."""


# -- agreement -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """A graph's reading of one bucket: which input is its segment, and which slots it reads.

    `elsewhere` are slots that only other ranks read: their gradient is zero here, not None.
    """

    position: int
    slots: frozenset[int]
    elsewhere: frozenset[int]


def _agree_on_reads(gm: GraphModule, ctx: PassContext, options: Options) -> list[_Read]:
    """All ranks read the same buckets, in the same order; slots may differ and are united."""
    inputs = [(i, node) for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))]
    by_group: dict[str, list[tuple[int, Bucket, frozenset[int]]]] = {}
    for position, node in inputs:
        if node.name in ctx.used:
            bucket: Bucket = compat.real_input(node).shardc_bucket  # type: ignore[union-attr]
            read = (position, bucket, ctx.used[node.name])
            by_group.setdefault(bucket.group, []).append(read)
    reads = []
    for group, members in by_group.items():
        facts = [str(bucket) for _, bucket, _ in members]
        note = json.dumps([sorted(slots) for _, _, slots in members])
        notes = _agree(group, "the buckets that a graph reads", facts, options, note)
        for index, (position, _, slots) in enumerate(members):
            union = frozenset(slot for other in notes for slot in json.loads(other)[index])
            reads.append(_Read(position, slots, union - slots))
    return reads


def _agree_on_collectives(gm: GraphModule, phase: str, options: Options) -> None:
    for group in _groups(gm):
        _agree(group, f"the collectives of a {phase} graph", collective_sequence(gm), options)


def _agree_on_seconds(
    group: str, options: Options, phase: str, facts: list[str], seconds: list[float]
) -> list[float]:
    """The compute times that all ranks plan with: the slowest rank's, from the first compile on."""
    what = f"the collectives of a {phase} graph, before they are scheduled"
    notes = _agree(group, what, facts, options, json.dumps(seconds), first_note_stands=True)
    return [max(times) for times in zip(*map(json.loads, notes), strict=True)]


def _agree_on_count(group: str, options: Options, facts: list[str], count: int) -> int:
    """The smallest count of any rank, from the first compile on."""
    what = "the buckets that may stay gathered"
    notes = _agree(group, what, facts, options, str(count), first_note_stands=True)
    return min(int(note) for note in notes)


def _groups(gm: GraphModule) -> list[str]:
    """The process groups over which `gm` communicates."""
    specs = [spec_of_node(node) for node in gm.graph.nodes if is_collective(node)]
    return list(dict.fromkeys(spec.group for spec in specs if spec is not None))


def _agree(
    group: str,
    what: str,
    facts: list[str],
    options: Options,
    note: str = "",
    first_note_stands: bool = False,
) -> frozenset[str]:
    seconds = options.agreement_timeout
    timeout = None if seconds is None else timedelta(seconds=seconds)
    return agree(compat.resolve_group(group), what, facts, timeout, note, first_note_stands)


# -- what runs around a compiled graph -----------------------------------------------------------


def _noting_used_slots(compiled: Callable[..., Any], reads: list[_Read]) -> Callable[..., Any]:
    """Have the backward of each call tell the buckets which parameters it differentiates."""
    if not reads:
        return compiled

    def run(*args: Any) -> Any:
        buckets = [(args[read.position].shardc_bucket, read) for read in reads]
        updates = [bucket.updates() for bucket, _ in buckets]
        outputs = compiled(*args)
        if torch.is_grad_enabled():
            nodes = {out.grad_fn for out in outputs if isinstance(out, Tensor)}

            def note(grads: Any) -> None:
                for (bucket, read), before in zip(buckets, updates, strict=True):
                    if bucket.updates() != before:  # a backward that saved the segment must fail
                        torch.autograd.graph.increment_version(bucket.segment)
                    bucket.note_used(read.slots, read.elsewhere)

            for node in nodes:
                if node is not None:
                    node.register_prehook(note)
        return outputs

    return run


def _warn_fallback(phase: str, error: Exception) -> None:
    reason = " ".join(str(error).split())[:500]
    log.warning("Inductor could not compile a %s graph: %s", phase, reason)
    if _FALLBACK not in _warned:
        _warned.add(_FALLBACK)
        warnings.warn(
            f"Inductor could not compile a {phase} graph; it runs op by op instead: {reason}",
            stacklevel=2,
        )


_FALLBACK, _NOTHING_SHARDED = "fallback", "nothing sharded"
_warned: set[str] = set()


def _warn_if_nothing_is_sharded() -> None:
    if not Bucket.made and _NOTHING_SHARDED not in _warned:
        _warned.add(_NOTHING_SHARDED)
        warnings.warn(
            "backend='shardc' compiles a model with nothing sharded, as Inductor would: call "
            "fully_shard on it first",
            stacklevel=2,
        )
