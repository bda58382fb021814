"""A model of Inductor's fusion: it assigns ops to kernels, and so places reads and writes.

A fusible op joins an earlier kernel that reads or makes one of its operands. The other operands
must be computed before that kernel; one op at most may move up before it. A kernel runs where its
first value must be in memory: results are live from there on, operands until there. Inductor also
weighs the memory traffic that a fusion saves; the model does not.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from shardc.passes.estimate.cost import (
    evaluate,
    first_made,
    in_registers,
    is_empty,
    is_fusible,
    is_matmul,
    is_pointwise,
    is_reduction,
    is_stored_for_reuse,
    product_in,
    runs_on_cpu,
    tensor_bytes,
)
from shardc.passes.nodes import WRITES, is_transfer, is_view, is_wait, reach, readers_of, sources_of
from shardc.runtime import compat

_FAR = 64
"""Inductor fuses no ops with so many stored values between (`can_fusion_increase_peak_memory`)."""

Places = dict[Node, tuple[int, int]]
"""For every node, the indices of the first and the last kernel that computes it."""


@dataclass
class _Kernel:
    """One kernel.

    Attributes:
        place: the index of the node at which it runs.
        number: the count of stored values up to its first value.
        size: the number of elements that its loops go over.
        touched: the stored values that it reads or makes.
        made: the values that it makes.
    """

    place: int
    number: int
    size: float
    touched: set[Node] = field(default_factory=set)
    made: set[Node] = field(default_factory=set)


def places_of_kernels(
    nodes: Sequence[Node], hints: Mapping[Any, float], in_order: bool = False
) -> Places:
    """Place each node: a value in registers in all kernels that read it, other nodes in one.

    `in_order` keeps the place of a kernel on a CPU between two matmuls.
    """
    stretch = list(itertools.accumulate(in_order and keeps_kernels(node) for node in nodes))
    index = {node: number for number, node in enumerate(nodes)}
    registers = in_registers(nodes)
    places: Places = {node: (at, at) for node, at in index.items()}
    places |= {product: places[node] for node, product in sums_of_products(nodes).items()}
    kernels: dict[Node, list[_Kernel]] = {}  # by stored value, the kernels that touch it
    made = 0
    for node in nodes:
        if not _is_loop(node) or node in registers:
            continue
        made += 1
        alone = _is_alone(node)
        stored, inside = _read_by(node, registers, index if alone else {})
        size = max(_elements(each, hints) for each in (node, *stored))
        near = {id(kernel): kernel for each in stored for kernel in kernels.get(each, ())}
        fits = [k for k in near.values() if k.size == size and made - k.number < _FAR and not alone]
        at = _stored_at(node, index)
        fits = [k for k in fits if stretch[k.place] == stretch[at]]
        kernel = _join(sorted(fits, key=lambda k: -k.place), stored, places)
        if kernel is None:
            kernel = _Kernel(at, made, size)
        kernel.made.add(node)
        for each in set() if alone else {node, *stored} - kernel.touched:
            kernel.touched.add(each)
            kernels.setdefault(each, []).append(kernel)
        places[node] = (kernel.place, kernel.place)
        for each in inside:
            known = {kernel.place} if places[each] == (index[each],) * 2 else {*places[each]}
            places[each] = (min(kernel.place, *known), max(kernel.place, *known))
    _move_to_only_reader(nodes, registers, kernels, places, stretch)
    return places


def sums_of_products(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Map each sum that Inductor computes together with a matmul to that matmul."""
    return {node: found for node in nodes if (found := product_in(node)) is not None}


def _move_to_only_reader(
    nodes: Sequence[Node],
    registers: Collection[Node],
    kernels: Mapping[Node, Sequence[_Kernel]],
    places: Places,
    stretch: Sequence[int],
) -> None:
    """Sink a value that is stored for reuse into its reader's kernel, if only one kernel reads it.

    A store would save nothing. The kernel must read the operands of the value anyway.
    """
    for node in reversed(nodes):
        if not _is_loop(node) or node in registers or not is_stored_for_reuse(node):
            continue
        if compat.is_stored_at_once(node):  # so that its operands are freed
            continue
        where = {places.get(reader) for reader in readers_of(node)}
        for kernel in kernels.get(node, ()):
            reads_alone = where == {(kernel.place, kernel.place)} and kernel.place > places[node][0]
            near = stretch[kernel.place] == stretch[places[node][0]]
            if reads_alone and near and _read_by(node, registers, {})[0] <= kernel.touched:
                places[node] = (kernel.place, kernel.place)


