"""Liveness: the bytes that a graph holds after each node.

A storage lives from the node that makes it to the last one that reads it or a view of it. Operands
and results of a collective live until its wait, because the backend keeps them; so do the operands
of a copy to the host. Inputs belong to the caller. In a backward graph they are the saved tensors,
which are freed after their last use. Optimizer state that waits on the host is subtracted, because
the static bytes of a step include it.

Under Inductor, elementwise values that only elementwise ops or reductions read are never stored:
they stay in the registers of one fused kernel (`fused`). On CPUs, kernels that follow each other
are one call, which holds its operands until the last of them has run. That is a model: a kernel
that could not be fused stores more.
"""

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardc.passes.estimate.cost import (
    evaluate,
    in_registers,
    is_fusible,
    is_matmul,
    symbol_hints,
    tensor_bytes,
    transfer_bytes,
)
from shardc.passes.estimate.kernels import (
    ends_of_calls,
    is_only_read_inside,
    places_of_kernels,
    sums_of_products,
    written_in_place,
)
from shardc.passes.nodes import (
    FETCH,
    FETCH_STATE,
    RETURN,
    SAVE,
    SEGMENT,
    SEND_STATE,
    WAIT_STATE,
    brings_parameters,
    is_all_gather,
    is_collective,
    is_transfer,
    is_view,
    is_wait,
    kind_of,
    moved_by,
    readers_of,
    results_of,
    state_bytes,
    waits_for,
)
from shardc.runtime.layout.spec import Moved

Storages = Mapping[str, tuple[str, Any]]
"""See `Liveness.storages`."""
Saved = Mapping[str, Moved | None]
"""See `Liveness.kept`."""


@dataclass(frozen=True)
class Gathering:
    """A gathered bucket in a graph: its label, its bytes, the first and last node that hold it."""

    label: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Liveness:
    """Bytes that a graph holds.

    Attributes:
        nodes: the names of the graph's nodes, in order.
        live: bytes after each of them, inputs included where the graph frees them.
        gathered: the part of `live` in gathered buckets, and in values made of them alone.
        gradients: the part of `live` in gradients that will be reduced, or are.
        inputs: bytes of the inputs at the start.
        outputs: bytes of the outputs that are not inputs.
        kept: the outputs that are gathered buckets or views of them, by name: a forward saves
            them for its backward. Values that are made of gathered buckets (casts) have None.
        storages: by the name of an output, the first output in its storage, and the bytes of the
            storage.
        away: bytes of optimizer state that wait on the host after each node; `live` is less by
            them.
        gatherings: the gathered buckets in `gathered`; values that are made of them, or of
            messages, are left out.
    """

    nodes: tuple[str, ...]
    live: tuple[int, ...]
    gathered: tuple[int, ...]
    gradients: tuple[int, ...]
    inputs: int
    outputs: int
    kept: Saved
    storages: Storages
    away: tuple[int, ...] = ()
    gatherings: tuple[Gathering, ...] = ()

    @property
    def peak(self) -> int:
        """The largest of `live`."""
        return max(self.live, default=0)

    @property
    def peak_node(self) -> str | None:
        """The name of the node after which `live` is largest."""
        return self.nodes[self.live.index(self.peak)] if self.live else None

    def live_with(self, held: Mapping[str, int]) -> list[int]:
        """`live` if some buckets, by label their bytes, were gathered from before to after."""
        live = [nbytes + sum(held.values()) for nbytes in self.live]
        for each in self.gatherings:
            if each.label in held:
                for place in range(each.first, min(each.last + 1, len(live))):
                    live[place] -= each.nbytes
        return live


