"""The endings of the files that a report is written to."""

from pathlib import Path

ENDINGS = (".html", ".trace.json", ".json")


def check_ending(path: str | Path) -> str:
    """The ending of a file for a report.

    Raises:
        ValueError: an ending that is not known.
    """
    for ending in ENDINGS:
        if str(path).endswith(ending):
            return ending
    raise ValueError(f"a report is written as {', '.join(ENDINGS)}, got '{Path(path).name}'")
