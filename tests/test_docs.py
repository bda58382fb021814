"""README and docs: their Python runs, their commands exist, they name all there is to name.

The Python blocks of a page run in order in one process and share their names. A page that makes a
process group runs on two ranks of the pool, others run here. A block with a title is also a file of
that name in the page's folder, which commands may use.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import itertools
import os
import re
import shlex
import sys
import textwrap
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import pytest
import torch
import torch.distributed as dist
from command_line import ended
from ranks import run_on_ranks
from scripts import load
from torch.distributed import fsdp

import shardc
from shardc.backend import compile as backend
from shardc.backend.options import Options
from shardc.commands.cli import _make_parser
from shardc.passes.estimate.hardware import PROFILES
from shardc.reports.terminal import READABLE
from shardc.runtime.groups.backends import BACKENDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = ("doctor", "calibrate", "explain examples", "compare examples", "plan examples")
"""Commands that are parsed only: they take long, measure, or have a test of their own."""

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

_FENCE = re.compile(r'^( *)```(\w+)(?: title="([^"\n]+)")?\n(.*?)^\1```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page; `line` is that of its first line of text."""

    language: str
    title: str | None
    text: str
    line: int


def fences(page: Path) -> list[Fence]:
    """All blocks of the page that name a language."""
    text = page.read_text()
    return [
        Fence(m[2], m[3], textwrap.dedent(m[4]), text.count("\n", 0, m.start(4)) + 1)
        for m in _FENCE.finditer(text)
    ]


def python_of(page: Path) -> list[Fence]:
    return [fence for fence in fences(page) if fence.language == "python"]


def commands_of(page: Path) -> list[list[str]]:
    """The words of every line in the page's shell blocks."""
    lines = (line for f in fences(page) if f.language == "sh" for line in f.text.splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def printed(page: Path) -> dict[str, str]:
    """What commands print, as the page shows it: a text block after a block of one command."""
    return {
        before.text.strip(): shown.text
        for before, shown in itertools.pairwise(fences(page))
        if shown.language == "text" and before.language == "sh" and before.text.count("\n") == 1
    }


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _with(pages, what):
    return pytest.mark.parametrize("page", [p for p in pages if what(p)], ids=_name)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_has_a_known_language(page):
    marks = re.findall(r"^ *```", page.read_text(), re.MULTILINE)
    found = fences(page)
    assert len(marks) == 2 * len(found)
    assert {fence.language for fence in found} <= {"python", "sh", "text", "mermaid", "diff"}


# -- Python ------------------------------------------------------------------------------------


def run_page(mesh, path, folder):
    """Run the page's Python in `folder`, on the group that there is, op by op."""
    page, parse, where = Path(path), Options.parse, os.getcwd()
    main = types.ModuleType("__main__")
    names = main.__dict__
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        sys.modules["__main__"] = main  # Dynamo looks there for what a page imports
        stack.callback(shardc.set_profile, None)
        if page.name in ("README.md", "tutorial.md"):  # read first, run with -W error by some
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("error", FutureWarning)
        stack.callback(os.chdir, where)
        os.chdir(folder)

        def parsed(given):
            return parse({"executor": "eager", **given} if given else {"executor": "eager"})

        for target, name, value in (
            (dist, "init_process_group", lambda *_, **__: None),
            (dist, "destroy_process_group", lambda *_, **__: None),
            (Options, "parse", staticmethod(parsed)),
            (backend.shardc_backend, "check_options", parsed),
        ):
            if mesh is not None:
                stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=folder))
        for table in (PROFILES, BACKENDS):
            stack.enter_context(mock.patch.dict(table))
        measuring = importlib.import_module("shardc.calibration")
        stack.enter_context(mock.patch.multiple(measuring, _ROUNDS=1, _IN_A_ROW=1))
        stack.enter_context(mock.patch.object(sys, "path", [*sys.path, str(folder)]))
        titles = [fence.title for fence in python_of(page) if fence.title]
        for title in titles:  # a block may import another
            stack.callback(sys.modules.pop, Path(title).stem, None)
        for fence in python_of(page):
            if fence.title:  # at once: the other rank may be importing it
                whole = Path(folder, f"{fence.title}.{os.getpid()}")
                whole.write_text(fence.text)
                whole.replace(Path(folder, fence.title))
            blank = "\n" * (fence.line - 1)  # so that a traceback has the page's lines
            exec(compile(blank + fence.text, path, "exec"), names)


@_with(PAGES, python_of)
def test_python_of_a_page_runs(page, tmp_path):
    if any("init_process_group(" in fence.text for fence in python_of(page)):
        kwargs = {"path": str(page), "folder": str(tmp_path)}
        run_on_ranks(2, __name__, "run_page", kwargs)
    else:
        run_page(None, str(page), str(tmp_path))


def run_script(mesh, text):
    """What a script prints on the group that there is."""
    printed = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group", lambda *_, **__: None),
        mock.patch.object(dist, "destroy_process_group", lambda *_, **__: None),
        contextlib.redirect_stdout(printed),
    ):
        exec(text, {"__name__": "__main__"})
    return printed.getvalue()


