"""A record as a trace and as a page: the format's rules, hostile names, what a browser shows."""

import itertools
import json
import re
from collections import defaultdict
from dataclasses import replace

import pytest
from browser import answer_of
from records import training_step

from shardc.reports.pictures.html import page, save_html
from shardc.reports.pictures.lanes import lanes_of, op_indices, stalls
from shardc.reports.pictures.perfetto import save_trace, trace_events
from shardc.reports.record import KINDS, CurveRow, Finding, Op, Record
from shardc.runtime.checks.words import format_bytes

STEP = training_step()
EMPTY = Record(model="Linear", world_size=1, copies=1, profile="cpu")
ALONE = replace(EMPTY, ops=(Op("forward", "mm", "", 0.0, 0.5),))
HOSTILE = (
    "<img src=x onerror=ran=1>",
    "</script><script>ran=1</script>",
    "<!--<script>",
    "{{page.css}}",
    "a\u2028b\"'`${ran=1}\\",
    "&lt;b&gt;",
)
"""Names that would leave a text or an element, or change, if they were not kept as they are."""


def _hostile():
    """The step with a hostile name wherever there is one."""
    names = itertools.cycle(HOSTILE)
    rows = (
        replace(row, buckets=(next(names),), before=next(names), needed_by=next(names))
        for row in STEP.collectives
    )
    return replace(
        STEP,
        model=HOSTILE[0],
        profile=HOSTILE[1],
        settings=dict(zip(HOSTILE, HOSTILE, strict=True)),
        buckets=tuple(replace(row, name=next(names), unit=next(names)) for row in STEP.buckets),
        collectives=tuple(rows),
        ops=tuple(replace(op, name=next(names), module=next(names)) for op in STEP.ops),
        memory=tuple(replace(point, where=next(names)) for point in STEP.memory),
        findings=tuple(Finding(name, name, name) for name in HOSTILE),
        curve=tuple(CurveRow(name, 1, 1.0, 1, 1, 1, name) for name in HOSTILE),
    )


# -- lanes ---------------------------------------------------------------------------------------


def test_spans_share_a_lane_unless_they_overlap():
    assert lanes_of([(0, 1), (1 - 1e-10, 2), (0.5, 1.5), (2, 3)]) == [0, 0, 1, 0]
    assert lanes_of([(2, 3), (0, 1)]) == [0, 0] and lanes_of([]) == []


def test_a_collective_is_for_the_first_op_after_its_wait():
    for row, index in zip(STEP.collectives, op_indices(STEP), strict=True):
        op = STEP.ops[index]
        assert f"{op.name} {op.module}" == row.needed_by
    late = replace(STEP.collectives[0], waited=9.0)
    assert op_indices(replace(STEP, collectives=(late,))) == [None]


# -- the trace -----------------------------------------------------------------------------------


def _events(record, ph):
    return [event for event in trace_events(record)["traceEvents"] if event["ph"] == ph]


def _lane_names(record):
    named = [event for event in _events(record, "M") if event["name"] == "thread_name"]
    return {event["tid"]: event["args"]["name"] for event in named}


def _slices(record):
    lanes, names = defaultdict(list), _lane_names(record)
    for event in _events(record, "X"):
        lanes[names[event["tid"]]].append(event)
    return dict(lanes)


