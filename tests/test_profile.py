"""A plan beside a trace: what is matched, what is measured, and what is said where they differ."""

import gzip
import json
import statistics
import tempfile
from pathlib import Path

import pytest
import torch
from models import Stack, compiled, seeded, shard_all, tokens
from ranks import on_ranks
from test_backend import Graphs

from shardc import Report, compare_with_profile
from shardc.passes.nodes import is_collective
from shardc.reports.record import CollectiveRow, Record
from shardc.runtime.watch.progress import VERBS, Label, label_of, read_name


def _row(phase, kind, *buckets, seconds=1e-3, exposed=0.0):
    times = {"issued": 0.0, "start": 0.0, "end": seconds, "waited": 0.0, "exposed": exposed}
    return CollectiveRow(phase, kind, buckets, 2, 64, "", "", **times)


def _record(*rows):
    return Record("Stack", 2, 1, "made up", collectives=rows)


class Trace:
    """A trace as the profiler writes it, made by hand; times in microseconds."""

    def __init__(self):
        self.events, self.now = [], 0

    def add(self, name, dur, cat="user_annotation", tid=1, **args):
        event = {"ph": "X", "cat": cat, "name": name, "ts": self.now, "dur": dur, "tid": tid}
        self.events.append({**event, "args": args})
        self.now += dur

    def collective(self, name, wait, waits=1):
        self.add(f"shardc: {name}", 10)
        for _ in range(waits):
            self.add(f"shardc: wait {name}", wait)

    def holds(self):
        return {"traceEvents": self.events}


# -- a real run ------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_real_run_of_three_steps(mesh):
    model = shard_all(seeded(Stack), mesh)
    step, x = compiled(model), tokens(1)
    with Graphs() as graphs:
        step(x, x).backward()
    record = _record(
        *(
            _row(phase, label.kind, *label.buckets)
            for phase, gm in graphs.seen
            for node in gm.graph.nodes
            if is_collective(node) and (label := label_of(node)) is not None
        )
    )
    assert len(record.collectives) == 8  # three units gathered and reduced, two gathered again
    with torch.profiler.profile() as profile:
        for _ in range(3):
            step(x, x).backward()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        result = compare_with_profile(record, path)
    assert result.steps == 3 and not result.notes
    assert [(row.phase, row.name) for row in result.rows] == [
        (row.phase, Label(row.kind, row.buckets, row.phase).name.removeprefix("shardc: "))
        for row in record.collectives
    ]
    assert all(row.seconds > 0 and row.exposed > 0 for row in result.rows), result
    name = "shardc: wait gather layers.1"  # in the forward and again in the backward
    waits = sorted((e["ts"], e["dur"]) for e in events if e.get("name") == name)
    assert len(waits) == 6
    found = [row.exposed for row in result.rows if row.name == "gather layers.1"]
    for place, exposed in enumerate(found):
        expected = statistics.median(dur for _, dur in waits[place::2]) / 1e6
        assert exposed == pytest.approx(expected), (place, found, waits)
    assert result.totals()["exposed"] == pytest.approx(sum(row.exposed for row in result.rows))
    assert "8 collectives, medians of 3 steps, in ms" in str(result)


# -- made by hand ----------------------------------------------------------------------------------


