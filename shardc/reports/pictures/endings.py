"""The endings of the files to which a report is written."""

from pathlib import Path

ENDINGS = (".html", ".trace.json", ".json")


def check_ending(path: str | Path) -> str:
    """The ending of a file for a report.

    Raises:
        ValueError: the ending is none of `ENDINGS`.
    """
    for ending in ENDINGS:
        if str(path).endswith(ending):
            return ending
    raise ValueError(f"a report is written as {', '.join(ENDINGS)}, got '{Path(path).name}'")