def measure_liveness(
    gm: GraphModule,
    *,
    owns_inputs: bool,
    fused: bool = False,
    in_order: bool = False,
    clones: bool = False,
    gathered: Saved | None = None,
    held: Mapping[str, int] | None = None,
    hints: Mapping[Any, int] | None = None,
    saved: Storages | None = None,
    calls: Mapping[str, int] | None = None,
    workspace: int = 0,
) -> Liveness:
    """The bytes that `gm` holds after each node, in its order; segments are not counted.

    Args:
        owns_inputs: whether inputs are freed after their last use (a backward graph).
        fused: leave out the values that Inductor keeps in registers.
        in_order: kernels on CPUs stay between the matmuls that they are between.
        clones: the backend clones the inputs of reductions, until the wait (gloo).
        gathered: the inputs that are gathered buckets, `Liveness.kept` of the forward.
        held: the bytes of buckets that stay gathered around the graph, by label.
        hints: the values of symbolic sizes (default: those that it was traced with).
        saved: the storages of the forward whose backward this is.
        calls: the call of a folded body that nodes lie in, by name (`fold_repeats.calls_of`).
        workspace: bytes that each matmul takes for itself (`hardware.matmul_bytes`).
    """
    hints = symbol_hints(gm) if hints is None else hints
    nodes = tuple(node for node in gm.graph.nodes if node.op in ("placeholder", "call_function"))
    roots = storage_roots(gm, saved, apart=True)
    places = {n: (i, i) for i, n in enumerate(nodes)}
    if fused:
        places = places_of_kernels(nodes, hints, in_order)
    places |= {n: places[n.all_input_nodes[0]] for n in roots.values() if _is_item(n)}
    last = _last_uses(nodes, roots, places)
    unstored, over = set[Node](), dict[Node, Node]()
    if fused:
        unstored = {*in_registers(nodes), *(n for n in nodes if is_only_read_inside(n, places))}
        unstored.update(sums_of_products(nodes).values())
        over = written_in_place(nodes, places, last, calls or {})
        ends = ends_of_calls(nodes, places)
        last = {root: ends.get(at, at) for root, at in last.items()}
        last |= {source: places[node][0] - 1 for node, source in over.items()}
    sizes = {
        root: 0 if root in unstored else int(evaluate(_own_bytes(root), hints))
        for root in roots.values()
        if SEGMENT not in root.meta
    }
    inputs = {node for node in nodes if node.op == "placeholder"}
    for node in inputs & sizes.keys():
        if saved and node.name in saved:  # it may be a part of a held storage
            sizes[node] = int(evaluate(saved[node.name][1], hints))
    counted = sizes if owns_inputs else {r: s for r, s in sizes.items() if r not in inputs}
    kinds, moved = _kinds(gm, roots, gathered or {}), _moved(roots, gathered or {})
    for root in moved.keys() & inputs:
        if moved[root].spec.kept:  # the bucket holds it for the next forward
            last[root] = len(nodes)
    spans = {root: (0 if root in inputs else places[root][0], last[root]) for root in counted}
    changes = [
        *((kinds.get(root, _OTHER), size, *spans[root]) for root, size in counted.items()),
        *_clones(nodes, roots, sizes, every=clones),
        *_messages_of_rows(nodes, hints),
        *_workspaces(nodes, places, sizes, over, workspace),
        *_away(nodes),
        *((_GATHERED, nbytes, 0, len(nodes)) for nbytes in (held or {}).values()),
    ]
    curves = _curves(changes, len(nodes))
    returned = gm.graph.output_node().all_input_nodes
    results = {roots[n] for n in returned if n in roots}
    return Liveness(
        tuple(node.name for node in nodes),
        tuple(map(sum, zip(*curves.values(), strict=True))),
        tuple(curves[_GATHERED]),
        tuple(curves[_GRADIENTS]),
        sum(size for root, size in counted.items() if root in inputs),
        sum(size for root, size in counted.items() if root in results - inputs),
        {
            node.name: moved.get(roots.get(node, node))
            for node in returned
            if kinds.get(roots.get(node, node)) == _GATHERED
        },
        _storages(returned, roots),
        tuple(-nbytes for nbytes in curves[_AWAY]),
        (
            *(Gathering(label, nbytes, 0, len(nodes)) for label, nbytes in (held or {}).items()),
            *(
                Gathering(moved[root].label, size, *spans[root])
                for root, size in counted.items()
                if root in moved and not moved[root].spec.is_made_later
            ),
        ),
    )


