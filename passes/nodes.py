"""Predicates of nodes, and the facts that passes note on nodes."""

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from shardc.runtime import compat
from shardc.runtime.checks.words import dtype_name, plural
from shardc.runtime.comm import (  # noqa: F401 (register their ops)
    comm_buffers,
    gradient_ops,
    saved_on_host,
    table_rows,
)
from shardc.runtime.layout.spec import Moved, UnshardSpec
from shardc.runtime.tensor import state_on_host  # noqa: F401 (registers its ops)
from shardc.runtime.tensor.shard_operands import written_operands
from shardc.runtime.watch.progress import in_short

c10d = torch.ops._c10d_functional

GATHERS = {
    c10d.all_gather_into_tensor.default,
    c10d.all_gather_into_tensor_out.default,
    c10d.all_gather_into_tensor_coalesced.default,
    torch.ops.shardc.all_gather.default,
    torch.ops.shardc.all_gather_in_steps.default,
}
FETCH, RETURN = torch.ops.shardc.fetch_rows.default, torch.ops.shardc.return_rows.default
IN_STEPS = torch.ops.shardc.all_gather_in_steps.default
_OWN = {
    torch.ops.shardc.all_gather.default,
    IN_STEPS,
    torch.ops.shardc.reduce_scatter.default,
    FETCH,
    RETURN,
}
"""Collectives that are ops of shardc (`comm_buffers`, `table_rows`)."""
SAVE, LOAD = torch.ops.shardc.save_on_host.default, torch.ops.shardc.load_from_host.default
WAIT_SAVED = torch.ops.shardc.wait_until_saved.default
SEND_STATE = torch.ops.shardc.send_state.default
WAIT_STATE = torch.ops.shardc.wait_until_state_sent.default
FETCH_STATE = torch.ops.shardc.fetch_state.default


def moved_by(node: Node) -> tuple[Moved, ...]:
    """The buckets that a collective moves: several if it is coalesced, none if it is a user's."""
    facts: tuple[Moved, ...] = (node.meta.get("custom") or {}).get("shardc", ())
    return facts


def labels_of(node: Node) -> tuple[str, ...]:
    """The labels of the buckets that a collective moves, in order."""
    return tuple(moved.label for moved in moved_by(node))


def set_moved(node: Node, moved: Iterable[Moved]) -> None:
    """Note on a node the buckets that it moves, for `moved_by`."""
    note(node, "shardc", tuple(moved))


def results_of(node: Node) -> list[Node]:
    """The results of a collective: the node itself, or the items of its list if it is coalesced."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items or [node]


def waits_for(node: Node) -> list[Node]:
    """The waits for a collective: one for each bucket that it moves."""
    return [user for result in results_of(node) for user in result.users if is_wait(user)]


def reach(neighbours: Callable[[Node], Iterable[Node]], *starts: Node) -> set[Node]:
    """All nodes that `neighbours` reaches from `starts`, and `starts` themselves."""
    found, todo = set(starts), list(starts)
    while todo:
        for node in neighbours(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def prepares(gather: Node) -> set[Node]:
    """The nodes that `fsdp_pre_all_gather` of a parameter added; empty for other gathers.

    They come before the gather. Collectives may be among them (a scale from the largest value of
    all ranks).
    """
    extends = any(moved.spec.extension for moved in moved_by(gather))
    return computed_for(gather) if extends else set()


def computed_for(node: Node) -> set[Node]:
    """All ops that a node depends on."""
    before = reach(lambda n: n.all_input_nodes, node) - {node}
    return {each for each in before if each.op == "call_function"}


def groups_in(gm: GraphModule) -> list[str]:
    """The process groups of all ranks that move buckets of `gm`, copies of the model included."""
    specs = [moved.spec for node in our_collectives(gm) for moved in moved_by(node)]
    return list(dict.fromkeys(spec.everyone or spec.group for spec in specs))


def groups_named_in(gm: GraphModule) -> list[str]:
    """The process groups that are arguments of collectives in `gm`, the user's own too."""
    given = (arg for node in gm.graph.nodes if is_collective(node) for arg in node.args)
    names = dict.fromkeys(arg for arg in given if isinstance(arg, str))
    return [name for name in names if compat.ranks_of(name)]


def ranks_in(node: Node) -> int:
    """The number of ranks that take part in a collective."""
    if kind_of(node) == "all_to_all":
        return len(node.args[1])  # type: ignore[arg-type]
    if node.target is IN_STEPS:
        return moved_by(node)[0].spec.world_size
    given = [argument for argument in node.args if isinstance(argument, int)]
    return given[0] if given else next((m.spec.reduction.copies for m in moved_by(node)), 1)


def is_all_gather(node: Node) -> bool:
    """Whether the node starts an all-gather."""
    return node.op == "call_function" and node.target in GATHERS


