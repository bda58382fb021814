"""Dumps: a graph before and after each pass, for people to read.

    folder/rank0/index.txt                      one line a file, in order: begin here
                 002_forward_0_input.py         a graph before its first pass
                 002_forward_3_schedule.py      after a pass that changed it
                 002_forward_3_schedule.diff    the changes of that pass
                 002_forward_plan.txt           its buckets, its schedule, its memory
                 002_forward_inductor.py        the code that Inductor made of it

`SHARDC_DUMP=folder` asks for the files. torch's structured trace (`TORCH_TRACE`) gets the same
texts as artifacts, which `tlparse` lists. Numbers count the graphs of a process. If neither is set,
shardc makes no text.
"""

import difflib
import os
import re
import warnings
from pathlib import Path

import torch.distributed as dist
from torch.fx import GraphModule

from shardc.runtime import compat
from shardc.runtime.checks.words import plural

INDEX = "index.txt"
_FIRST_LINES = "The files of this run, in order. Files that are not listed are older.\n\n"
FREES = re.compile(r";  [\w = ]+ = None")
"""The text in generated code after the last read of a value. Diffs leave this text out, because it
moves with every reader."""
_begun: set[Path] = set()
_given_up: set[str] = set()


def is_wanted() -> bool:
    """Whether `SHARDC_DUMP` or `TORCH_TRACE` asks for texts."""
    return bool(_root()) or compat.is_traced()


def dump_folder() -> Path | None:
    """The folder of this rank's dumps; None without `SHARDC_DUMP`, or after an error."""
    root = _root()
    try:
        return rank_folder(Path(root)) if root else None
    except OSError as error:
        _give_up(error)
        return None


def _root() -> str:
    """The value of `SHARDC_DUMP`; "" if it is not set, or after an error of a dump."""
    root = os.environ.get("SHARDC_DUMP", "")
    return "" if root in _given_up else root


def _give_up(error: OSError) -> None:
    """Warn, and write no more dumps: an error of a dump must not end the training."""
    root = _root()
    _given_up.add(root)
    warnings.warn(f"SHARDC_DUMP={root}: nothing more is written there: {error}", stacklevel=2)


def rank_folder(root: Path) -> Path:
    """The folder of this rank below `root`, created if it is missing."""
    known = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if known else os.environ.get("RANK", "0")
    path = root / f"rank{rank}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_text(name: str, what: str, text: str, traced: bool = True) -> None:
    """Write a file, and describe it in the index; the trace gets the same text, if `traced`."""
    if traced:
        compat.trace_artifact(f"shardc_{name}", text)
    note(f"{name:<44} {what}", name, text)


def note(line: str, name: str = "", text: str = "") -> None:
    """Add a line to the index, for a file `name` that is written first; a process begins anew."""
    folder = dump_folder()
    if folder is None:
        return
    index = folder / INDEX
    try:
        if name:
            (folder / name).write_text(text)
        if folder not in _begun:
            index.write_text(_FIRST_LINES)
            _begun.add(folder)
        with index.open("a") as file:
            file.write(f"{line}\n")
    except OSError as error:
        _give_up(error)


# -- graphs --------------------------------------------------------------------------------------


def dump_input(gm: GraphModule, stem: str, written: bool = False) -> str:
    """Write a graph before its first pass, unless `written`; return its text, "" without dumps."""
    if not is_wanted():
        return ""
    text = graph_text(gm)
    if not written:
        write_text(f"{stem}_0_input.py", f"{plural(_count(gm), 'op')}, before the first pass", text)
    return text


def dump_change(gm: GraphModule, name: str, before: str) -> str:
    """Write a graph after a pass, and its diff from `before`; return its text, "" without dumps."""
    if not is_wanted():
        return ""
    text = graph_text(gm)
    changes = text_diff(before, text, name)
    if not changes:
        note(f"{name:<44} changed nothing")
        return text
    lines = [line[:1] for line in changes.splitlines()[2:]]
    new, gone = plural(lines.count("+"), "line"), lines.count("-")
    what = f"{plural(_count(gm), 'op')}, {new} new, {gone} gone"
    write_text(f"{name}.py", what, text)
    write_text(f"{name}.diff", "what it changed", changes)
    return text


def dump_code(compiled: object, stem: str) -> None:
    """Write Inductor's code of a graph; Inductor itself adds the code to the trace."""
    code = compat.generated_code(compiled) if dump_folder() is not None else None
    if code is not None:
        path, text = code
        write_text(f"{stem}_inductor.py", f"the code of Inductor, from {path}", text, traced=False)


def graph_text(gm: GraphModule) -> str:
    """A graph as readable Python, with shapes, and tags on nodes that a backward recomputes."""
    return gm.print_readable(print_output=False)


def text_diff(before: str, after: str, name: str) -> str:
    """A unified diff of two texts of a graph; "" if the texts are equal."""
    old, new = (FREES.sub("", text).splitlines() for text in (before, after))
    lines = list(difflib.unified_diff(old, new, "before", name, lineterm=""))
    return "\n".join(lines) + "\n" if lines else ""


def _count(gm: GraphModule) -> int:
    return sum(node.op == "call_function" for node in gm.graph.nodes)
