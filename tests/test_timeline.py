"""The plan for collectives as a pure function, over random problems."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.passes.context import ScheduleOptions
from shardc.passes.estimate.hardware import PROFILES
from shardc.passes.schedule.coalesce import plan_groups
from shardc.passes.schedule.timeline import Problem, Transfer, plan_timeline, simulate

TIMES = st.floats(0.0, 3.0)
gather, reduce = functools.partial(Transfer, "gather"), functools.partial(Transfer, "reduce")


def limits(gathered, reduced, buffers=None):
    return {"gather": gathered, "reduce": reduced}, buffers


@st.composite
def problems(draw):
    seconds = tuple(draw(st.lists(TIMES, min_size=1, max_size=12)))
    events = st.integers(0, len(seconds) - 1)
    needed = sorted(draw(st.lists(events, max_size=10)))
    ready = sorted(draw(st.lists(st.integers(0, len(seconds)), max_size=10)))
    sizes, then = st.integers(1, 50), TIMES if draw(st.booleans()) else st.just(0.0)
    return Problem(
        seconds,
        (
            *(gather(event, draw(sizes), draw(TIMES), then=draw(then)) for event in needed),
            *(reduce(e, draw(sizes), draw(TIMES), inside=draw(st.booleans())) for e in ready),
        ),
        *limits(draw(st.integers(0, 120)), draw(st.integers(0, 120)), draw(st.none() | st.just(2))),
    )


@given(problems())
@settings(max_examples=300, deadline=None)
def test_limits_hold_at_every_event(problem):
    timeline = plan_timeline(problem)
    planned = list(zip(problem.transfers, timeline.starts, timeline.waits, strict=True))
    gathers = [each for each in planned if each[0].kind == "gather"]
    starts = [start for _, start, _ in gathers]
    assert starts == sorted(starts)
    for event in range(len(problem.seconds) + 1):
        unread = [gather for gather, start, wait in gathers if start <= event <= wait]
        together = {gather.event for gather in unread}
        assert sum(g.nbytes for g in unread) <= problem.in_flight["gather"] or len(together) == 1
        under_way = [
            transfer
            for transfer, start, wait in planned
            if transfer.kind == "reduce" and start <= event < wait
        ]
        held = sum(r.nbytes for r in under_way)
        assert held <= problem.in_flight["reduce"] or len(under_way) <= 1
        assert problem.reduce_buffers is None or len(under_way) <= max(problem.reduce_buffers, 1)
    for transfer, start, wait in planned:
        assert 0 <= start <= wait <= len(problem.seconds)
        assert transfer.event == (wait if transfer.brings else start)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_a_plan_is_never_slower_than_no_plan_nor_faster_than_the_floor(problem):
    timeline = plan_timeline(problem)
    where_used = replace(timeline, starts=tuple(each.event for each in problem.transfers))
    floor = max(sum(problem.seconds), problem.wire_seconds)
    assert floor - 1e-9 <= simulate(problem, timeline)
    if not problem.of("reduce"):  # a gather sent early may let a reduction wait
        assert simulate(problem, timeline) <= simulate(problem, where_used) + 1e-9


def test_gathers_start_in_time_and_not_earlier():
    gathers = tuple(gather(event, 10, 1.0) for event in range(8))
    problem = Problem((4.0,) * 8, gathers, *limits(1000, 1000))
    timeline = plan_timeline(problem)
    assert timeline.starts == (0, 0, 1, 2, 3, 4, 5, 6)
    assert simulate(problem, timeline) == 1 + 8 * 4  # only the first is exposed


def test_a_gather_starts_before_what_would_be_ahead_of_it_on_the_wire():
    first, second = gather(5, 10, 1.0), reduce(3, 10, 2.0)
    alone = Problem((2.0,) * 6, (first,), *limits(100, 100))
    assert plan_timeline(alone).starts == (4,)
    assert plan_timeline(replace(alone, transfers=(first, second))).starts == (2, 3)


def test_what_goes_inside_of_nodes_has_wires_of_its_own():
    gathers = tuple(gather(event, 10, 1.0, then=1.0) for event in range(8))
    problem = Problem((4.0,) * 8, gathers, *limits(1000, 1000))
    assert plan_timeline(problem).starts == (0, 0, 1, 2, 3, 4, 5, 6)
    assert simulate(problem, plan_timeline(problem)) == 2 + 8 * 4
    behind = replace(problem, seconds=(0.0,) * 8)  # the wire does all of it
    assert simulate(behind, plan_timeline(behind)) == 8 + 1
    first, inside = gather(5, 10, 1.0, then=1.0), reduce(3, 10, 2.0, inside=True)
    problem = Problem((2.0,) * 6, (first, inside), *limits(100, 100))
    assert plan_timeline(problem).starts == (3, 3), "a reduction inside is not ahead of it"
    both = replace(problem, transfers=(first, replace(inside, inside=False)))
    assert plan_timeline(both).starts == (1, 3)


def test_a_slow_wire_is_never_idle():
    gathers = tuple(gather(event, 10, 3.0) for event in range(8))
    problem = Problem((1.0,) * 8, gathers, *limits(20, 20))
    assert simulate(problem, plan_timeline(problem)) == 8 * 3 + 1


def test_reductions_are_waited_for_when_their_buffers_would_exceed_the_limit():
    reduces = tuple(reduce(event, 10, 1.0) for event in range(1, 5))
    problem = Problem((1.0,) * 4, reduces, *limits(0, 20))
    assert plan_timeline(problem).waits == (3, 4, 4, 4)
    one = Problem((1.0,) * 4, reduces, *limits(0, 100, 1))
    assert plan_timeline(one).waits == (2, 3, 4, 4)


@pytest.mark.parametrize(
    "options, phase, wanted",
    [
        ({}, "forward", [None] * 4),
        ({"prefetch": 0}, "forward", [0, 0, 2, 4]),
        ({"prefetch": 1}, "forward", [0, 0, 0, 2]),
        ({"prefetch": 9}, "backward", [0, 0, 0, 0]),
        ({"backward_prefetch": "pre"}, "backward", [0, 0, 0, 2]),
        ({"backward_prefetch": "post"}, "backward", [0, 0, 2, 4]),
        ({"backward_prefetch": "none"}, "backward", [0, 1, 2, 4]),
        ({"backward_prefetch": "pre"}, "forward", [None] * 4),
        ({"forward_hints": {7: (9,)}}, "forward", [None, None, None, 0]),
        ({"forward_hints": {7: (9,)}}, "backward", [None] * 4),
        ({"backward_hints": {9: (7,)}}, "backward", [0, 1, None, None]),
        ({"forward_hints": {5: (9,)}}, "forward", [None] * 4),
    ],
)
def test_hints(options, phase, wanted):
    gathers = [(7, 0), (7, 1), (8, 2), (9, 4)]
    assert ScheduleOptions(PROFILES["cpu"], **options).wanted(phase, gathers) == wanted


def test_a_gather_starts_where_a_hint_asks_for_it():
    for wanted, start in ((None, 4), (1, 1), (5, 5)):
        problem = Problem((2.0,) * 6, (gather(5, 10, 1.0, wanted),), *limits(100, 100))
        assert plan_timeline(problem).starts == (start,)


def test_what_delays_nothing_is_sent_together():
    gathers = tuple(gather(event, 1, 0.3, fixed=0.2) for event in range(12))
    problem = Problem((1.0,) * 12, gathers, *limits(100, 100))
    groups = plan_groups(problem, ["same"] * 12)
    assert groups[0] == [0]  # the first is not delayed
    assert sum(map(len, groups)) == 12 and len(groups) < 12
    unlike = plan_groups(problem, [str(index) for index in range(12)])
    assert unlike == [[index] for index in range(12)]


def test_what_is_sent_together_pays_its_latency_once():
    for fixed, together in ((1.5, [[0, 1]]), (0.0, [[0], [1]])):
        gathers = tuple(gather(event, 1, 2.0, fixed=fixed) for event in range(2))
        problem = Problem((0.1, 5.0), gathers, *limits(100, 100))
        groups = plan_groups(problem, ["same"] * 2)
        assert groups == together


def test_what_is_sent_together_is_at_most_half_of_what_may_be_under_way():
    gathers = tuple(gather(event, 10, 0.3, fixed=0.2) for event in range(12))
    for limit, most in ((1000, 8), (60, 3)):
        problem = Problem((1.0,) * 12, gathers, *limits(limit, limit))
        groups = plan_groups(problem, ["same"] * 12)
        assert max(map(len, groups)) == most


def test_copies_of_values_and_states_share_a_wire_in_each_direction():
    copies = (
        Transfer("load", 4, 10, 1.0),
        Transfer("save", 1, 10, 1.0),
        Transfer("save", 2, 10, 1.0),
        Transfer("leave", 0, 0, 1.0),
        Transfer("return", 6, 0, 3.0),
    )
    problem = Problem((2.0,) * 6, copies, {"load": 10, "save": 10})
    timeline = plan_timeline(problem)
    assert timeline.starts == (2, 1, 2, 0, 3), "the load makes room on its wire for the state"
    assert timeline.waits == (4, 2, 6, 1, 6), "the state that leaves is waited for when it is there"
    assert simulate(problem, timeline) == 12
    assert problem.wire_seconds == 4