def test_occurrences_are_matched_in_order_and_the_median_is_taken():
    record = _record(
        _row("forward", "all_gather", "a[0]", "a[1]", exposed=1e-3),
        _row("backward", "all_gather", "a[0]", "a[1]"),
        _row("backward", "reduce_scatter", "a[0]", "a[1]"),
    )
    trace = Trace()
    for wait in (100, 700, 300):
        trace.collective("gather a[0,1]", wait, waits=2)
        trace.collective("gather a[0,1]", 2 * wait, waits=2)
        trace.collective("reduce a[0,1]", 5)
        trace.add("shardc: offload a[0,1]", 9)  # no collective
        trace.add("gloo:all_gather", 50, tid=2)
        trace.add("gloo:all_gather", wait, tid=2)
    result = compare_with_profile(record, trace.holds())
    assert result.steps == 3 and result.notes == ()
    assert [row.exposed for row in result.rows] == pytest.approx([600e-6, 1200e-6, 5e-6])
    assert [row.seconds for row in result.rows[:2]] == pytest.approx([50e-6, 300e-6])
    assert result.rows[2].seconds is None  # gloo's events for it are not in the trace
    assert [row.name for row in result.worst] == ["gather a[0,1]", "gather a[0,1]", "reduce a[0,1]"]
    assert result.worst[0].phase == "backward"
    totals = {"planned_seconds": 2e-3, "seconds": 350e-6, "planned_exposed": 1e-3,
              "exposed": 1805e-6}  # fmt: skip
    assert result.totals() == pytest.approx(totals)
    assert json.loads(json.dumps(result.to_dict()))["worst"] == [1, 0, 2]
    assert "gather a[0,1] of the backward: +1.200 ms" in str(result)


def test_the_outermost_unit_is_the_one_the_report_calls_root():
    record = _record(_row("forward", "all_gather", "(root)[1]"), _row("forward", "all_gather", "a"))
    trace = Trace()
    trace.collective("gather Stack[1]", 7)
    trace.collective("gather a", 7)
    assert not compare_with_profile(record, trace.holds()).notes


def test_on_cuda_kernels_are_found_by_what_launched_them():
    record = _record(_row("forward", "all_gather", "a"), _row("forward", "all_gather", "b"))
    trace = Trace()
    for unit, number in (("a", 1), ("b", 2)):
        trace.add(f"shardc: gather {unit}", 30)
        trace.now -= 20
        trace.add("cudaLaunchKernelExC", 5, cat="cuda_runtime", correlation=number)
        trace.now += 15
        trace.add(f"shardc: wait gather {unit}", 3)
        trace.add(f"shardc: gather {unit}", 900, cat="gpu_user_annotation", tid=7)
    trace.add("ncclDevKernel_AllGather_RING_LL", 400, cat="kernel", tid=7, correlation=1)
    trace.add("ncclDevKernel_AllGather_RING_LL", 500, cat="kernel", tid=7, correlation=2)
    result = compare_with_profile(record, trace.holds())
    assert [row.seconds for row in result.rows] == pytest.approx([400e-6, 500e-6])
    assert [row.exposed for row in result.rows] == [None, None]  # no compute is in the trace


def _on_gpu(computed, sent, moved="ncclDevKernel_AllGather_RING_LL"):
    """What `compare_with_profile` gives for kernels at (start, end): `computed` on one stream, one
    of `sent` on another for each of units "0", "1" and so on."""
    trace = Trace()
    for number in range(len(sent)):
        trace.add(f"shardc: gather {number}", 0)
        trace.add("cudaLaunchKernelExC", 0, cat="cuda_runtime", correlation=number)
        trace.add(f"shardc: wait gather {number}", 1)
    streams = [(computed, 7, "a matmul", 100), (sent, 9, moved, 0)]
    for spans, stream, name, first in streams:
        for number, (start, end) in enumerate(spans, first):
            trace.now = start
            trace.add(name, end - start, "kernel", 0, correlation=number, stream=stream)
    rows = [_row("forward", "all_gather", str(number)) for number in range(len(sent))]
    return compare_with_profile(_record(*rows), trace.holds())


