"""The shape of the code: imports go one way, private torch names live in one module."""

import ast
import functools
import itertools
import re
from collections import Counter
from pathlib import Path

import prose
import pytest
from torch import nn

ROOT = Path(__file__).parent.parent
ORDER = {"runtime": 0, "passes": 1, "shardc": 2}
ROOMS = {
    "passes": [
        "nodes", "estimate", "context", "contract", "schedule", "rewrite", "dump", "runner",
        "repeat", "pipeline", "budget",
    ],
    "runtime": [
        "compat", "checks", "layout", "groups", "watch", "comm", "tensor", "unit", "modules",
    ],
    "shardc": [
        "", "sharding", "backend", "optim", "state", "weights", "step", "reports", "planning",
        "commands", "integrations",
    ],
}  # fmt: skip
"""What is inside of each, folders and files: one imports those before it, and from itself."""
FILES = [path for folder in ORDER for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def _tree(path):
    return ast.parse(path.read_text())


def _imports(path):
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


def _top(parts):
    """Of a module's path behind "shardc": the folder at the top that it lies in, and the rest."""
    return (parts[0], parts[1:]) if parts and parts[0] in ORDER else ("shardc", parts)


def _room(top, parts):
    """The place of a module among the rooms of `top`."""
    return ROOMS[top].index(parts[0] if parts[0] in ROOMS[top] else "")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    """From one folder at the top to another, and from room to room."""
    top, *parts = path.relative_to(ROOT).with_suffix("").parts
    for module, name in _imports(path):
        package, *rest = module.split(".")
        if package != "shardc":
            continue
        assert ORDER[_top(rest)[0]] <= ORDER[top], f"{path} imports {module}"
        other, there = _top([*rest, name])
        if other == top and parts not in (["__init__"], ["__main__"]):
            assert _room(top, there) <= _room(top, parts), f"{path} imports {module}"


def test_prose_names_things(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text('''"""Those that do it."""
what = "a name"  # it holds what is there
def f():
    """Have it done,
    whatever it takes."""
    return "what a message may say"
''')
    assert [line.split(":")[1] for line in prose.refused(wrong)] == ["1", "4", "5", "2"]
    assert [line for path in FILES for line in prose.refused(path)] == []


def test_no_folder_is_crowded():
    files = Counter(path.parent for path in FILES)
    assert max(files.values()) <= 20, files.most_common(2)


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
        nodes = [node for node in ast.walk(_tree(path)) if _changes_torch(node)]
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


def test_few_values_of_the_runtime_are_untyped():
    """`Any` turns the type checker off: where it is needed (torch's own values), it has a name."""
    trees = [_tree(path) for path in FILES if path.is_relative_to(ROOT / "runtime")]
    nodes = (node for tree in trees for node in ast.walk(tree))
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes) < 80


def test_backends_of_collectives_are_told_apart_in_one_place():
    found = {
        str(path.relative_to(ROOT))
        for path in FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Constant) and node.value in ("gloo", "nccl")
    }
    made_here = {f"shardc/commands/{name}.py" for name in ("calibrate", "machine", "probes")}
    told = {f"runtime/groups/{name}.py" for name in ("backends", "devices")}
    assert found - made_here == told | {"runtime/compat/gloo.py"}


_COUNTED = (
    "arguments|buckets|bytes|collectives|copies|elements|entries|graphs|kinds|lines|messages|"
)
_COUNTED += "nodes|ops|optimizers|parameters|processes|ranks|rows|steps|tensors|tokens|units|GPUs"
_COUNTED = re.compile(rf" ({_COUNTED}|times(?! (as|the)))\b")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_one_thing_is_not_called_many(path):
    """Counts in texts are worded by `plural`."""
    tree = _tree(path)
    texts = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    found = [
        f"{path}:{noun.lineno} {{{ast.unparse(count)}}}{noun.value}"
        for values in texts
        for count, noun in itertools.pairwise(values)
        if isinstance(noun, ast.Constant) and _COUNTED.match(noun.value)
    ]
    assert found == []


