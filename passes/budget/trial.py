"""Joint graph: a copy is cut and scheduled, to measure the memory and the time of a choice.

Ranks agree on nothing meanwhile: a trial is this rank's own. It may follow agreements of before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch.fx import GraphModule, Node

from shardc.passes import pipeline
from shardc.passes.context import Kept, PassContext, Recall
from shardc.passes.estimate.cost import symbol_hints
from shardc.passes.estimate.hardware import matmul_bytes
from shardc.passes.estimate.memory import Liveness, Saved, Storages, measure_liveness
from shardc.passes.repeat.fold_repeats import calls_of
from shardc.passes.runner import copy_graph, run_on_halves, run_passes
from shardc.passes.schedule.events import Events, read_events, read_problem
from shardc.passes.schedule.timeline import Problem, plan_timeline, simulate
from shardc.runtime import compat


@dataclass(frozen=True)
class Item:
    """Memory during a part of a step, for time: an entry of a list that a choice takes from.

    Attributes:
        nbytes: freed; of a bucket that stays gathered, held.
        first, end: from which place on, and before which. The places of the backward follow those
            of the forward.
        seconds: added to the compute, or to the link in each direction; of a bucket that stays
            gathered, taken off the wire.
    """

    nbytes: int
    first: int
    end: int
    seconds: float


@dataclass(frozen=True)
class Phase:
    """A forward or a backward as it would be.

    Attributes:
        gm: its graph, scheduled.
        ctx: the context of its passes.
        saved: of a backward, the storages that its forward saves.
        gathered: of a backward, the gathered buckets that its forward saves.
    """

    gm: GraphModule
    ctx: PassContext
    saved: Storages | None = None
    gathered: Saved | None = None

    @cached_property
    def liveness(self) -> Liveness:
        """The memory that the graph holds after each node."""
        return self.liveness_for(symbol_hints(self.gm))

    @cached_property
    def events(self) -> Events:
        """The transfers of the graph, and the compute between them."""
        return read_events(self.gm)

    @cached_property
    def problem(self) -> Problem:
        """The same in numbers."""
        return read_problem(self.gm, self.ctx, self.events)

    @cached_property
    def seconds(self) -> float:
        """The seconds that the graph takes, by the cost model."""
        return simulate(self.problem, plan_timeline(self.problem))

    def liveness_for(self, sizes: Mapping[Any, int]) -> Liveness:
        """The memory that the graph would hold with these values of its symbols."""
        options = self.ctx.planned
        return measure_liveness(
            self.gm,
            owns_inputs=self.ctx.phase == "backward",
            fused=options.fused,
            in_order=options.in_order,
            clones=options.clones,
            gathered=self.gathered,
            held=dict(self.ctx.held.values()),
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

    @cached_property
    def step_places(self) -> list[int]:
        """The place of each step of `events`, and the place behind all nodes."""
        return [*(self.places[step] for step in self.events.steps), len(self.places)]


@dataclass(frozen=True)
class Trial:
    """Forward and backward as they would be with `kept`."""

    kept: Kept
    forward: Phase
    backward: Phase

    @property
    def peak(self) -> int:
        """The most bytes that either holds."""
        return max(self.forward.liveness.peak, self.backward.liveness.peak)

    @property
    def seconds(self) -> float:
        """The seconds that both take."""
        return self.forward.seconds + self.backward.seconds

    @property
    def border(self) -> int:
        """The place at which the backward begins, where its places follow those of the forward."""
        return len(self.forward.liveness.live)


def run_trial(gm: GraphModule, ctx: PassContext, kept: Kept, recall: Recall | None = None) -> Trial:
    """Partition and schedule a copy of `gm`.

    Args:
        recall: agreements that the trial follows.

    Raises:
        NotAgreed: ranks have not agreed on the collectives of the trial (with `recall` only).
    """
    joint = replace(ctx, kept=kept, number=None, agree_on_seconds=None, agree_on_choice=None)
    tagged = run_passes(copy_graph(gm), joint, pipeline.JOINT_PASSES)
    graphs = compat.min_cut_partition(tagged, None, num_fwd_outputs=ctx.results)
    run_on_halves(*graphs, joint, pipeline.HALVES_PASSES)
    phases: list[Phase] = []
    for graph, phase in zip(graphs, ("forward", "backward"), strict=True):
        each = replace(joint, phase=phase)
        if recall is not None:
            each = replace(each, agree_on_seconds=partial(recall.seconds, phase))
        run_passes(graph, each, pipeline.GRAPH_PASSES)
        if recall is not None:
            recall.collectives(graph, phase)
        saved = phases[0].liveness.storages if phases else None
        phases.append(Phase(graph, each, saved))
    return Trial(kept, *phases)