def _stored_at(node: Node, index: Mapping[Node, int]) -> int:
    """The index of the node at which a kernel for `node` runs.

    Inductor delays an elementwise value with a single reader until right before that reader.
    """
    several = len(node.users) > 1 and not all(map(is_view, node.users))
    if is_reduction(node) or _is_stored_where_made(node) or several:
        return index[node]
    readers = [index[reader] for reader in readers_of(node) if reader in index]
    return max(index[node], min(readers, default=0) - 1)


def _is_stored_where_made(node: Node) -> bool:
    return is_stored_for_reuse(node) or compat.is_stored_at_once(node)


def is_only_read_inside(node: Node, places: Places) -> bool:
    """Whether the kernel of a value also computes all readers: then no store is needed."""
    readers = list(readers_of(node))
    together = all(places.get(reader) == places[node] for reader in readers)
    return bool(readers) and together and _is_loop(node)


def ends_of_calls(nodes: Sequence[Node], places: Places) -> dict[int, int]:
    """By the place of a kernel on a CPU, the last place before the kernel's call returns.

    Inductor puts consecutive kernels into one call, with only views and empty tensors between them.
    It allocates all results of the kernels before the call, and frees all operands after the call.
    """
    registers = in_registers(nodes)
    loops = {n for n in nodes if _is_loop(n) and n not in registers and runs_on_cpu(n)}
    borders = {places[n][0] for n in nodes if n not in loops and _ends_call(n)}
    ends, end = dict[int, int](), len(nodes) - 1
    starts = {places[n][0] for n in loops}
    for place in reversed(range(len(nodes))):
        if place in starts:
            ends[place] = end
        if place in borders:
            end = place - 1
    return ends


def keeps_kernels(node: Node) -> bool:
    """Whether kernels in order stay on their side of a node: on CPUs, an op that is no loop.

    Transfers and waits do not count.
    """
    return _ends_call(node) and runs_on_cpu(node) and not is_transfer(node) and not is_wait(node)


def _ends_call(node: Node) -> bool:
    """Whether a node runs code of its own, so that kernels before and after it are two calls."""
    if node.op != "call_function" or _is_loop(node) or is_view(node) or is_empty(node):
        return False
    return first_made(node) is not None


def written_in_place(
    nodes: Sequence[Node],
    places: Places,
    last: Mapping[Node, int],
    calls: Mapping[str, int],
) -> dict[Node, Node]:
    """Map each value that an elementwise op writes in place to the operand that it overwrites.

    The operand is stored, has the size of the value, and no later kernel reads it. In the same
    kernel, the value is computed from all other readers of the operand. A call overwrites only its
    own values, not its operands.

    Args:
        last: by the node that made a storage, the place of the last kernel that reads the storage.
        calls: by name of a node, the call of a folded body that contains it; absent outside calls.
    """
    registers = in_registers(nodes)
    read: dict[tuple[Node, int], list[Node]] = {}
    for node in nodes:
        if _is_loop(node) and node not in registers:
            for source in sorted(_read_by(node, registers, {})[0]):
                read.setdefault((source, places[node][0]), []).append(node)
    found: dict[Node, Node] = {}
    for (source, place), (*others, node) in read.items():
        is_given = calls.get(node.name) not in (None, calls.get(source.name))
        is_stored = not is_only_read_inside(source, places)
        is_made_here = is_matmul(source) or _is_loop(source)
        is_free = last.get(source) == place and is_stored and is_made_here and not is_given
        is_free = is_free and _come_before(others, node, place, places)
        if is_free and node not in found and is_pointwise(node) and _is_alike(source, node):
            found[node] = source
    return found


def _come_before(others: Collection[Node], node: Node, place: int, places: Places) -> bool:
    """Whether the kernel at `place` computes `node` from all of its values `others`."""
    if not others:
        return True

    def inside(node: Node) -> list[Node]:
        given = (each for each in sources_of(node) if each in places)
        return [each for each in given if places[each][0] <= place <= places[each][1]]

    return reach(inside, node).issuperset(others)


