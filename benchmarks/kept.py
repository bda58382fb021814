"""The page of benchmarks, made of the tables that runs have kept.

    python benchmarks/kept.py          # prints the page
    python benchmarks/kept.py --write  # writes docs/benchmarks.md

A benchmark that is given `--keep NAME` writes its table to `benchmarks/results/NAME.json`, with the
command, the machine and the day. The page has a section for each of them.
"""

import argparse
import ast
import datetime
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PAGE = FOLDER.parent / "docs" / "benchmarks.md"

_ABOUT = """\
# Benchmarks

`python benchmarks/kept.py --write` makes this page of the tables in `benchmarks/results`. The
command above a table measured it. With `--keep` and the name of the section, the command measures
it again and replaces it.

The sides of a table ran in turn, on machines that do other work, too. A ratio is the median of the
ratios of single rounds, with the least and the largest. Seconds of different tables do not compare.
`benchmarks/LOG.md` tells of each change that was tried, also of those that failed.
"""


@dataclass(frozen=True)
class Kept:
    """A table that a benchmark measured.

    Attributes:
        command: measures it.
        machine, date: where and when.
        setting: of the benchmark, in words; may be empty.
        headers, rows: the table, as texts.
    """

    command: str
    machine: str
    date: str
    setting: str
    headers: list[str]
    rows: list[list[str]]


def add_keep_option(parser: argparse.ArgumentParser) -> None:
    """`--keep`."""
    parser.add_argument("--keep", metavar="NAME",
                        help="also write the table to benchmarks/results/NAME.json")  # fmt: skip


def show(
    headers: Sequence[str], rows: Sequence[Sequence[object]], keep: str | None, setting: str = ""
) -> None:
    """Print a table; with a name to `keep` it under, write it, too."""
    texts = [[str(cell) for cell in row] for row in rows]
    if setting:
        print(setting)
    print(_table(headers, texts, "simple"))
    if keep:
        kept = Kept(
            _command(), _machine(), str(datetime.date.today()), setting, list(headers), texts
        )
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{keep}.json").write_text(json.dumps(asdict(kept), indent=1) + "\n")


def page() -> str:
    """docs/benchmarks.md."""
    parts = [_ABOUT]
    for path in sorted(RESULTS.glob("*.json")):
        parts.append(_section(path.stem, Kept(**json.loads(path.read_text()))))
    return "\n".join(parts)


def _section(name: str, kept: Kept) -> str:
    about = textwrap.fill(_described(kept.command.split()[1]), 120, break_on_hyphens=False)
    table = _table(kept.headers, kept.rows, "pipe")
    setting = f"{kept.setting}.\n\n" if kept.setting else ""
    return (
        f"## {name}\n\n{about}\n\n```sh\n{kept.command}\n```\n\n"
        f"{setting}{table}\n\n{kept.machine}, {kept.date}.\n"
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], form: str) -> str:
    align = ("left", *["right"] * (len(headers) - 1))
    return tabulate(rows, list(headers), form, disable_numparse=True, colalign=align)


def _described(script: str) -> str:
    """A benchmark's docstring without its commands."""
    text = ast.get_docstring(ast.parse((FOLDER.parent / script).read_text())) or ""
    parts = [part for part in text.split("\n\n") if not part.startswith("    ")]
    return " ".join(" ".join(parts).split())


def _command() -> str:
    given = sys.argv[1:]
    if "--keep" in given:
        at = given.index("--keep")
        given = given[:at] + given[at + 2 :]
    script = Path(sys.argv[0]).resolve().relative_to(FOLDER.parent.resolve())
    return " ".join(["python", str(script), *given])


def _machine() -> str:
    import torch

    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    on = f"{gpus} x {torch.cuda.get_device_name()}, " if gpus else ""
    return (
        f"{on}{cores} cores of a shared {_cpu()}, Python {platform.python_version()}, "
        f"torch {version('torch')}, shardc {_commit()}"
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def _commit() -> str:
    """The version, and the commit where the folder is a checkout."""
    import shardc

    found: Any = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=FOLDER, capture_output=True, text=True
    )
    return f"{shardc.__version__} ({found.stdout.strip()})" if found.stdout else shardc.__version__


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