@pytest.mark.parametrize("record", [STEP, EMPTY, ALONE, _hostile()])
def test_every_event_has_what_its_phase_requires(record, tmp_path):
    path = tmp_path / "trace.json"
    save_trace(record, path)
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    required = {"X": "ts dur tid cat args", "M": "args", "C": "ts args", "s": "id ts tid cat",
                "f": "id ts tid cat bp"}  # fmt: skip
    for event in trace["traceEvents"]:
        assert set(f"ph pid name {required[event['ph']]}".split()) <= set(event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    assert set(_lane_names(record).values()) == {"compute", "communication"}


@pytest.mark.parametrize("record", [STEP, training_step(40, 3)])
def test_slices_are_in_microseconds_and_those_of_a_lane_do_not_overlap(record):
    lanes = _slices(record)
    for slices in lanes.values():
        for event, following in itertools.pairwise(slices):
            assert event["ts"] + event["dur"] <= following["ts"] + 1e-6
    compute = lanes["compute"]
    assert len(compute) == len(record.ops) + len(stalls(record))
    assert len(lanes["communication"]) == len(record.collectives)
    busy = sum(event["dur"] for event in compute if event["cat"] != "stall")
    assert busy == pytest.approx(1e6 * record.compute_seconds, rel=1e-3)
    waiting = sum(event["dur"] for event in compute if event["cat"] == "stall")
    assert waiting == pytest.approx(1e6 * record.exposed_seconds, rel=1e-3)


def test_transfers_at_the_same_time_are_on_lanes_of_their_own():
    second = replace(STEP.collectives[1], start=0.0)  # while the first is on the wire
    record = replace(STEP, collectives=(STEP.collectives[0], second))
    lanes = {name: len(slices) for name, slices in _slices(record).items()}
    assert (lanes["communication"], lanes["communication 2"]) == (1, 1)


def test_a_collective_says_what_it_moves_and_leads_to_the_op_that_needs_it():
    row = STEP.collectives[6]
    event = _slices(STEP)["communication"][6]
    assert event["name"] == "all_gather layers.5" and event["cat"] == "all_gather"
    assert event["args"] == {
        "phase": "forward", "buckets": ["layers.5"], "bytes": row.nbytes, "ranks": 8,
        "issued_us": 35360.0, "waited_us": 41990.0, "hidden_us": 6630.0, "exposed_us": 4770.0,
        "before": "rms_norm layers.4.norm1", "needed_by": "rms_norm layers.5.norm1",
    }  # fmt: skip
    starts, ends = _events(STEP, "s"), _events(STEP, "f")
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == list(range(1, 27))
    by_place = {(e["tid"], e["ts"]): e["name"] for e in _events(STEP, "X")}
    assert by_place[starts[6]["tid"], starts[6]["ts"]] == "all_gather layers.5"
    assert by_place[ends[6]["tid"], ends[6]["ts"]] == "rms_norm layers.5.norm1"


def test_memory_is_a_series_a_kind():
    counters = [event for event in _events(STEP, "C") if event["name"] == "memory"]
    assert len(counters) == len(STEP.memory)
    assert all(tuple(event["args"]) == KINDS for event in counters)
    most = max(counters, key=lambda event: sum(event["args"].values()))
    assert most["ts"] == pytest.approx(1e6 * STEP.peak.seconds, abs=1e-3)
    assert most["args"] == STEP.summary()["peak_parts"]


def test_a_figure_that_is_not_finite_is_refused(tmp_path):
    broken = replace(ALONE, ops=(Op("forward", "mm", "", 0.0, float("nan")),))
    for save in (save_trace, save_html):
        with pytest.raises(ValueError):
            save(broken, tmp_path / "file")


# -- the page, as text ---------------------------------------------------------------------------


def _embedded(text):
    return re.search(r'<script type="application/json" id="record">(.*?)</script>', text)[1]


def test_names_stay_inside_the_embedded_json():
    text, plain = page(_hostile()), page(STEP)
    for tag in ("script", "style", "img"):
        assert text.count(f"<{tag}") == plain.count(f"<{tag}")
    embedded = _embedded(text)
    assert not set("<>&\u2028") & set(embedded) and embedded.isascii()
    assert json.loads(embedded)["model"] == HOSTILE[0]


def test_the_page_asks_for_nothing_else(tmp_path):
    save_html(STEP, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == page(STEP) and "{{" not in text.replace(_embedded(text), "")
    assert not re.search(r"https?:|//\w|\bsrc=|\bhref=|url\(|@import|fetch\(|import ", text)
    assert "default-src 'none'" in text


# -- the page, in a browser ----------------------------------------------------------------------

FIGURES = """
const texts = (query) => [...document.querySelectorAll(query)].map((found) => found.textContent);
const rows = (id) => texts(`#${id} tbody tr`).length;
const canvas = byId("timeline");
const middle = (row) => row.top + row.height / 2;
const [width] = [canvas.clientWidth - NAMES_WIDTH - EDGE];
const x = (seconds) => NAMES_WIDTH + ((seconds - timeline.axis.start) / timeline.axis.span) * width;
const at = (type, Kind, seconds, row, more) => {
  const box = canvas.getBoundingClientRect();
  const place = { clientX: box.left + x(seconds), clientY: box.top + middle(row) };
  canvas.dispatchEvent(new Kind(type, { ...place, bubbles: true, cancelable: true, ...more }));
};
const span = () => [timeline.axis.start, timeline.axis.end];
"""


def _ask(record, script, folder):
    return answer_of(page(record), FIGURES + script, folder)


def test_the_page_shows_the_record(tmp_path):
    shown = _ask(STEP, """
        timeline.draw();
        const pixel = (seconds, row) => {
          const data = canvas.getContext("2d").getImageData(x(seconds), middle(row), 1, 1).data;
          return "#" + [...data].slice(0, 3).map((c) => c.toString(16).padStart(2, "0")).join("");
        };
        const { compute, communication, memory } = timeline.rows;
        return {
          title: document.title, heading: texts("h1")[0], setup: texts("#setup")[0],
          verdict: texts("#verdict")[0], figures: texts("#figures .value"), what: texts(".what"),
          peak: texts(".peak li"), rows: [rows("collectives"), rows("buckets")],
          sizes: [0, 1, 1023, 1024, 1536, 1e6, 1e9, 5e12].map(formatBytes),
          times: [0, 1e-17, 2.5e-7, 0.00123456, 12.3456].map(formatSeconds),
          shares: [[0, 0], [1, 300], [1, 3], [999, 1000], [1, 1]].map((a) => formatShare(...a)),
          phases: record.phases.map((phase) => phase.name),
          units: record.units.slice(0, 3).map((unit) => unit.name),
          colours: [pixel(0.14, compute) === timeline.colour("backward"),
            pixel(record.collectives[3].start + 0.001, communication) === timeline.colour("gather"),
            pixel(0.08, memory) === timeline.colour("forward")],
        };
    """, tmp_path)  # fmt: skip
    sizes = [format_bytes(size) for size in (0, 1, 1023, 1024, 1536, 10**6, 10**9, 5 * 10**12)]
    assert shown == {
        "title": "Transformer, 8 ranks: shardc",
        "heading": "Transformer",
        "setup": "8 ranks · times for h100-nvlink · 199.6 ms a step",
        "verdict": "A step takes 199.6 ms. 79% of the communication is hidden behind compute; "
        "the rest makes the step 30.27 ms longer (15%).",
        "figures": ["199.6 ms", "169.4 ms", "140.9 ms", "30.27 ms", "5.545 GiB"],
        "what": [STEP.findings[0].what],
        "peak": ["segments512 MiB", "optimizer1 GiB", "gradients737.3 MiB", "activations2.905 GiB",
                 "gathered430.1 MiB", "workspaces0 B"],
        "rows": [26, 9],
        "sizes": sizes,
        "times": ["0", "0", "0.25 µs", "1.235 ms", "12.35 s"],
        "shares": ["0%", "0.33%", "33%", "99.9%", "100%"],
        "phases": ["forward", "backward", "optimizer"],
        "units": ["(root)", "layers.0", "layers.1"],
        "colours": [True, True, True],
    }  # fmt: skip


def test_the_timeline_zooms_moves_and_points_things_out(tmp_path):
    did = _ask(STEP, """
        const { compute, communication, memory } = timeline.rows;
        const whole = span();
        at("wheel", WheelEvent, 0.05, compute, { deltaY: -300 });
        const zoomed = span();
        const moment = x(0.05);
        at("pointermove", PointerEvent, 0.05, compute, {});
        at("pointermove", PointerEvent, 0.06, compute, { buttons: 1 });
        const dragged = span();
        canvas.dispatchEvent(new Event("dblclick"));
        const reset = span();
        const hover = (seconds, row) => {
          at("pointermove", PointerEvent, seconds, row, {});
          const { collectives, op } = timeline.shown();
          timeline.draw();
          return [texts("#tooltip strong")[0], collectives.map((c) => c.index), op?.module ?? ""];
        };
        const hovered = [hover(0.04, communication), hover(0.044, compute), hover(0.12, compute),
          hover(0.0472, memory)];
        timeline.leave();
        const hidden = byId("tooltip").hidden;
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
        const key = timeline.axis.span;
        byId("next-stall").click();
        const stall = timeline.selected.index;
        timeline.draw();
        return { whole, zoomed, moment: moment - NAMES_WIDTH - 0.05 / whole[1] * width, dragged,
          reset, hovered, hidden, key, stall, range: texts("#range")[0] };
    """, tmp_path)  # fmt: skip
    end = STEP.step_seconds
    assert did["whole"] == did["reset"] == pytest.approx([0, end])
    assert did["zoomed"][1] - did["zoomed"][0] == pytest.approx(end * 0.5488, rel=1e-3)
    assert did["moment"] == pytest.approx(0, abs=2)  # pixels: it stays under the mouse
    moved = [after - before for after, before in zip(did["dragged"], did["zoomed"], strict=True)]
    assert moved == pytest.approx([-0.01, -0.01], abs=1e-3)
    assert did["hovered"] == [
        ["all-gather of layers.5", [6], "layers.5.norm1"],
        ["compute waits 4.77 ms", [6], "layers.5.norm1"],
        ["sdpa", [], "layers.5.attention"],
        ["4.334 GiB held", [], ""],
    ]
    assert did["hidden"] is True and did["key"] == pytest.approx(end / 2)
    assert (did["stall"], did["range"]) == (0, "0 to 5.7 ms")


def test_tables_sort_and_a_row_shows_its_collective(tmp_path):
    did = _ask(STEP, """
        const first = (count) => texts("#collectives tbody td:first-child").slice(0, count);
        const press = (title) => {
          const all = [...document.querySelectorAll("#collectives th button")];
          all.find((button) => button.textContent === title).click();
          return first(3);
        };
        const given = first(3);
        const sorted = [press("bytes"), press("bytes"), press("exposed"), press("buckets")];
        const marked = document.querySelectorAll("#collectives th[aria-sort]").length;
        press("#");
        document.querySelectorAll("#collectives tbody tr")[19].click();
        const [start, end] = span();
        const row = timeline.selected;
        return { given, sorted, marked, chosen: texts("tr.chosen td")[0], index: row.index,
          inside: start <= row.issued && row.reader.end <= end && end - start < 0.03 };
    """, tmp_path)  # fmt: skip
    assert did["given"] == ["0", "1", "2"]
    large, small, late, named = did["sorted"]
    assert large == ["6", "19", "1"] and small[0] == "0" and late[0] == "10"
    assert named == ["0", "9", "1"]  # (root) first, and rows that are alike stay in order
    assert did["marked"] == 1 and did["inside"] is True
    assert (did["chosen"], did["index"]) == ("6", 6)


def test_hostile_names_are_text(tmp_path):
    record = _hostile()
    shown = _ask(record, """
        timeline.draw();
        const hovered = record.collectives.slice(0, 6).map((row) => {
          at("pointermove", PointerEvent, row.start + row.seconds / 2, timeline.rows.communication);
          return texts("#tooltip dd").at(-1);
        });
        record.ops.forEach((op) => showTooltip(describeOp(op), { x: 0, y: 0 }));
        return { ran: typeof ran, images: document.images.length, heading: texts("h1")[0],
          settings: texts("#settings b"), what: texts(".what"), hovered,
          scripts: document.scripts.length, buckets: texts("#buckets td:first-child"),
          needed: texts("#collectives td:last-child") };
    """, tmp_path)  # fmt: skip
    assert (shown["ran"], shown["images"], shown["heading"]) == ("undefined", 0, HOSTILE[0])
    assert shown["settings"] == shown["what"] == list(HOSTILE)
    assert shown["buckets"] == [row.name for row in record.buckets]
    assert shown["needed"] == [row.needed_by for row in record.collectives]
    assert shown["hovered"] == shown["needed"][:6]
    assert shown["scripts"] == page(STEP).count("<script") + 2  # the test's own


def test_the_memory_curve_is_drawn_where_there_is_one(tmp_path):
    rows = [("", 4e9, 0.2, 1), ("", 6e9, 0.1, 3), ("no checkpointing, resharded", 5e9, 0.25, 0)]
    curve = tuple(CurveRow(name, int(n), s, g, 3, 2, "mlp: mul") for name, n, s, g in rows)
    script = """
        return { hidden: byId("curve-section").hidden, marks: texts("#curve circle title"),
          places: [...document.querySelectorAll("#curve circle")].map((mark) =>
            [mark.getAttribute("cx"), mark.getAttribute("cy")].map(Number)),
          line: document.querySelector("#curve polyline")?.getAttribute("points").split(" ").length,
          table: texts("#curve-rows td:nth-child(3)") };
    """
    shown = _ask(replace(STEP, curve=curve, kinds=("mlp: mul",)), script, tmp_path)
    assert not shown["hidden"] and shown["line"] == 2
    assert shown["marks"][2] == (
        "no checkpointing, resharded · 4.657 GiB · 250 ms · 0 of 3 buckets stay gathered · "
        "computed again: mlp: mul"
    )
    (first, second, setting) = shown["places"]
    assert first[0] < setting[0] < second[0] and second[1] > first[1] > setting[1]
    assert shown["table"] == ["1 of 3", "3 of 3", "0 of 3"]
    without = _ask(STEP, script, tmp_path)
    assert without["hidden"] and not without["marks"]


@pytest.mark.parametrize("width", [420, 1400])
def test_nothing_is_wider_than_its_card(tmp_path, width):
    curve = tuple(CurveRow("", n << 30, 0.1 / n, n, 3, 2, "mlp: mul") for n in (4, 5, 6, 7))
    shown = answer_of(page(replace(STEP, curve=curve)), """
        const wide = (all) => all.filter((e) => e.scrollWidth > e.clientWidth + 1);
        const cards = [...document.querySelectorAll(".card:not(.scroll)")];
        const texts = [...document.querySelectorAll("#curve text")].map((text) =>
          text.getBoundingClientRect());
        const below = texts.filter((box, index) => index % 2);
        return { width: innerWidth, page: document.documentElement.scrollWidth,
          cards: cards.length, wide: wide(cards).map((card) => card.textContent),
          high: Math.min(...texts.map((box) => box.height)),
          apart: below.slice(1).every((box, index) => box.left > below[index].right) };
    """, tmp_path, width)  # fmt: skip
    assert shown["width"] == width >= shown["page"]
    assert shown["cards"] > 7 and shown["wide"] == []
    assert shown["high"] > 11 and shown["apart"] is True


@pytest.mark.parametrize("record", [EMPTY, ALONE], ids=["empty", "alone"])
def test_what_is_missing_leaves_no_gap(tmp_path, record):
    shown = _ask(record, """
        timeline.draw();
        at("pointermove", PointerEvent, timeline.axis.end / 2, timeline.rows.compute);
        return [texts("#verdict")[0], texts("#collectives")[0], texts("#buckets")[0],
          texts("#findings")[0], byId("stall-buttons").hidden];
    """, tmp_path)  # fmt: skip
    seconds = "500 ms" if record is ALONE else "0"
    none, fine = "There are none.", "Nothing to change: no problem was found in this step."
    verdict = f"A step takes {seconds}. Nothing is communicated."
    assert shown == [verdict, none, none, fine, True]


def test_a_large_record_is_drawn_at_once(tmp_path):
    record = training_step(165, 4)
    assert len(record.ops) > 15_000 and len(record.collectives) == 497
    shown = _ask(record, """
        const context = canvas.getContext("2d");
        const calls = { fillRect: 0, fillText: 0 };
        for (const name of Object.keys(calls)) {
          const original = context[name].bind(context);
          context[name] = (...values) => { calls[name] += 1; original(...values); };
        }
        timeline.draw();
        return { rows: rows("collectives"), ...calls };
    """, tmp_path)  # fmt: skip
    assert shown["rows"] == 497
    assert shown["fillRect"] < 3 * 1500  # not one an op: pixels, for each of three rows
    assert shown["fillText"] < 400
