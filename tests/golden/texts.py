"""Dumps and reports as texts without numbers, paths and comments that differ from run to run."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import shardc
from shardc.passes.dump import FREES, INDEX

_FILE = re.compile(r"(?P<number>\d+)_(?P<phase>[a-z]+)_(?P<step>\d+_\w+|plan)(?P<ending>\.\w+)?$")


def of_dump(folder: Path) -> str:
    """The passes over all graphs, then each graph that is compiled, with its plan."""
    numbers: dict[str, int] = {}
    passes: list[str] = []
    graphs: dict[str, Path] = {}
    plans: dict[str, Path] = {}
    for line in (folder / INDEX).read_text().splitlines()[2:]:
        file, _, said = line.partition(" ")
        found = _FILE.match(file)
        if found is None or found["ending"] == ".diff":
            continue
        number = numbers.setdefault(found["number"], len(numbers))
        name = f"{found['phase']} {number}"
        if found["step"] == "plan":
            plans[name] = folder / file
            continue
        if found["ending"]:  # it changed something
            passes.append(f"{name}, {found['step'].partition('_')[2]}: {said.strip()}")
        if found["ending"] == ".py" and found["phase"] in ("forward", "backward"):
            graphs[name] = folder / file
    parts = ["\n".join(passes)]
    for name, path in graphs.items():
        parts.append(f"-- {name} " + "-" * 60)
        parts.append("\n".join(_ops(path.read_text())))
        if name in plans:
            parts.append(re.sub(r" graph \d+:", ":", plans[name].read_text(), count=1).strip())
    return "\n\n".join(parts) + "\n"


def _ops(graph: str) -> Iterator[str]:
    """An op a line."""
    for line in map(str.strip, graph.splitlines()):
        if line and not line.startswith(("#", "class ")):
            yield FREES.sub("", line).replace("torch.ops.", "")


def of_report(report: shardc.Report) -> str:
    """A report as JSON, a row of a table on a line."""
    lines = []
    for key, value in report.to_dict().items():
        if isinstance(value, (list, tuple)) and value:
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f'"{key}": [\n  {rows}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