def test_a_script_of_fsdp2_trains_alike_after_the_conversion():
    (diff,) = (f for f in fences(ROOT / "docs/from_fsdp2.md") if f.language == "diff")
    lines, printed = diff.text.splitlines(), []
    compiled = {"-": ".compile()", "+": 'backend="shardc"'}
    quick = {
        "-": '.compile(backend="eager")',
        "+": 'backend="shardc", options={"executor": "eager"}',
    }
    for sign, how in compiled.items():
        assert sum(line.startswith(sign) for line in lines) == 2
        text = "\n".join(line[1:] for line in lines if line[:1] in (" ", sign, ""))
        assert how in text
        text = text.replace(how, quick[sign])
        printed.append(run_on_ranks(2, __name__, "run_script", {"text": text}))
    theirs, ours = printed
    assert ours == theirs and len(set(ours)) == 2 and ours[0].count("loss") == 3


# -- commands ----------------------------------------------------------------------------------


@_with(PAGES, commands_of)
def test_commands_of_a_page(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("COLUMNS", str(READABLE))
    shown = printed(page)
    cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    titles = {fence.title: fence.text for fence in fences(page) if fence.title}
    for title, text in titles.items():
        (tmp_path / title).write_text(text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands_of(page):
        words = list(itertools.dropwhile(lambda word: "=" in word, line))  # after the environment
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "pip":  # `make dist` installs what it builds
            extras = re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*)\]", " ".join(words))))
            assert words[1] == "install" and set(extras) <= EXTRAS.keys(), words
        elif words[0] == "torchrun":
            script = next((word for word in words if word.endswith(".py")), None)
            known = script in titles or script == "train.py"  # the README's
            assert known or "shardc" in words, words
        elif words[0] == "python":
            assert words[1].startswith("benchmarks/") and (ROOT / words[1]).exists(), words
        else:
            assert words[0] == "shardc", f"{page.name} runs '{words[0]}': say here how to test it"
            _make_parser().parse_args(words[1:])
            if not " ".join(words[1:]).startswith(SLOW):
                arguments = [cache if word == "compiled" else word for word in words[1:]]
                code, out, err = ended(capsys, *arguments)  # compiled once for all pages
                assert code == 0, (words, err)
                if (text := shown.pop(" ".join(words), None)) and torch.__version__ >= "2.13":
                    assert out == text
    assert not [line for line in shown if line.startswith("shardc")]


def test_pages_show_what_commands_print():
    pages = [page for page in PAGES if any(line.startswith("shardc") for line in printed(page))]
    assert _name(pages[0]) == "docs/command_line.md"
    assert [line.split()[1] for line in printed(pages[0])] == ["plan", "explain", "fit"]


# -- what there is to name -----------------------------------------------------------------------


def _missing(page: str, names: list[str]) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]


def _public(cls: type) -> list[str]:
    return [name for name in vars(cls) if not name.startswith("_")]


def test_the_tables_of_fsdp_have_every_argument_and_method():
    two = [*inspect.signature(fsdp.fully_shard).parameters, *_public(fsdp.FSDPModule)]
    assert _missing("from_fsdp2.md", two) == []
    policy = dataclasses.fields(shardc.MixedPrecisionPolicy)
    assert _missing("guides/precision.md", [f.name for f in policy]) == []
    one = fsdp.FullyShardedDataParallel
    arguments = list(inspect.signature(one.__init__).parameters)[1:]
    assert _missing("from_fsdp1.md", [*arguments, *_public(one)]) == []
    fields = [f.name for f in dataclasses.fields(fsdp.MixedPrecision)]
    strategies = [strategy.name for strategy in fsdp.ShardingStrategy]
    assert _missing("from_fsdp1.md", [*fields, *strategies]) == []


def test_the_reference_has_everything():
    assert _missing("api.md", shardc.__all__) == []
    assert _missing("options.md", [f.name for f in dataclasses.fields(Options)]) == []
    write_options = load("docs/write_options.py")
    assert write_options.PAGE.read_text() == write_options.page(), "python docs/write_options.py"


def test_the_picture_is_drawn_from_a_report(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from xml.etree import ElementTree

    import draw_timeline

    with torch.device("meta"):
        model = torch.nn.Sequential(*(draw_timeline.Block(64) for _ in range(2)))
        x = torch.zeros(8, 64)
    report = shardc.explain(model, x, world_size=4, units=draw_timeline.Block)
    picture = ElementTree.fromstring(draw_timeline.draw(report))
    kept = ElementTree.parse(ROOT / "docs/assets/timeline.svg").getroot()
    assert picture.tag == kept.tag
    colours = [shape.get("fill") for shape in picture if shape.tag.endswith("rect")]
    gathers = sum(row.kind == "all_gather" for row in report.collectives)
    assert colours.count(draw_timeline.COLOURS["all_gather"]) == gathers + 1  # and the legend's


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