def _is_alike(source: Node, node: Node) -> bool:
    """Whether two values have one layout in memory, and no view of `source` changes the layout."""
    a, b = source.meta.get("val"), node.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype:
        return False
    views = reach(lambda n: filter(is_view, n.users), source) - {source}
    flat = all(getattr(view.target, "overloadpacket", None) in _FLAT for view in views)
    sized = tensor_bytes(a) == tensor_bytes(b)
    return flat and sized and a.is_contiguous() and b.is_contiguous()


_FLAT = {torch.ops.aten.view, torch.ops.aten._unsafe_view, torch.ops.aten.reshape}


def _join(kernels: list[_Kernel], stored: set[Node], places: Places) -> _Kernel | None:
    """Return the first of `kernels` that can read `stored`, and move late operands to its place."""
    for kernel in kernels:
        late = _computed_after(kernel, stored, places)
        if late is not None:
            places.update(dict.fromkeys(late, (kernel.place, kernel.place)))
            return kernel
    return None


def _computed_after(kernel: _Kernel, stored: set[Node], places: Places) -> set[Node] | None:
    """The nodes that must move up for `kernel` to read `stored`: at most one op, and views.

    None if more ops would have to move, or if `stored` depends on the kernel or on a later transfer
    or wait.
    """
    late, todo = set[Node](), list(stored - kernel.made)
    while todo:
        node = todo.pop()
        if node in kernel.made or is_transfer(node) or is_wait(node):
            if node in kernel.made or places[node][0] > kernel.place:
                return None
        elif node not in late and places[node][0] > kernel.place:
            late.add(node)
            todo += [each for each in node.all_input_nodes if each in places]  # not constants
    return late if sum(not is_view(node) for node in late) <= 1 else None


def _is_loop(node: Node) -> bool:
    return node.op == "call_function" and is_fusible(node) and WRITES not in node.meta


def _is_alone(node: Node) -> bool:
    """Whether the kernel of a node joins no other: on CPUs, a sum of rows (a bias's gradient)."""
    if not is_reduction(node) or len(node.args) < 2 or not runs_on_cpu(node):
        return False
    value, dims = node.all_input_nodes[0].meta.get("val"), node.args[1]
    if not isinstance(value, Tensor) or value.ndim < 2 or not isinstance(dims, (list, tuple)):
        return False
    return bool(dims) and all(
        isinstance(dim, int)
        and -value.ndim <= dim < value.ndim
        and dim % value.ndim < value.ndim - 1
        for dim in dims
    )


def _is_computed_twice(operand: Node, node: Node, index: Mapping[Node, int]) -> bool:
    """Whether `node` computes anew an operand that is stored later, for another reader.

    The first reader that needs the operand in memory comes after `node`.
    """
    if not _is_loop(operand) or is_reduction(operand) or _is_stored_where_made(operand):
        return False
    readers = (reader for reader in readers_of(operand) if reader in index)
    needs = [index[reader] for reader in readers if not _is_loop(reader)]
    return min(needs, default=-1) > index[node]


def _read_by(
    node: Node, registers: Collection[Node], index: Mapping[Node, int]
) -> tuple[set[Node], set[Node]]:
    """The stored values that a kernel for `node` reads, and the values that it keeps in registers.

    With `index`, the places of all nodes, the kernel computes anew operands that are stored later.
    """
    stored, computed = set[Node](), set[Node]()
    todo = list(sources_of(node))
    while todo:
        operand = todo.pop()
        if operand in computed:
            continue
        inside = _is_loop(operand) and operand in registers
        if inside or (index and _is_computed_twice(operand, node, index)):
            computed.add(operand)
            todo += sources_of(operand)
        else:
            stored.add(operand)
    return stored, computed


def _elements(node: Node, hints: Mapping[Any, float]) -> float:
    """The number of elements of a node's largest tensor.

    The loops of a kernel go over the elements of the largest tensor that they touch.
    """
    values = (leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor))
    return max((evaluate(tensor_bytes(v), hints) / v.element_size() for v in values), default=0)
