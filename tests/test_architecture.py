"""The shape of the code: imports go one way, private torch names live in one module."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = {"runtime": 0, "passes": 1, "shardc": 2}
ROOMS = {
    "runtime": ["compat", "checks", "layout", "comm", "tensor", "eager", "bucket", "modules"],
    "shardc": ["", "sharding", "backend", "state", "reports", "commands"],
}
"""The folders inside of two of them: each imports those before it, and from itself."""
FILES = [path for folder in ORDER for path in sorted((ROOT / folder).rglob("*.py"))]


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def _layer(module):
    parts = module.split(".")
    return ORDER.get(parts[1] if len(parts) > 1 and parts[1] in ORDER else "shardc")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = ORDER[path.relative_to(ROOT).parts[0]]
    for module, _ in _imports(path):
        if module.split(".")[0] == "shardc":
            assert _layer(module) <= own, f"{path} imports {module}"


def _room(top, parts):
    """The place of a module's folder among those of `top`."""
    inner = parts[0] if (ROOT / top / parts[0]).is_dir() else ""
    return ROOMS[top].index(inner)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_are_entered_one_way(path):
    top, *parts = path.relative_to(ROOT).with_suffix("").parts
    if top not in ROOMS or parts in (["__init__"], ["__main__"]):
        return
    for module, name in _imports(path):
        here, *there = [*module.split("."), name]
        if here != "shardc" or (there[0] in ORDER) != (top == "runtime"):
            continue
        there = there[1:] if top == "runtime" else there
        assert _room(top, there) <= _room(top, parts), f"{path} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_torch_modules_are_imported_by_compat_only(path):
    if path.parent.name == "compat":
        return
    for module, name in _imports(path):
        if module.split(".")[0] == "torch":
            private = [p for p in [*module.split("."), name] if p.startswith("_")]
            assert private in ([], ["_pytree"]), f"{path} imports {module}.{name}"


def test_every_behaviour_of_fsdp_names_a_test_that_exists():
    rows = (Path(__file__).parent / "fsdp_behaviours.tsv").read_text().splitlines()[1:]
    assert len(rows) == len({tuple(row.split("\t")[:2]) for row in rows}) == 251
    for row in rows:
        _, behaviour, test = row.split("\t")
        file, name = test.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), (behaviour, test)