_Held = tuple[str, int, int, int]
"""The kind and number of bytes that are held, from the first to the last node, by index."""


def _clones(
    nodes: Sequence[Node], roots: Mapping[Node, Node], sizes: Mapping[Node, int], every: bool
) -> Iterator[_Held]:
    """The clones of inputs of reductions: of every one, or those by ops that clone."""
    index = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        if (every or node.target is _COPIES) and kind_of(node) == "reduce_scatter":
            size = sum(sizes.get(roots[i], 0) for i in node.all_input_nodes if i in roots)
            end = max((index[wait] for wait in waits_for(node)), default=len(nodes))
            yield _GRADIENTS, size, index[node], end


def _messages_of_rows(nodes: Sequence[Node], hints: Mapping[Any, int]) -> Iterator[_Held]:
    """The messages that are sent and received while rows of a table are fetched or returned."""
    for index, node in enumerate(nodes):
        if node.target in (FETCH, RETURN):
            nbytes = 2 * int(evaluate(transfer_bytes(node), hints))
            yield _OTHER, nbytes, index, index


def _workspaces(
    nodes: Sequence[Node],
    places: Mapping[Node, tuple[int, int]],
    sizes: Mapping[Node, int],
    over: Mapping[Node, Node],
    nbytes: int,
) -> Iterator[_Held]:
    """The workspaces of matmuls, free before a kernel at the same place reads the results."""
    if not nbytes:
        return
    kernels: dict[tuple[int, int], set[Node]] = {}
    for node in filter(is_fusible, nodes):
        kernels.setdefault(places[node], set()).add(node)
    for matmul in filter(is_matmul, nodes):
        place, more = places[matmul][0], 0
        kernel = kernels.get((place, place), set())
        if not kernel.isdisjoint(readers_of(matmul)):
            before = sum(sizes.get(over[node], 0) for node in kernel & over.keys())
            more = sum(sizes.get(node, 0) for node in kernel) - before
        yield _OTHER, max(0, nbytes - more), place, place


def _away(nodes: Sequence[Node]) -> Iterator[_Held]:
    """The optimizer state that waits on the host, as bytes less: from its arrival there in a
    forward, until its way back in a backward."""
    for index, node in enumerate(nodes):
        if node.target is WAIT_STATE:
            yield _AWAY, -state_bytes(node), index, len(nodes)
        elif node.target is FETCH_STATE and index:
            yield _AWAY, -state_bytes(node), 0, index - 1


def _curves(held: Iterable[_Held], length: int) -> dict[str, list[int]]:
    """The bytes of each kind that are held after each of `length` nodes."""
    steps = {kind: [0] * (length + 2) for kind in _KINDS}
    for kind, nbytes, first, last in held:
        steps[kind][first] += nbytes
        steps[kind][min(last, length) + 1] -= nbytes
    return {kind: list(itertools.accumulate(steps[kind][:length])) for kind in _KINDS}


_KINDS = _GATHERED, _GRADIENTS, _AWAY, _OTHER = "gathered", "gradients", "away", "other"


def _kinds(
    gm: GraphModule, roots: Mapping[Node, Node], gathered: Collection[str]
) -> dict[Node, str]:
    """The kind of every storage, by the node that made it; values of the model are left out.

    Values that are made of gathered buckets alone (casts) count as gathered. Operands and results
    of a reduction are gradients.
    """
    kinds: dict[Node, str] = {}
    for node in gm.graph.nodes:
        if is_all_gather(node) or node.name in gathered:
            kinds[node] = _GATHERED
        elif is_collective(node) and not brings_parameters(node):
            given = [roots[operand] for operand in node.all_input_nodes if operand in roots]
            kinds.update(dict.fromkeys([node, *results_of(node), *given], _GRADIENTS))
        elif node.all_input_nodes and node.op == "call_function":
            made_of = {kinds.get(roots.get(operand, operand)) for operand in node.all_input_nodes}
            if made_of == {_GATHERED}:
                kinds.setdefault(roots.get(node, node), _GATHERED)
    for pack in gm.graph.find_nodes(op="call_function", target=torch.ops.shardc.pack.default):
        parts = [part for part in pack.all_input_nodes if set(part.users) == {pack}]
        kinds.update({roots[part]: _GRADIENTS for part in parts if part in roots})
    return kinds


