"""Scripts that reproduce a failure of Inductor: each holds one graph, and runs alone.

A script holds the graph as readable Python, the shapes, strides, dtypes and devices of its inputs,
the settings of Inductor, and the names and sizes of its process groups. `reproduce` makes groups
without peers under those names, traces the graph again and gives it to Inductor. Nothing is
computed, so a script needs no values, no other ranks, and no objects of the user that the graph
names by key.

torch's own repro scripts (`torch._dynamo.repro.after_aot`) are not used: they write settings by
their repr, which is no Python for a pass, and know only the groups of functional collectives.
"""

import ast
import functools
import importlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from shardc.passes import pipeline
from shardc.passes.context import PassContext
from shardc.passes.dump import dump_folder, note, rank_folder
from shardc.passes.estimate.cost import evaluate, symbol_hints
from shardc.passes.nodes import graph_modules
from shardc.passes.runner import run_passes
from shardc.runtime import compat
from shardc.runtime.watch.progress import label_of

log = logging.getLogger("shardc")

Input = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str] | int | None
"""A tensor as (shape, stride, dtype, device), or a size."""

_LARGEST_CONSTANT = 16
"""Elements of the largest constant with values in the script; larger constants are zeros there."""


def write_repro(
    gm: GraphModule,
    stem: str,
    arguments: Mapping[str, Any],
    error: Exception,
    folded: bool = False,
) -> str:
    """Write a script into `SHARDC_DUMP` or a temporary folder; returns a sentence with its path.

    Args:
        stem: the beginning of the names of the graph's dumps.
        arguments: the arguments of Inductor beside the graph and its inputs.
        folded: whether Inductor was given the graph after `fold_repeats`.
    """
    try:
        path = (dump_folder() or rank_folder(_temporary_folder())) / f"repro_{stem}.py"
        path.write_text(_script(gm, arguments, error, folded))
    except Exception as problem:  # no failure here may end the training
        log.warning("no script to reproduce the failure could be written", exc_info=True)
        return f"no script to reproduce it could be written: {problem}"
    note(f"{path.name:<44} what Inductor failed on, to be run alone")
    return f"to reproduce it alone: {sys.executable} {path}"


@functools.cache
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="shardc_repro_"))


# -- writing -------------------------------------------------------------------------------------

_HEAD = '''\
"""Inductor fails on this graph of shardc. Run it with Python, alone: it needs no other process."""

import math
import operator
from math import inf, nan

import torch
from torch import device

from shardc.backend.repro import find, needs, reproduce

'''

_FOOT = """
if __name__ == "__main__":
    reproduce(Graph, CONSTANTS, INPUTS, GROUPS, SETTINGS, ARGUMENTS, FOLDED)
"""


def _script(gm: GraphModule, arguments: Mapping[str, Any], error: Exception, folded: bool) -> str:
    given = {key: value for key, value in arguments.items() if _is_literal(value)}
    named = GraphModule(gm, compat.copied_graph(gm.graph), "Graph")
    comments = [f"torch {torch.__version__}, Python {sys.version.split()[0]}", ""]
    comments += [*str(error).strip().splitlines()[:40], *_notes(gm)]
    values = {
        "CONSTANTS": _lines(_constants(gm)),
        "INPUTS": "[\n" + "".join(_input_lines(gm)) + "]",
        "GROUPS": f"{_groups(gm)!r}  # name: (rank, ranks)",
        "SETTINGS": _lines(_settings()),
        "ARGUMENTS": _lines({key: repr(value) for key, value in given.items()}),
        "FOLDED": repr(folded),
    }
    return (
        _HEAD
        + "".join(f"# {line}".rstrip() + "\n" for line in comments)
        + _own_ops(gm)
        + f"\n\n{named.print_readable(print_output=False)}\n"
        + "".join(f"\n{name} = {value}\n" for name, value in values.items())
        + _FOOT
    )


def _lines(entries: Mapping[str, str]) -> str:
    """A dict, one entry a line; an entry that is a comment stays one."""
    if not entries:
        return "{}"
    lines = [
        f"    # {key!r}: {text}\n" if text.startswith("<") else f"    {key!r}: {text},\n"
        for key, text in entries.items()
    ]
    return "{\n" + "".join(lines) + "}"


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False


def _notes(gm: GraphModule) -> list[str]:
    """Notes on this graph for the reader."""
    keys = _arguments(gm, "key")
    if not keys:
        return []
    called = f"It calls {', '.join(keys)} of the training script: to compile it, that is not"
    return ["", called, "needed; to run it, it would be."]


def _own_ops(gm: GraphModule) -> str:
    """Python that registers the user's ops in a graph, or names an op that it cannot register."""
    targets = [node.target for body in graph_modules(gm) for node in body.graph.nodes]
    lines = ""
    for name in filter(None, dict.fromkeys(map(compat.op_name, targets))):
        module = compat.module_of_op(name)
        if module is None:
            continue
        root, place = _root_of(module), module
        if root is not None:
            lines += f"sys.path.append({root!r})\nimport {module}  # it defines {name}\n"
        elif module == "__main__":
            place = str(getattr(sys.modules[module], "__file__", "the main program"))
        lines += f"needs({name!r}, {place!r})\n"
    return lines and f"\nimport sys\n\n{lines}"