def brings_parameters(node: Node) -> bool:
    """Whether a collective brings parameters, whole or by rows; others bring gradients."""
    return is_all_gather(node) or node.target is FETCH


def in_steps(node: Node) -> bool:
    """Whether a collective has two steps, across nodes and inside nodes, or is one of the two."""
    specs = [moved.spec for moved in moved_by(node)]
    steps = [h for spec in specs for h in (spec.hierarchy, spec.reduction.hierarchy) if h]
    return any(group in node.args for h in steps for group in (h.across, h.inside))


def goes_inside(node: Node) -> bool:
    """Whether a collective is the step of a reduction that stays inside nodes."""
    steps = (moved.spec.reduction.hierarchy for moved in moved_by(node))
    reduces = not brings_parameters(node)
    return reduces and any(step is not None and step.inside in node.args for step in steps)


def is_collective(node: Node) -> bool:
    """Whether the node starts a collective."""
    if node.op != "call_function" or is_wait(node):
        return False
    is_functional = getattr(node.target, "namespace", None) == "_c10d_functional"
    return is_functional or node.target in _OWN


def is_host_copy(node: Node) -> bool:
    """Whether the node starts to copy a value, or an optimizer's state, to the host or back."""
    return node.op == "call_function" and node.target in (SAVE, LOAD, SEND_STATE, FETCH_STATE)


def moves_state(node: Node) -> bool:
    """Whether the node starts to copy an optimizer's state to the host or back."""
    return node.op == "call_function" and node.target in (SEND_STATE, FETCH_STATE)


def comes_from_host(node: Node) -> bool:
    """Whether the node starts a copy from the host."""
    return node.target in (LOAD, FETCH_STATE)


def state_bytes(node: Node) -> int:
    """Bytes of the optimizer's state that a node moves."""
    return int((node.meta.get("custom") or {})[STATE_BYTES])


STATE_BYTES = "shardc_state_bytes"
"""The key of `note` for the bytes of state that a node moves."""


def unit_of_copy(node: Node) -> str:
    """The name of the unit that owns the value or the optimizer's state in a copy."""
    return str((node.meta.get("custom") or {}).get(COPIED_FOR, ""))


COPIED_FOR = "shardc_copied_for"
"""The key of `note` for the name of the unit in a copy."""


def note(node: Node, key: str, value: object) -> None:
    """Note a fact on a node; copies of the graph keep the fact."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def facts_of(node: Node) -> dict[str, object]:
    """The facts of shardc that were noted on a node, by key; its label is one of them."""
    noted = node.meta.get("custom") or {}
    return {key: value for key, value in noted.items() if key.startswith("shardc")}


def is_transfer(node: Node) -> bool:
    """Whether the node starts a transfer: a collective, or a copy to or from the host."""
    return is_collective(node) or is_host_copy(node)


def is_wait(node: Node) -> bool:
    """Whether the node waits for a collective, or for a copy to or from the host."""
    return node.op == "call_function" and node.target in _WAITS


def awaited_by(wait: Node) -> Node:
    """The start of the transfer that a wait is for; the operand where another graph started it."""
    return source_of(wait.all_input_nodes[0])


def awaits_reduction(node: Node) -> bool:
    """Whether the node waits for a reduction of gradients of buckets."""
    if not is_wait(node):
        return False
    start = awaited_by(node)
    return is_collective(start) and bool(moved_by(start)) and not brings_parameters(start)


_WAITS = (c10d.wait_tensor.default, WAIT_SAVED, WAIT_STATE)


def our_collectives(gm: GraphModule) -> list[Node]:
    """The collectives of a graph that move buckets, in its order."""
    return [node for node in gm.graph.nodes if is_collective(node) and moved_by(node)]


def returned_and_saved(gm: GraphModule, results: int | None) -> tuple[list[Node], list[Node]]:
    """The outputs of a forward: those of its caller, and the values that it saves.

    Args:
        results: the number of the former (`PassContext.results`).
    """
    outputs = gm.graph.output_node().args[0]
    assert isinstance(outputs, (list, tuple))
    border = len(outputs) if results is None else results
    parts = outputs[:border], outputs[border:]
    returned, saved = ([each for each in part if isinstance(each, Node)] for part in parts)
    return returned, saved


def kind_of(node: Node) -> str:
    """The kind of a node: all_gather, reduce_scatter, all_reduce, all_to_all, wait, else its op."""
    name = str(getattr(node.target, "_opname", node.target))
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "wait")
    return next((kind for kind in kinds if name.startswith(kind)), name)


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers: a second computation gives another value."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def writes(node: Node) -> bool | None:
    """Whether an op writes to its operands; None if the op has no schema."""
    schema = getattr(node.target, "_schema", None)
    return None if schema is None else bool(schema.is_mutable)


def written_by(node: Node) -> set[Node]:
    """The operands that an op writes to, by its schema."""
    if not writes(node):
        return set()
    operands = written_operands(node.target)
    given = [node.args[at] if isinstance(at, int) else node.kwargs.get(at) for at in operands]
    return {leaf for leaf in tree_leaves(given) if isinstance(leaf, Node)}


def memory_of(node: Node) -> Node:
    """The node that has the memory of another one, in the graph of a step."""
    while MEMORY not in node.meta:
        written = writes(node) and sorted(written_by(node))
        if not (written or is_view(node) or is_wait(node)) or not node.all_input_nodes:
            return node
        node = written[0] if written else node.all_input_nodes[0]
    memory: Node = node.meta[MEMORY]
    return memory


def is_view(node: Node) -> bool:
    """Whether the node is a view of its input, at no cost."""
    return node.op == "call_function" and _is_view_op(node.target)


@functools.cache
def _is_view_op(target: object) -> bool:
    return getattr(target, "is_view", False) or target in (operator.getitem, *_ALIASES)


def readers_of(node: Node) -> Iterator[Node]:
    """The readers of a node, through views; the output of the graph too."""
    for user in node.users:
        if is_view(user):
            yield from readers_of(user)
        else:
            yield user


def sources_of(node: Node) -> Iterator[Node]:
    """The nodes that a node reads, through views."""
    return map(source_of, node.all_input_nodes)


def source_of(view: Node) -> Node:
    """The node of which a view is one, through other views; a node itself if it is none."""
    while is_view(view) and view.all_input_nodes:
        view = view.all_input_nodes[0]
    return view


def meta_for_another(node: Node) -> dict[str, Any]:
    """The meta of a node for use on another node: without the inputs of its call."""
    return {key: value for key, value in node.meta.items() if key != "eager_input_vals"}


SEGMENT = "shardc_segment"
"""The key in the meta of inputs that are segments or held buckets, in a joint graph and its halves.
They are there before and after the graph."""

WRITES = "shardc_writes"
"""The key in the meta of a node for the values that the node writes into a buffer."""

MEMORY = "shardc_memory"
"""The key in the meta of a node of a step's graph for the first node over the same memory."""