@pytest.mark.parametrize(
    "computed, sent, exposed",
    [
        ([(100, 200), (260, 300)], [(150, 250)], [50]),  # compute goes on as it ends
        ([(100, 200), (900, 950)], [(150, 250)], [0]),  # the host was late
        ([(100, 200), (200, 300)], [(150, 250)], [0]),  # compute never stands still
        ([(100, 200), (360, 400)], [(150, 250), (255, 350)], [50, 95]),  # it waits for both
        ([(100, 200), (260, 400)], [(150, 250), (255, 350)], [50, 0]),  # for the first alone
        ([(500, 600)], [(100, 495)], [395]),  # nothing to compute before
        ([(100, 200)], [(150, 250)], [0]),  # nor after
    ],
)
def test_on_cuda_a_collective_is_exposed_in_a_gap_that_ends_with_it(computed, sent, exposed):
    for moved in ("ncclDevKernel_AllGather_RING_LL", "a kernel of another backend"):
        rows = _on_gpu(computed, sent, moved).rows
        assert [row.exposed for row in rows] == pytest.approx([t * 1e-6 for t in exposed])
        assert [row.seconds for row in rows] == pytest.approx([(b - a) * 1e-6 for a, b in sent])


def test_a_host_that_is_late_is_told_from_collectives():
    waits = _on_gpu([(100, 200), (260, 300)], [(150, 250)])
    late = _on_gpu([(100, 200), (900, 1100)], [(150, 250)])
    assert not waits.notes and "still for 0.700 of 1.000 ms a step without" in late.notes[0]


def test_rows_are_waited_for_where_they_are_started():
    record = _record(_row("forward", "fetch_rows", "a"), _row("backward", "return_rows", "a"))
    trace = Trace()
    for verb, waits in (("fetch rows", 4), ("return rows", 1)):
        trace.collective(f"{verb} a", 3, waits)
        trace.add(f"shardc: save on host {verb}", 9)  # no collective
    result = compare_with_profile(record, trace.holds())
    assert not result.notes
    assert [row.exposed for row in result.rows] == pytest.approx([22e-6, 13e-6])


def test_what_does_not_match_is_said(tmp_path):
    record = _record(_row("forward", "all_gather", "a"), _row("forward", "all_gather", "b"))
    trace = Trace()
    trace.collective("gather a", 7)
    trace.collective("gather b", 7)
    trace.collective("gather b", 7)
    trace.collective("reduce c", 7)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace.holds()).encode()))
    result = compare_with_profile(record, path)
    assert result.rows[0].exposed == pytest.approx(7e-6) and result.rows[1].exposed is None
    assert result.notes == (
        "not planned: reduce c",
        "not matched: gather b is there 2 times in 1 step, planned 1 time a step",
    )
    assert result.notes[0] in str(result)


@pytest.mark.parametrize("text", ["{]", "[1]", '{"traceEvents": 5}'])
def test_a_file_that_is_no_trace_is_named(tmp_path, text):
    record, path = _record(_row("forward", "all_gather", "a")), tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.json' is not a trace of torch\.profiler"):
        compare_with_profile(record, path)
    with pytest.raises(TypeError, match="other must be a Record, got 5"):
        Report.compare(record, 5)


def test_traces_that_cannot_be_compared():
    record, trace = _record(_row("forward", "all_gather", "a")), Trace()
    trace.add("aten::mm", 7, cat="cpu_op")
    with pytest.raises(ValueError, match=r"no collectives of shardc.*(?s:.*)export_chrome_trace"):
        compare_with_profile(record, trace.holds())
    with pytest.raises(ValueError, match=r"not a trace of torch\.profiler"):
        compare_with_profile(record, {})
    trace.collective("gather b", 7)
    with pytest.raises(ValueError, match=r"another model .* it has gather b, planned are gather a"):
        compare_with_profile(record, trace.holds())


def test_names_are_read_back():
    for buckets in (("a",), ("a[0]", "a[1]", "b.c"), ("a[3]",)):
        for kind in VERBS.keys() - {"all_to_all"}:  # which reduces, as its name says
            for waits in (False, True):
                name = Label(kind, buckets, "forward", waits).name
                assert read_name(name) == (kind, buckets, waits)
    assert read_name("shardc: forward Stack") is read_name("gather a") is None
