"""Step time against memory: the curve, usual settings beside it, what is printed and refused."""

import functools
import itertools

import pytest
import torch
from command_line import ended
from models import Gated, Stack, tokens

import shardc
from shardc.reports.report import Report

X = torch.empty(4, 64, 32, device="meta")
MORE = {"world_size": 8, "profile": "cpu"}


@pytest.fixture(scope="module")
def report():
    return shardc.explain(Gated(6), X, memory_budget="curve", **MORE)


def test_the_curve_falls_and_lies_below_usual_settings(report, tmp_path):
    plain = shardc.explain(Gated(6), X, **MORE)
    assert not plain.curve and "Step time against memory" not in plain.text()
    points = [row for row in report.curve if not row.setting]
    settings = {row.setting: row for row in report.curve if row.setting}
    assert len(points) > 5 and len(settings) == 6
    for less, more in itertools.pairwise(points):
        assert less.nbytes < more.nbytes and less.seconds > more.seconds
    for setting in settings.values():
        reached = [row for row in points if row.nbytes <= 1.01 * setting.nbytes]
        assert reached and min(row.seconds for row in reached) <= 1.02 * setting.seconds, setting
    resharded = settings["no checkpointing, resharded"]
    assert resharded.again == "nothing" and resharded.gathered == 0
    # With a budget, kernels on CPUs stay between the matmuls that they are between.
    assert resharded.nbytes == pytest.approx(plain.peak.total, rel=0.03)
    assert resharded.seconds == pytest.approx(plain.step_seconds, rel=0.02)
    assert settings["full checkpointing, resharded"].nbytes < 0.8 * resharded.nbytes
    report.save(tmp_path / "step.json")
    assert Report.load(tmp_path / "step.json") == report


def test_a_budget_keeps_what_the_curve_says(report):
    points = [row for row in report.curve if not row.setting]
    for row in (points[len(points) // 2], points[-1]):
        assert row.gathered
        within = shardc.explain(Gated(6), X, memory_budget=int(1.02 * row.nbytes), **MORE)
        assert within.peak.total <= 1.02 * row.nbytes
        assert within.step_seconds == pytest.approx(row.seconds, rel=0.1)
        assert sum(not bucket.reshard for bucket in within.buckets) >= row.gathered


def test_a_step_without_one_joint_graph_has_no_curve():
    with pytest.raises(ValueError, match="one graph with a backward, got 0"):
        shardc.explain(Gated(2), X, memory_budget="curve", train=False, **MORE)
    with pytest.raises(ValueError, match="memory_budget"):
        shardc.explain(Stack(), tokens(0), memory_budget="curved", **MORE)


def gated():
    """What the command is told to explain."""
    with torch.device("meta"):
        return Gated(6), (X,)


def test_the_command_prints_it(capsys):
    call = ["explain", f"{__name__}:gated", "--world-size", "4", "--memory", "curve"]
    code, printed, _ = ended(capsys, *call)
    assert code == 0 and "no checkpointing, resharded" in printed and "stay gathered" in printed
    assert "  1. layers.* " in printed


def test_tables_whose_rows_are_fetched_are_no_choice():
    step = functools.partial(shardc.explain, Stack(3), tokens(0), tokens(1), **MORE)
    rows = {"embedding_rows": True}
    report = step(options=rows, memory_budget="curve")
    assert "fetch_rows" in {row.kind for row in report.collectives} and report.curve
    budget = min(row.nbytes for row in report.curve if not row.setting) * 2
    assert step(options=rows | {"memory_budget": budget}).peak.total <= budget
