"""The pipeline: the passes of each stage, in order. `run_passes` runs them.

The lists below have the passes of each stage; the first line of a pass's docstring says its effect.
The files of `shardc/backend/` call four steps that are in no list. Before AOT autograd,
`trace_once` makes calls of bodies, which lie beside the graph. Two steps decide and edit nothing:
before `JOINT_PASSES`, `choose_kept`, which runs the stages that follow on copies, to try its
choices; before `HALVES_PASSES`, `choose_read_first`. Before Inductor, `cut_tail` makes two graphs
of a backward. A stage is read off its graph: `TAKEN` and `SLOTS` of the inputs of a Dynamo graph,
`differentiated` of a joint graph.
"""

from collections.abc import Sequence

from shardc.passes.contract import AnyPass, PairPass, Pass, check_order
from shardc.passes.repeat.fold_repeats import fold_repeats
from shardc.passes.repeat.store_smaller import store_smaller
from shardc.passes.rewrite.copy_overwritten import copy_overwritten
from shardc.passes.rewrite.fetch_rows import fetch_rows
from shardc.passes.rewrite.gather_what_is_read import gather_what_is_read
from shardc.passes.rewrite.give_gathered import give_gathered
from shardc.passes.rewrite.insert_unshard import insert_unshard
from shardc.passes.rewrite.keep_gathered import keep_gathered
from shardc.passes.rewrite.label import label_collectives
from shardc.passes.rewrite.offload import offload_saved
from shardc.passes.rewrite.offload_state import offload_state
from shardc.passes.rewrite.recompute import tag_recomputed
from shardc.passes.rewrite.reduce_once import reduce_once
from shardc.passes.rewrite.reshard import drop_second_gathers, tag_reshard
from shardc.passes.rewrite.take_gathered import take_gathered
from shardc.passes.rewrite.used_slots import mark_segments
from shardc.passes.rewrite.verify import verify
from shardc.passes.rewrite.wait_once import wait_once
from shardc.passes.rewrite.write_gradients import write_gradients
from shardc.passes.schedule.coalesce import coalesce
from shardc.passes.schedule.end_sooner import end_sooner
from shardc.passes.schedule.schedule import schedule
from shardc.passes.schedule.update_when_reduced import update_when_reduced

DYNAMO_PASSES: list[Pass] = [take_gathered, insert_unshard]
READ_PASSES: list[Pass] = [fetch_rows, give_gathered]
JOINT_PASSES: list[Pass] = [
    reduce_once,
    copy_overwritten,
    mark_segments,
    tag_reshard,
    tag_recomputed,
]
CHOSEN_PASSES: list[PairPass] = [keep_gathered, offload_saved, offload_state]
"""Passes over both halves that do nothing unless an option or a memory budget may use them."""
HALVES_PASSES: list[PairPass] = [*CHOSEN_PASSES]
GRAPH_PASSES: list[Pass] = [
    wait_once,
    drop_second_gathers,
    gather_what_is_read,
    end_sooner,
    coalesce,
    schedule,
    write_gradients,
    store_smaller,
    label_collectives,
    verify,
]
FOLD_PASSES: list[Pass] = [fold_repeats]
STEP_PASSES: list[Pass] = [update_when_reduced]
"""Passes over the graph of a whole step, which `compile_step` records."""


def stages() -> tuple[Sequence[AnyPass], ...]:
    """The lists of passes, in the order in which a compile runs them."""
    return (
        DYNAMO_PASSES, READ_PASSES, JOINT_PASSES, HALVES_PASSES, GRAPH_PASSES, FOLD_PASSES,
        STEP_PASSES,
    )  # fmt: skip


def check() -> None:
    """Raise ValueError where a pass stands before another that gives a fact it needs."""
    check_order(stages())


def is_own() -> bool:
    """Whether all passes are shardc's own: shardc's version then covers them."""
    steps = (step for passes in stages() for step in passes)
    return all(str(getattr(step, "__module__", "")).startswith("shardc.") for step in steps)