def _moved(roots: Mapping[Node, Node], gathered: Saved) -> dict[Node, Moved]:
    """The bucket of each storage that is the result of a gather, or one that the forward saved."""
    found: dict[Node, Moved] = {}
    for root in dict.fromkeys(roots.values()):
        start = root.all_input_nodes[0] if _is_item(root) else root
        if is_all_gather(start):
            moved = moved_by(start)
            index = int(root.args[1]) if start is not root else 0  # type: ignore[arg-type]
            if len(moved) > index and (start is not root or len(moved) == 1):
                found[root] = moved[index]
        elif (saved := gathered.get(root.name)) is not None:
            found[root] = saved
    return found


def _storages(returned: Iterable[Node], roots: Mapping[Node, Node]) -> Storages:
    """`Liveness.storages` of the outputs."""
    first: dict[Node, str] = {}
    made = [(node.name, roots[node]) for node in returned if node in roots]
    return {
        name: (first.setdefault(root, name), 0 if SEGMENT in root.meta else _own_bytes(root))
        for name, root in made
    }


def storage_roots(
    gm: GraphModule, saved: Storages | None = None, apart: bool = False
) -> dict[Node, Node]:
    """For every node that gives a tensor, the node that made its storage.

    With `apart`, each result of an op with several results has a storage of its own.
    """
    roots: dict[Node, Node] = {}
    first: dict[str, Node] = {}
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function") or node.meta.get("val") is None:
            continue
        if node.op == "placeholder":
            key = saved[node.name][0] if saved and node.name in saved else node.name
            roots[node] = first.setdefault(key, node)
            continue
        source = next((i for i in node.all_input_nodes if i in roots), None)
        aliases = is_view(node) or is_wait(node) or _writes_its_input(node)
        aliases = aliases and not (apart and _is_item(node))
        roots[node] = roots[source] if aliases and source is not None else node
    return roots


def _is_item(node: Node) -> bool:
    """Whether a node is one of several results of an op, each in memory of its own."""
    made = node.all_input_nodes[0] if node.target is operator.getitem else None
    if made is None or is_view(made) or is_wait(made):
        return False
    return not is_transfer(made) or isinstance(made.args[0], (list, tuple))  # coalesced


def _writes_its_input(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema and schema.returns and schema.returns[0].alias_info is not None)


def _last_uses(
    nodes: Sequence[Node], roots: Mapping[Node, Node], places: Mapping[Node, tuple[int, int]]
) -> dict[Node, int]:
    """The index of the last node that reads each storage."""
    end = len(nodes)
    last = {root: places[root][0] for root in roots.values()}
    for node, root in roots.items():
        for user in (user for user in node.users if not is_view(user)):  # views have users
            last[root] = max(last[root], places[user][1] if user in places else end)
    for node in nodes:  # the operands of a transfer are kept until its wait
        if is_transfer(node):
            wait = max((places[w][0] for w in waits_for(node)), default=places[node][0])
            for operand in node.all_input_nodes:
                if operand in roots:
                    last[roots[operand]] = max(last[roots[operand]], wait)
    return last


_COPIES = torch.ops.shardc.reduce_scatter.default
"""An op that copies its input into a buffer of its own, and reduces that."""


def _own_bytes(node: Node) -> Any:
    """The bytes of the storage that a node makes on the device; 0 if it makes none."""
    value = node.meta.get("val")
    if node.target in (torch.ops.shardc.to_host.default, SAVE, SEND_STATE):
        return 0
    if node.users and isinstance(value, (list, tuple)) and all(map(_is_item, node.users)):
        return 0  # its results are counted, each by itself
    return tensor_bytes(value) if isinstance(value, (Tensor, list, tuple)) else 0
