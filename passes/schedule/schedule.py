"""Forward and backward graphs: start gathers early, wait late, keep everything else in order.

Copies to and from the host move in the same way.

    before:  ... ag0 wait0 block0 ag1 wait1 block1 ... grad1 pack1 rs1 wait_rs1 ...
    after:   ag0 ag1 wait0 block0 wait1 block1 ... grad1 pack1 rs1 ... wait_rs1

The compute keeps the order in which it was traced, so results are bitwise those of the unscheduled
graph. `read_events` sees the graph as a line of events, `plan_timeline` decides, and one priority
toposort puts the decision into the graph. Inductor then keeps that order, as long as its own
memory-driven reordering is off.
"""

from torch.fx import GraphModule

from shardc.passes.context import PassContext
from shardc.passes.contract import contract
from shardc.passes.schedule.events import read_events, read_problem
from shardc.passes.schedule.reorder import reorder
from shardc.passes.schedule.timeline import plan_timeline


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
    order = [*events.positions, len(events.steps)]
    keys = {step: (index, _STEP, index) for index, step in enumerate(events.steps)}
    gathers = zip(events.gathers, timeline.starts, strict=True)
    loads = zip(events.loads, timeline.load_starts, strict=True)
    for number, (gather, start) in enumerate((*gathers, *loads)):
        for node in (*gather.before, gather.start):
            keys[node] = (order[start], _GATHER, number)
        for node in gather.after:
            keys[node] = (gather.step, _READ, number)
    reduces = zip(events.reduces, problem.reduces, timeline.waits, strict=True)
    saves = zip(events.saves, problem.saves, timeline.save_waits, strict=True)
    for number, (reduce, in_numbers, wait) in enumerate((*reduces, *saves)):
        for node in (*reduce.before, reduce.start):
            keys[node] = (order[in_numbers.ready], _REDUCE, number)
        for node in reduce.after:
            keys[node] = (order[wait], _WAIT_REDUCE, number)
    starts = timeline.return_starts or (0,) * len(events.states)
    for number, (state, start) in enumerate(zip(events.states, starts, strict=True), len(keys)):
        keys[state.start] = (order[start], _GATHER, number)
    for state, wait in zip(events.states, timeline.leave_waits, strict=False):
        for node in state.after:
            keys[node] = (order[wait], _READ, 0)
    reorder(gm, keys)
    return gm


_GATHER, _WAIT_REDUCE, _REDUCE, _READ, _STEP = range(5)
"""What comes first at the same place: the wire is given work before anything waits or computes."""