def _root_of(module: str) -> str | None:
    """The folder from which a module can be imported anew; None where it cannot."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or not file:
        return None
    path = Path(file).absolute()
    is_package = path.name == "__init__.py"
    return str(path.parents[module.count(".") + is_package])


def _input_lines(gm: GraphModule) -> Iterator[str]:
    hints = symbol_hints(gm)

    def number(size: Any) -> int:
        return int(evaluate(compat.size_expr(size), hints))

    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            shape, stride = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
            text = f"({shape}, {stride}, {value.dtype}, {str(value.device)!r})"
        elif isinstance(value, (int, torch.SymInt)):
            text = str(number(value))
        else:
            text = "None"
        yield f"    {text},  # {node.name}{'' if value is not None else ', unknown'}\n"


def _constants(gm: GraphModule) -> dict[str, str]:
    """The tensors that a graph holds, as Python."""
    found = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, str(node.target), None)
        if isinstance(value, Tensor):
            where = f"dtype={value.dtype}, device={str(value.device)!r}"
            small = value.numel() <= _LARGEST_CONSTANT and type(value) is Tensor
            found[str(node.target)] = (
                f"torch.tensor({value.tolist()}, {where})"
                if small
                else f"torch.zeros({tuple(value.shape)}, {where})"
            )
    return found


def _groups(gm: GraphModule) -> dict[str, tuple[int, int]]:
    """Rank and size of every process group that a graph names."""
    groups = {name: compat.resolve_group(name) for name in _arguments(gm, "group", "group_name")}
    return {name: (group.rank(), group.size()) for name, group in groups.items()}


def _arguments(gm: GraphModule, *names: str) -> list[str]:
    """The texts that ops of a graph and its bodies have as arguments of these names."""
    calls = [node for body in graph_modules(gm) for node in body.graph.nodes]
    given = [compat.op_arguments(node).get(name) for node in calls for name in names]
    return list(dict.fromkeys(value for value in given if isinstance(value, str)))


def _settings() -> dict[str, str]:
    """The settings of Inductor that differ from its defaults, as Python."""
    found = {}
    for name, value in compat.changed_inductor_settings().items():
        if _is_literal(value):
            found[name] = repr(value)
        elif callable(value) and _is_importable(value):
            found[name] = f"find({value.__module__!r}, {value.__qualname__!r})"
        elif name != compat.JOINT_PASS:
            found[name] = f"<{type(value).__name__}, which no script can hold>"
    return found


def _is_importable(value: Any) -> bool:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(name, str)) or module == "__main__":
        return False
    try:
        return find(module, name) is value
    except (ImportError, AttributeError):
        return False


# -- running -------------------------------------------------------------------------------------


def find(module: str, name: str) -> Any:
    """The object that a module has under a dotted name."""
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def needs(op: str, place: str) -> None:
    """End the script with a message where an op of the user ("mine::double") is not registered."""
    space, _, name = op.partition("::")
    if not hasattr(getattr(torch.ops, space), name):
        sys.exit(
            f"The graph calls {op}, an op that {place} defined. Copy its definition into this "
            f"script, above this call of needs, or import a module there that holds it and runs no "
            "training"
        )


def reproduce(
    graph: Callable[[], nn.Module],
    constants: Mapping[str, Tensor],
    inputs: Sequence[Input],
    groups: Mapping[str, tuple[int, int]],
    settings: Mapping[str, Any],
    arguments: Mapping[str, Any],
    folded: bool = False,
) -> None:
    """Give a graph to Inductor as shardc did; scripts of `write_repro` call it.

    Args:
        graph: a module class with the graph as its forward.
        groups: rank and size of each process group that the graph names, by name.
        settings: settings of Inductor, beside those that shardc always gives.
        arguments: the arguments of Inductor beside the graph and its inputs.
    """
    compat.make_fake_groups(groups)
    with torch.no_grad():
        gm = rebuild(graph, constants, inputs)
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        if folded:
            gm = run_passes(gm, PassContext("folded"), pipeline.FOLD_PASSES)
        compat.compile_alone(gm, values, label_of, settings, arguments)
    print(f"Inductor compiles it here, with torch {torch.__version__}.")


def rebuild(
    graph: Callable[[], nn.Module], constants: Mapping[str, Tensor], inputs: Sequence[Input]
) -> GraphModule:
    """Trace the graph of a module class again, op by op; sizes among `inputs` become symbols."""
    module = _make_module(graph)
    for name, value in constants.items():
        setattr(module, name, value)
    mode: Literal["symbolic", "fake"]
    mode = "symbolic" if any(isinstance(value, int) for value in inputs) else "fake"
    gm = make_fx(module, tracing_mode=mode)(*map(_make_input, inputs))
    gm.graph.eliminate_dead_code()  # tracing also takes unread results of ops
    return gm


def _make_module(graph: Callable[[], nn.Module]) -> nn.Module:
    """An instance of a class, with instances of the classes in it: bodies of higher-order ops."""
    module = graph()
    for name, value in vars(graph).items():
        if isinstance(value, type) and issubclass(value, nn.Module):
            module.add_module(name, _make_module(value))
    return module


def _make_input(value: Input) -> Tensor | int | None:
    if not isinstance(value, tuple):
        return value
    shape, stride, dtype, device = value
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
