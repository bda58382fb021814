"""`Report`: a record that can be printed, compared, saved and loaded."""

import json
from pathlib import Path

from shardc.reports.compare import comparison_text
from shardc.reports.pictures.endings import ENDINGS, check_ending
from shardc.reports.pictures.html import save_html
from shardc.reports.pictures.perfetto import save_trace
from shardc.reports.record import Record
from shardc.reports.replay import whole_step
from shardc.reports.text import report_text
from shardc.runtime.checks.arguments import check_value


def _save_json(record: Record, path: Path) -> None:
    path.write_text(json.dumps(record.to_dict()))


class Report(Record):
    """A report of a step of a sharded model on one rank: its plan and its costs.

    `print(report)` shows the report. Its attributes (see `Record`) are plain values: times in
    seconds, sizes in bytes.
    """

    def __str__(self) -> str:
        return report_text(self)

    __repr__ = __str__

    def text(self, every_row: bool = False, width: int | None = None) -> str:
        """The text that `print` shows.

        Args:
            every_row: show the rows that repeat from block to block, too.
            width: columns of characters for the text; default: the terminal's, or 100 without a
                terminal. A table that is too wide leaves out columns and says so.
        """
        return report_text(self, every_row, width)

    def whole_step(
        self, gather_ahead: bool = False, micro_batches: int = 1, gathered_bytes: int = 0
    ) -> "Report":
        """The report of the same step as one graph, by `shardc.compile_step`, without clipping.

        The last reductions run while the optimizer updates the parameters whose gradients are
        there.

        Args:
            gather_ahead: as in `compile_step`: the buckets of the first gather stay gathered, and
                are gathered for the next step behind their updates. `settings` names them.
            micro_batches: the number of forwards and backwards before the update, each like the
                one of this report.
            gathered_bytes: bytes of buckets that may stay gathered between micro-batches.

        Raises:
            ValueError: `micro_batches` is less than 1.
        """
        check_value("whole_step: micro_batches", micro_batches, int)
        if micro_batches < 1:
            raise ValueError(f"whole_step: micro_batches must be at least 1, got {micro_batches}")
        return whole_step(self, gather_ahead, micro_batches, gathered_bytes)

    def compare(self, *others: Record) -> str:
        """This report and others side by side, as a table.

        Raises:
            TypeError: one of `others` is no report.
        """
        for other in others:
            check_value("compare: other", other, Record)
        return comparison_text([self, *others])

    def save(self, path: str | Path) -> None:
        """Write the report to a file, in the format of the file's ending.

        `.html` is a page to look at: figures, findings, timeline, memory and tables in one file.
        `.trace.json` is for https://ui.perfetto.dev or chrome://tracing. `.json` has everything;
        `Report.load` reads it.

        Raises:
            ValueError: `path` has another ending.
        """
        writers = dict(zip(ENDINGS, (save_html, save_trace, _save_json), strict=True))
        writers[check_ending(path)](self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """The report that `save` wrote as JSON.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            values = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} is not a report of shardc")
        return cls.from_dict(values)
