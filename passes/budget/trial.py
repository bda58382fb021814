"""Joint graph: cut and scheduled on a copy, to see what a choice would hold and how long it takes.

Ranks agree on nothing meanwhile: a trial is this rank's own. It may go by what they agreed on.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.fx import GraphModule, Node

from shardc.passes import pipeline
from shardc.passes.context import Facts, Kept, PassContext, Recall
from shardc.passes.estimate.cost import collective_seconds, evaluate, symbol_hints, tensor_bytes
from shardc.passes.estimate.hardware import matmul_bytes
from shardc.passes.estimate.memory import Liveness, Storages, measure_liveness
from shardc.passes.nodes import is_all_gather, is_view, moved_by, reach, waits_for
from shardc.passes.repeat.fold_repeats import calls_of
from shardc.passes.runner import copy_graph, run_on_halves, run_passes
from shardc.passes.schedule.events import Events, read_events, read_problem
from shardc.passes.schedule.timeline import Problem, plan_timeline, simulate
from shardc.runtime import compat
from shardc.runtime.layout.spec import Moved


@dataclass(frozen=True)
class Phase:
    """A forward or a backward as it would be.

    Attributes:
        gm: its graph, scheduled.
        ctx: the context of its passes.
        saved: the storages of the forward whose backward it is.
    """

    gm: GraphModule
    ctx: PassContext
    saved: Storages | None = None

    @cached_property
    def liveness(self) -> Liveness:
        """The memory that the graph holds after each node."""
        return self.liveness_for(symbol_hints(self.gm))

    @cached_property
    def events(self) -> Events:
        """Its collectives, and the compute between them."""
        return read_events(self.gm)

    @cached_property
    def problem(self) -> Problem:
        """The same in numbers."""
        return read_problem(self.gm, self.ctx, self.events)

    @cached_property
    def seconds(self) -> float:
        """How long it takes, by the cost model."""
        return simulate(self.problem, plan_timeline(self.problem))

    def liveness_for(self, sizes: Mapping[Any, int]) -> Liveness:
        """The memory that the graph would hold with these values of its symbols."""
        options, owns = self.ctx.options, self.ctx.phase == "backward"
        assert options is not None
        return measure_liveness(
            self.gm,
            owns_inputs=owns,
            fused=options.fused,
            in_order=options.in_order,
            clones=owns and options.clones,
            hints=sizes,
            saved=self.saved,
            calls=self.calls,
            workspace=matmul_bytes(options.profile),
        )

    @cached_property
    def calls(self) -> dict[str, int]:
        """The call of a folded body that each node comes to lie in, by its name."""
        return calls_of(self.gm, self.ctx)

    @cached_property
    def places(self) -> dict[Node, int]:
        """The place of every node among those that `liveness` counts after."""
        nodes = self.gm.graph.nodes
        counted = [node for node in nodes if node.op in ("placeholder", "call_function")]
        return {node: place for place, node in enumerate(counted)}


@dataclass(frozen=True)
class Trial:
    """Forward and backward as they would be with `kept`."""

    kept: Kept
    forward: Phase
    backward: Phase

    @property
    def peak(self) -> int:
        """The most that either holds."""
        return max(self.forward.liveness.peak, self.backward.liveness.peak)

    @property
    def seconds(self) -> float:
        """How long both take."""
        return self.forward.seconds + self.backward.seconds


def run_trial(gm: GraphModule, ctx: PassContext, kept: Kept, recall: Recall | None = None) -> Trial:
    """Partition and schedule a copy of `gm`.

    Raises:
        NotAgreed: with `recall`, which the trial is planned by: ranks have not agreed on what it
            sends.
    """
    assert ctx.options is not None
    joint = replace(ctx, kept=kept, number=None, agree_on_seconds=None, agree_on_choice=None)
    tagged = run_passes(copy_graph(gm), joint, pipeline.JOINT_PASSES)
    graphs = compat.min_cut_partition(tagged, None, num_fwd_outputs=ctx.results)
    run_on_halves(*graphs, joint, pipeline.HALVES_PASSES)
    phases: list[Phase] = []
    for graph, phase in zip(graphs, ("forward", "backward"), strict=True):
        each = replace(joint, phase=phase)
        if recall is not None:
            each = replace(each, agree_on_seconds=_recalling(recall, phase))
        run_passes(graph, each, pipeline.GRAPH_PASSES)
        if recall is not None:
            recall.collectives(graph, phase)
        saved = phases[0].liveness.storages if phases else None
        phases.append(Phase(graph, each, saved))
    return Trial(kept, *phases)


def _recalling(recall: Recall, phase: str) -> Callable[[Facts, list[float]], list[float]]:
    return lambda facts, _: recall.seconds(phase, facts)


@dataclass(frozen=True)
class Gathered:
    """A bucket of an open unit that may stay gathered: what that costs and saves.

    Attributes:
        position: of its input.
        nbytes: held longer if it stays.
        seconds: of the gather in the backward.
        forward, backward: the first and last place at which it is held longer.
    """

    position: int
    nbytes: int
    seconds: float
    forward: tuple[int, int]
    backward: tuple[int, int]


def gathered_again(trial: Trial) -> list[Gathered]:
    """The buckets of open units that the backward gathers again.

    First those whose gather takes longest per byte, of equal ones those used last in the forward,
    because they are held for the shortest time.
    """
    ctx = trial.forward.ctx
    assert ctx.options is not None
    hints = symbol_hints(trial.forward.gm)
    again = {moved: start for moved, start, _, _ in _gathered(trial.backward)}
    end = len(trial.forward.liveness.live)
    found = []
    for moved, _, wait, last in _gathered(trial.forward):
        if moved in again:
            nbytes = int(evaluate(tensor_bytes(wait.meta["val"]), hints))
            seconds = collective_seconds(nbytes, moved.spec.world_size, ctx.options.profile)
            held = ((last + 1, end), (0, again[moved] - 1))
            found.append(Gathered(moved.position, nbytes, seconds, *held))
    return sorted(found, key=lambda b: (-b.seconds / max(b.nbytes, 1), -b.forward[0]))


def _gathered(phase: Phase) -> Iterable[tuple[Moved, int, Node, int]]:
    """Every gathered bucket of an open unit: where its gather starts, its wait, its last reader."""
    for transfer in phase.events.of("gather"):
        if not is_all_gather(transfer.start):
            continue  # rows of a table
        waits = waits_for(transfer.start)
        for moved, wait in zip(moved_by(transfer.start), waits, strict=True):
            if moved.position in phase.ctx.open_positions:
                views = reach(lambda n: [u for u in n.users if is_view(u)], wait)
                places = phase.places
                readers = [places[u] for view in views for u in view.users if u in places]
                yield moved, places[transfer.start], wait, max(readers, default=0)
