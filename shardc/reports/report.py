"""`Report`: a record with what people do with it."""

import json
from pathlib import Path

from shardc.reports.compare import comparison_text
from shardc.reports.record import Record
from shardc.reports.text import report_text


class Report(Record):
    """What a step of a sharded model does and costs on one rank.

    `print(report)` shows it; its attributes, those of `Record`, are plain values. Times are in
    seconds, sizes in bytes.
    """

    def __str__(self) -> str:
        return report_text(self)

    __repr__ = __str__

    def text(self, every_row: bool = False) -> str:
        """What `print` shows; with `every_row`, also the rows that repeat from block to block."""
        return report_text(self, every_row)

    def compare(self, *others: Record) -> str:
        """This report and others side by side, as a table."""
        return comparison_text([self, *others])

    def save(self, path: str | Path) -> None:
        """Write the report to a file, by its ending: `.json`, which `Report.load` reads.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        if path.suffix != ".json":
            raise ValueError(f"a report is written as .json, got '{path.name}'")
        path.write_text(json.dumps(self.to_dict()))

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
