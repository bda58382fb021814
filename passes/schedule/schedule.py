"""Forward and backward graphs: start gathers early, wait late, keep everything else in order.

Copies to and from the host move in the same way.

    before:  ... ag0 wait0 block0 ag1 wait1 block1 ... grad1 pack1 rs1 wait_rs1 ...
    after:   ag0 ag1 wait0 block0 wait1 block1 ... grad1 pack1 rs1 ... wait_rs1

The compute keeps its order, so results are bitwise those of the unscheduled graph. Inductor then
keeps the order, as long as its own memory-driven reordering is off.
"""

from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.schedule.events import read_events, read_problem
from shardc.passes.schedule.reorder import reorder
from shardc.passes.schedule.timeline import Kind, plan_timeline


@contract(needs="one_wait movable", gives="scheduled")
def schedule(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Reorder `gm` so that collectives run behind compute."""
    if ctx.options is None:
        return gm
    events = read_events(gm)
    if not events.transfers:
        return gm
    problem = read_problem(gm, ctx, events)
    timeline = plan_timeline(problem)
    order = [*events.positions, len(events.steps) + 1]  # the last sends come before
    keys = {step: (index, _STEP, index) for index, step in enumerate(events.steps)}
    planned = zip(events.transfers, timeline.starts, timeline.waits, strict=True)
    for number, (moving, start, wait) in enumerate(planned):
        first, last = _PRIORITIES[moving.kind]
        for node in (*moving.before, moving.start):
            keys[node] = (order[start], first, number)
        for node in moving.after:
            keys[node] = (order[wait], last, number)
    reorder(gm, keys)
    return gm


_START, _WAIT_SENT, _SEND, _WAIT_LEFT, _READ, _STEP = range(6)
"""The order of nodes at one place: wires are given work before anything waits or computes."""

_PRIORITIES: dict[Kind, tuple[int, int]] = {
    "gather": (_START, _READ),
    "load": (_START, _READ),
    "return": (_START, _READ),
    "leave": (_START, _WAIT_LEFT),
    "reduce": (_SEND, _WAIT_SENT),
    "save": (_SEND, _WAIT_SENT),
}
"""The place in that order of the start and of the wait of each kind."""
