"""Reports at the width of a terminal: what wraps, what is left out, what is counted."""

import os
import pty
import select
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import training_step

from shardc.commands.progress_line import ProgressLine
from shardc.passes.estimate.hardware import PROFILES
from shardc.reports.findings import find
from shardc.reports.record import CurveRow, Record
from shardc.reports.report import Report
from shardc.reports.terminal import NARROWEST, READABLE, Column, pairs, table, terminal_width, wrap
from shardc.runtime.checks.words import listed, plural

STEP = training_step()


def _named(record, prefix="LlamaForCausalLM.model.layers"):
    """The step of a model whose blocks have long names, as models of other libraries have."""
    long = {f"layers.{n}": f"{prefix}.{n}" for n in range(64)}
    rows = (
        replace(
            row,
            buckets=tuple(long.get(name, name) for name in row.buckets),
            before=f"{prefix}.10.self_attn.q_proj: {row.before}",
            needed_by=f"{prefix}.10.self_attn.q_proj: {row.needed_by}",
        )
        for row in record.collectives
    )
    buckets = (replace(row, name=long.get(row.name, row.name)) for row in record.buckets)
    findings = find(record, PROFILES["h100-nvlink"])
    curve = CurveRow("no checkpointing", 1 << 30, 0.1, 3, 9, 2, "21 kinds, to mlp: mul", 9, "sdpa")
    values = {field: getattr(record, field) for field in record.__dataclass_fields__}
    values |= {"collectives": tuple(rows), "buckets": tuple(buckets), "findings": findings}
    kinds = ("mm of a layer of the model " * 9,)
    return Report(**values | {"curve": (curve, curve), "kinds": kinds})


LONG = _named(STEP)


