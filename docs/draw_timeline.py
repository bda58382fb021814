"""Draws `docs/assets/timeline.svg`: the timeline of a step as `shardc.explain` plans it.

    python docs/draw_timeline.py

The step is that of four MLP blocks and a head over 64 ranks of the profile `h100-nvlink`, gathered
in bfloat16. Nothing runs: the report's rows are drawn as they are, one rectangle each.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

import torch
from torch import nn

import shardc
from shardc.reports.pictures.lanes import lanes_of, op_indices

WIDTH, LEFT, RIGHT = 1120, 118, 1100
COMPUTE, LANE, ROW = 62, 112, 30
COLOURS = {
    "forward": "#3b6fb6", "backward": "#7a4fa3", "optimizer": "#8a8a8a",
    "all_gather": "#2a9d6f", "reduce_scatter": "#d9822b", "stall": "#c0392b",
}  # fmt: skip
NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


class Block(nn.Module):
    """An MLP with a residual connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def planned_step() -> shardc.Report:
    """The report that is drawn."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(4096) for _ in range(4)), nn.Linear(4096, 4096, bias=False))
        x = torch.zeros(4096, 4096)
    precision = shardc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return shardc.explain(
        model, x, world_size=64, profile="h100-nvlink", mp_policy=precision, units=Block
    )


def draw(report: shardc.Report) -> str:
    """The report's timeline as SVG."""
    lanes = lanes_of((row.start, row.end) for row in report.collectives)
    height = LANE + ROW * (max(lanes, default=0) + 1) + 62
    body = "\n".join(_rows(report, lanes, height))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _rows(report: shardc.Report, lanes: list[int], height: int) -> Iterator[str]:
    scale = (RIGHT - LEFT) / report.step_seconds

    def x(seconds: float) -> float:
        return LEFT + scale * seconds

    def box(kind: str, start: float, end: float, top: float, label: str = "") -> str:
        width = max(scale * (end - start) - 0.6, 0.6)
        shape = (
            f'<rect x="{x(start):.1f}" y="{top}" width="{width:.1f}" height="{ROW - 6}" '
            f'fill="{COLOURS[kind]}" rx="2"/>'
        )
        if len(label) * 6.4 > width:
            return shape
        middle = x((start + end) / 2)
        return shape + _text(label, middle, top + 16, "#ffffff", "middle")

    yield _text("compute", 10, COMPUTE + 16)
    yield _text("wire", 10, LANE + 16)
    for phase in ("forward", "backward", "optimizer"):
        ops = [op for op in report.ops if op.phase == phase]
        start, end = ops[0].start, ops[-1].start + ops[-1].seconds
        if scale * (end - start) > 60:
            yield _text(phase, x((start + end) / 2), COMPUTE - 12, COLOURS[phase], "middle")
    for start, end, phase, label in _stretches(report):
        yield box(phase, start, end, COMPUTE, f"block {label}" if label < "4" else "head")
    readers = op_indices(report)
    for row, lane, reader in zip(report.collectives, lanes, readers, strict=True):
        top = LANE + ROW * lane
        yield box(row.kind, row.start, row.end, top, ", ".join(row.buckets))
        if row.exposed * scale > 1:
            yield box("stall", row.waited, row.waited + row.exposed, COMPUTE, "stall")
        if row.kind == "all_gather" and reader is not None:
            yield _arrow(x(row.end), top, x(report.ops[reader].start), COMPUTE + ROW - 6)
    yield from _legend(report, height)


def _stretches(report: shardc.Report) -> Iterator[tuple[float, float, str, str]]:
    """Ops that follow one another in one block, as one: start, end, phase, block."""
    start, end, phase, label = 0.0, 0.0, "", ""
    for op in report.ops:
        block = op.module.split(".")[0] or label
        if (op.phase, block) != (phase, label) or op.start - end > 1e-7:
            if phase:
                yield start, end, phase, label
            start, phase, label = op.start, op.phase, block
        end = op.start + op.seconds
    yield start, end, phase, label


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<path d="M{x1:.1f},{y1} C{x1:.1f},{y1 - 14} {x2:.1f},{y2 + 14} {x2:.1f},{y2 + 1}" '
        f'fill="none" stroke="#333333" stroke-width="1" stroke-dasharray="3 2"/>'
    )


def _legend(report: shardc.Report, height: int) -> Iterator[str]:
    at = LEFT
    for kind in ("all_gather", "reduce_scatter", "stall"):
        top = height - 44
        yield f'<rect x="{at}" y="{top}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield _text(NAMES.get(kind, "compute stands still"), at + 18, top + 10)
        at += 150
    share = report.exposed_seconds / report.step_seconds
    yield _text(
        f"planned: a step of {1e3 * report.step_seconds:.2f} ms on {report.world_size} ranks "
        f"({report.profile}), {1e3 * report.wire_seconds:.2f} ms on the wire, "
        f"{1e3 * report.exposed_seconds:.2f} ms of it exposed ({share:.0%} of the step)",
        LEFT, height - 12,
    )  # fmt: skip


def _text(text: str, x: float, y: float, colour: str = "#222222", anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(text)}</text>"


if __name__ == "__main__":
    picture = Path(__file__).parent / "assets" / "timeline.svg"
    picture.write_text(draw(planned_step()))
    print(f"wrote {picture}")