def test_every_behaviour_of_fsdp_names_a_test_that_exists():
    rows = (Path(__file__).parent / "fsdp_behaviours.tsv").read_text().splitlines()[1:]
    assert len(rows) == len({tuple(row.split("\t")[:2]) for row in rows}) == 251
    for row in rows:
        _, behaviour, test = row.split("\t")
        file, name = test.split("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), (behaviour, test)


# -- state of the process --------------------------------------------------------------------------

_CHANGE = {"ContextVar", "Event", "Lock", "RLock", "count", "defaultdict", "deque", "dict", "list"}
_CHANGE |= {"local", "set", "WeakIdKeyDictionary", "WeakKeyDictionary", "WeakSet"}
_CHANGE |= {"WeakValueDictionary"}
"""Calls that make something which changes."""
_WRITES = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
_DISPLAYS = (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp)


def _last(node):
    """The last part of a dotted name, of what is called or subscripted; "" for anything else."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _bound(body):
    """Names and values of the assignments in a body."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id, node.value


def _written(node):
    """What a node writes to: `x` in `x[0] = 1` and `x.add(1)`, `C.x` in `C.x = 1`."""
    if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        attribute = f".{node.attr}" if isinstance(node, ast.Attribute) else ""
        yield _last(node.value) + attribute if isinstance(node.value, ast.Name) else ""
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
        yield from [called.value.id] if called.attr in _WRITES else []


def _state(tree):
    """The names in a module of what changes while the process runs, and is of no object."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = [node for function in functions for node in ast.walk(function)]
    written = {name for node in inside for name in _written(node)}
    changing = _CHANGE | {
        name
        for name, owner in classes.items()
        if any("self." in each for node in ast.walk(owner) for each in _written(node))
    }
    for node in inside:
        if isinstance(node, ast.Global):
            yield from node.names
    for function in functions:
        if {_last(each) for each in function.decorator_list} & {"cache", "lru_cache"}:
            yield function.name
    for owner, body in [("", tree.body), *((f"{n}.", node.body) for n, node in classes.items())]:
        for name, value in _bound(body):
            calls = {_last(call) for call in ast.walk(value) if isinstance(call, ast.Call)}
            is_empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value)[1:-1]
            shown = isinstance(value, _DISPLAYS) and not name.isupper()
            if calls & changing or is_empty or shown or owner + name in written:
                yield owner + name


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("a = {}\nB = {}\nC = {1: 2}\nD: int = 3", "a B"),
        ("A = {1: 2}\ndef f(): A[3] = 4", "A"),
        ("A = [1]\ndef f(): A.append(2)", "A"),
        ("a = None\ndef f():\n  global a\n  a = 1", "a"),
        ("class C:\n  b = False\n  n: int = field(default_factory=count().__next__)", "C.n"),
        ("class C:\n  b = False\ndef f(): C.b = True", "C.b"),
        ("class C:\n  def f(self): self.x = 1\nc = C()\nr = re.compile('')", "c"),
        ("w = weakref.WeakKeyDictionary[int, str]()\nT = dict[int, str]", "w"),
        ("@functools.lru_cache(3)\ndef f(): return 1", "f"),
    ],
)
def test_state_of_a_module_is_found(code, names):
    assert sorted(_state(ast.parse(code))) == sorted(names.split())


def test_the_table_of_state_is_complete():
    _, _, text = (
        (ROOT / "docs" / "architecture.md").read_text().partition("## State of the process")
    )
    table = set(re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| .+ \| .+ \|$", text, re.M))
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for name in _state(_tree(path))
        if name != "__all__"
    }
    assert sorted(found - table) == [] == sorted(table - found)


@pytest.mark.parametrize(("page", "many"), [("architecture.md", 40), ("adding.md", 120)])
def test_files_that_the_map_names_exist(page, many):
    text = (ROOT / "docs" / page).read_text()
    folders = "benchmarks|docs|passes|runtime|shardc|tests"
    named = set(re.findall(rf"`((?:{folders})/[\w/]+(?:\.\w+|/))`", text))
    named |= {f"tests/{name}" for name in re.findall(r"`(test_\w+\.py)`", text)}
    assert len(named) > many
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