def _widest(text):
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("width", [80, 100, 120, 150])
def test_a_report_fits(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = str(LONG)
    assert _widest(text) <= width and _widest(LONG.text(width=500)) > 150
    assert text == LONG.text(width=width) != LONG.text(width=500)
    assert LONG.text(every_row=True, width=width).count("reduce-scatter") == 9
    assert f"At {width} columns" in text and "(--save FILE.html)" in " ".join(text.split())
    assert _widest(LONG.compare(STEP, STEP, STEP, STEP)) <= width


def test_columns_are_left_out_in_order():
    shown = {
        width: next(line for line in LONG.text(width=width).splitlines() if "  collective " in line)
        for width in (80, 100, 140, 500)
    }
    assert shown[80].split() == ["phase", "collective", "of", "bytes", "exposed"]
    assert shown[100].split() == ["phase", "collective", "of", "bytes", "time", "hidden", "exposed"]
    assert "waited for before" in shown[140] and "started before" not in shown[140]
    assert "started before" in shown[500] and "At 500" not in LONG.text(width=500)


def test_what_is_left_out_is_said_and_reached():
    short = LONG.text(width=80)
    ends = " ".join(short[short.index("\nAt 80 columns names are cut") :].split())
    assert "these are left out: started before, waited for before, time, hidden." in ends
    needed = int(ends.partition("COLUMNS=")[2].partition(")")[0])
    assert f"At {needed}" not in LONG.text(width=needed)
    assert f"At {needed - 1}" in LONG.text(width=needed - 1)


def test_a_name_keeps_its_ends():
    columns = [Column("name", least=12), Column("size", "right")]
    text = table(columns, [["model.layers.10.mlp", "1 MiB"]], 40)
    assert "model.layers.10.mlp" in text and "At 40" not in text
    text = table(columns, [["model." * 9 + "layers.10.mlp", "1 MiB"]], 40)
    assert text.splitlines()[2] == "model.mode...model.layers.10.mlp   1 MiB"
    assert "At 40 columns names are cut." in text and _widest(text) <= 40


CELLS = st.text("abc. ", min_size=0, max_size=40).map(str.strip)


@given(st.lists(st.lists(CELLS, min_size=4, max_size=4), max_size=4), st.integers(40, 140))
@settings(max_examples=200, deadline=None)
def test_every_table_fits(rows, width):
    titles = ("a name", "", "bytes", "where it is")
    columns = [
        Column(title, "right" if n % 2 else "left", goes=(0, 3, 1, 2)[n], least=6)
        for n, title in enumerate(titles)
    ]
    text = table(columns, rows, width)
    assert _widest(text) <= width
    header = text.splitlines()[0]
    assert ("left out: bytes" in text) == ("bytes" not in header)
    assert "where it is" in header or "bytes" not in header


def test_values_wrap_beside_their_names():
    text = pairs([("wire", "one two three " * 5), ("peak memory", "1 GiB")], 40)
    assert text.splitlines() == [
        "wire         one two three one two three",
        "             one two three one two three",
        "             one two three",
        "peak memory  1 GiB",
    ]
    assert _widest(wrap("word " * 99, 500)) <= READABLE


def _terminal(columns):
    """Two ends of a terminal: one to read what programs print on the other."""
    inner, outer = pty.openpty()
    os.set_blocking(inner, False)
    subprocess.run(["stty", "cols", str(columns), "rows", "24"], stdin=outer, check=True)
    return inner, outer


def test_no_terminal_has_a_width_of_its_own(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    code = "from shardc.reports.terminal import terminal_width as w; print(w())"
    call, env = [sys.executable, "-c", code], dict(os.environ)  # where readline may put COLUMNS
    pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "env": env, "check": True}
    assert int(subprocess.run(call, **pipe).stdout) == READABLE == 100
    inner, outer = _terminal(93)
    subprocess.run(call, stdin=outer, stdout=outer, env=env, check=True)
    assert int(os.read(inner, 99)) == 93
    monkeypatch.setenv("COLUMNS", "20")
    assert terminal_width() == NARROWEST


def test_the_largest_part_of_what_is_exposed_is_said_with_its_share():
    exposed = replace(STEP.collectives[0], exposed=0.004)
    others = (replace(exposed, exposed=0.003, buckets=(f"layers.{n}",)) for n in range(12))
    record = replace(STEP, collectives=(exposed, *others))
    (finding,) = (f for f in find(record, PROFILES["cpu"]) if f.kind == "exposed communication")
    share = 0.004 / record.exposed_seconds
    assert f"the largest part of it, 4 ms ({share:.0%}), is the all-gather of" in finding.what
    assert share < 0.5 and "most" not in finding.what


def test_things_are_counted():
    assert [plural(n, "rank") for n in (0, 1, 1024)] == ["0 ranks", "1 rank", "1,024 ranks"]
    assert [plural(n, "copy", "copies") for n in (1, 2)] == ["1 copy", "2 copies"]
    assert [listed(list("abc"[:n])) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    one = Record(model="Linear", world_size=1, copies=1, profile="cpu")
    assert "over 1 rank, cpu" in Report(**vars(one)).text()


# -- progress --------------------------------------------------------------------------------------


def _progress(parts=1, before=None):
    now = [100.0]
    return now, ProgressLine("explain", parts, before, lambda: now[0])


def test_the_time_that_is_left_follows_from_that_of_the_stages_before():
    now, progress = _progress(before={"sharding": 0.0, "tracing": 0.25, "planning": 0.5})
    progress("sharding")
    assert progress.line() == "explain: sharding"
    now[0] += 10
    progress("tracing")
    assert progress.line() == "explain: tracing, about 35 s left"
    now[0] += 290
    progress("weighing")
    progress("planning")
    assert progress.line() == "explain: planning, about 6 min left"
    now[0] += 301
    assert progress.line() == "explain: planning, longer than was expected"


def test_the_time_of_a_report_tells_that_of_the_next():
    now, progress = _progress(3, {"sharding": 0.0, "planning": 0.5})
    for done in range(3):
        progress("sharding")
        left = ", about 45 s left" if done == 1 else ", about 25 s left" if done == 2 else ""
        assert progress.line() == f"explain ({done + 1} of 3): sharding{left}"
        now[0] += 20
        progress("planning")


def test_plans_whose_number_is_not_known_are_about_so_many():
    now, progress = _progress(4)
    for number in range(6):
        progress(f"{number} ranks")
        line = progress.line()
        if number in (1, 2, 3):
            assert "about" in line and "s left" in line
        else:
            assert "left" not in line
        now[0] += 7
    assert line == "explain (6 of about 4): 5 ranks"


def test_the_line_is_shown_on_a_terminal_where_it_takes_long(tmp_path):
    code = """
import sys, time
from shardc.commands import progress_line
progress_line.DELAY = float(sys.argv[1])
with progress_line.showing_progress(progress_line.ProgressLine("fit")) as progress:
    progress("building the model")
    time.sleep(0.4)
print("done")
"""
    shown = {}
    for delay in ("0.01", "9"):
        inner, outer = _terminal(80)
        call = [sys.executable, "-c", code, delay]
        done = subprocess.run(call, stdout=subprocess.PIPE, stderr=outer, check=True)
        assert done.stdout == b"done\n"
        shown[delay] = os.read(inner, 9999) if _readable(inner) else b""
    assert b"fit: building the model [00:00]" in shown["0.01"] and b"fit" not in shown["9"]
    quiet = subprocess.run([*call[:-1], "0"], capture_output=True, check=True)
    assert quiet.stderr == b""
    logged = code.replace("progress_line.DELAY", "progress_line.LOG_INTERVAL")
    log = subprocess.run([sys.executable, "-c", logged, "0.15"], capture_output=True, check=True)
    lines = log.stderr.splitlines()
    assert lines and all(line.startswith(b"fit: building the model [00:0") for line in lines)


def _readable(descriptor):
    return bool(select.select([descriptor], [], [], 0)[0])