_ALIASES = (torch.ops.aten._unsafe_view.default,)


def describe_collective(node: Node, by_number: bool = False) -> str:
    """A collective in one line: buckets, kind, specs. `Facts` explains `by_number`."""
    name, moved = getattr(node.target, "_opname", str(node.target)), moved_by(node)
    specs = " and ".join(describe_spec(each.spec) for each in moved)
    units = str([each.unit for each in moved]) if by_number else in_short(labels_of(node))
    return f"{units}: {name} of {specs}"


def describe_spec(spec: UnshardSpec) -> str:
    """A spec in one line, for the error that names a difference between ranks."""
    shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in spec.shapes)
    dtypes = dict.fromkeys([spec.dtype, spec.compute_dtype, spec.reduction.dtype or spec.dtype])
    names = "/".join(map(dtype_name, dtypes))
    wires = (str(wire) for wire in (spec.wire, spec.reduction.wire) if wire is not None)
    return " ".join(
        [f"{spec.numel} {names} over {plural(spec.world_size, 'rank')} ({shapes})", *wires]
    )


_SCOPE = re.compile(r"^[LG]\[['\"]\w+['\"]\]\.?|^getattr\(|_modules\.|_orig_mod\.?")


def module_of(node: Node) -> str:
    """The name of the module whose forward made a node: "layers.0.mlp.up"; "" if not known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", _SCOPE.sub("", path))
    parts = _SCOPE.sub("", path).split(".")
    return ".".join(part for part in parts if part not in ("", "__self__"))


def graph_modules(gm: GraphModule) -> Iterator[GraphModule]:
    """`gm` and the bodies of its higher-order ops (activation checkpointing), outermost first."""
    return (module for module in gm.modules() if isinstance(module, GraphModule))


def body_calls(gm: GraphModule) -> list[tuple[GraphModule, Node]]:
    """The bodies that a graph calls, each with its call."""
    found = []
    for node in gm.graph.find_nodes(op="get_attr"):
        body = getattr(gm, str(node.target), None)
        if isinstance(body, GraphModule):
            found += [(body, call) for call in node.users]
    return found


def body_operands(call: Node, body: Graph) -> Iterator[tuple[Node, Node]]:
    """Pairs (placeholder of the body, operand of the call); a call takes its operands last."""
    operands = [leaf for leaf in tree_leaves(call.args) if isinstance(leaf, Node)]
    placeholders = [node for node in body.nodes if node.op == "placeholder"]
    return zip(reversed(placeholders), reversed(operands), strict=False)
