"""The shape of the code: imports go one way, private torch names live in one module."""

import ast
from pathlib import Path

import pytest
from torch import nn

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


TORCH = {"torch", "nn", "dist"}
OPS = {"_c10d_functional", "_unsafe_view", "_foreach_copy_", "__version__"}
"""What begins with an underscore and is called so in public: ops, and the version."""
HELD = {name for name in dir(nn.Module()) if name.startswith("_")} - {"_version", "_modules"}
"""What a module of torch holds or does in private; two of them other classes have as well."""


def _chain(node):
    """The names of `a.b[0].c`, the first one first."""
    names = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        names += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *names[::-1]]


def _changes_torch(node):
    """Whether a node reaches private names of torch, or assigns to torch's modules or privates."""
    if isinstance(node, ast.Attribute):
        first, *names = _chain(node)
        if first in TORCH and any(n.startswith("_") for n in names if n not in OPS):
            return True
    if not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return False
    first, *names = _chain(node)
    return bool(names) and (first in TORCH or not HELD.isdisjoint(names))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_is_changed_by_compat_only(path):
    if path.parent.name != "compat":
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if _changes_torch(node)]
        assert nodes == [], [f"{path}:{node.lineno} {ast.unparse(node)}" for node in nodes]


@pytest.mark.parametrize(
    "text",
    [
        "torch.optim.Optimizer.step = step", "torch._dynamo.reset()", "module.__class__ = Other",
        "held.owner._parameters['a'] = b", "del module._buffers['a']", "dist.all_gather = mine",
        "module._compiled_call_impl = call",
    ],
)  # fmt: skip
def test_a_change_of_torch_is_seen(text):
    assert any(map(_changes_torch, ast.walk(ast.parse(text))))


def test_backends_of_collectives_are_told_apart_in_one_place():
    found = {
        str(path.relative_to(ROOT))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in ("gloo", "nccl")
    }
    made_here = {f"shardc/commands/{name}.py" for name in ("calibrate", "machine", "probes")}
    assert found - made_here == {"runtime/comm/backends.py", "runtime/compat/gloo.py"}


def test_every_behaviour_of_fsdp_names_a_test_that_exists():
    rows = (Path(__file__).parent / "fsdp_behaviours.tsv").read_text().splitlines()[1:]
    assert len(rows) == len({tuple(row.split("\t")[:2]) for row in rows}) == 251
    for row in rows:
        _, behaviour, test = row.split("\t")
        file, name = test.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), (behaviour, test)
