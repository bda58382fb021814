"""Specs: values that shape the code which gathers and reduces a bucket, and that graphs can name.

A graph carries an interned signature instead of names or ranks, so identical units trace to
identical code, and units with different specs never share code.
"""

import hashlib
import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardc.runtime.layout.wire_format import WireFormat


class Hierarchy(NamedTuple):
    """The two steps in which all ranks of several nodes gather: across nodes, then inside each.

    Attributes:
        nodes, across: the number of nodes, and the group of the first step: one rank of each node.
        local, inside: the ranks a node, and the group of the second step: the ranks of one node.
    """

    nodes: int
    across: str
    local: int
    inside: str


@dataclass(frozen=True)
class Reduction:
    """The way of a bucket's gradient back to the segments.

    Attributes:
        op: "sum" or "avg".
        dtype: the dtype to reduce and accumulate in; None for the dtype of the gradient.
        group: the communicator of the reduce-scatter; None for the group of the gather.
        predivide, postdivide: the divisors of the gradient before and after the reduction.
        divide_later: the divisor that the bucket applies, in place, when the graph is done: a last
            division in the graph would only be one more kernel to compile.
        replicas: the group over which copies of the segment are reduced; None without copies.
        copies: the number of copies of the model.
        all_reduce: False leaves out the reduction over copies; the bucket adds up the gradients
            that were reduced over one copy only.
        sync: False leaves out the whole reduction; the bucket adds up unreduced gradients.
        pending, partial: whether sums of earlier backwards are added to this gradient: of unreduced
            gradients (pending), of gradients that were reduced over one copy (partial).
        function: the user's function in place of the reduce-scatter, by key.
        scatter: the user's communication object for the reduce-scatter, by key.
        memory: where the buffers of the reduce-scatter come from; None for the device's allocator.
        hook: the user's function that is given the reduced gradient, by key.
        hook_sees_mean: whether the hook runs after all divisions, as where the backend averages.
        wire: the wire format of the gradient; None if it travels in its dtype. With `replicas` the
            format is for the messages among copies; with `hierarchy`, across nodes.
        hierarchy: the steps of a reduce-scatter, last one first; None for one step.
    """

    op: str = "sum"
    dtype: torch.dtype | None = None
    group: str | None = None
    predivide: float = 1.0
    postdivide: float = 1.0
    divide_later: float = 1.0
    replicas: str | None = None
    copies: int = 1
    all_reduce: bool = True
    sync: bool = True
    pending: bool = False
    partial: bool = False
    function: str | None = None
    scatter: str | None = None
    memory: str | None = None
    hook: str | None = None
    hook_sees_mean: bool = True
    wire: WireFormat | None = None
    hierarchy: Hierarchy | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds of the collectives, in order."""
        if self.replicas is None:
            last = "reduce_scatter" if self.wire is None else "all_to_all"
            return [last] if self.hierarchy is None else ["reduce_scatter", last]
        across = ["all_reduce"] if self.wire is None else ["all_to_all", "all_to_all"]
        return ["reduce_scatter", *(across if self.all_reduce else [])]


@dataclass(frozen=True)
class UnshardSpec:
    """The facts that shape the code to unshard a bucket; equal on every rank.

    Attributes:
        dtype: the dtype of the segment and of its gradient.
        world_size, group: the number of ranks that hold the segments of one copy, and their group.
        pieces: the bucket's consecutive parts: (elements, slot index or None for padding).
        shapes, trainable: the shape of each slot, and whether it is trained.
        reshard_after_forward: whether the gathered bucket is freed after the forward.
        reduction: the way of the gradient back to the segments.
        everyone: the group of all ranks that run the same graph, copies included; None: `group`.
        param_dtype: the dtype that the segment is cast to before the gather; None without a cast.
        device: the device that the bucket is gathered on, if the segment lies on another.
        recut: (ranks, group) among which the backward gathers; None for all ranks.
        held: whether the bucket is gathered already: the graph is given the whole bucket.
        kept: whether the graph that gathers the bucket gives it out whole, for the next forward.
        outside: whether the eager runtime gathers the bucket: several graphs of one forward read
            the bucket.
        gather: the user's communication object for the all-gather, by key.
        memory: where the buffer of the all-gather comes from, as in `Reduction`.
        extension: the extension of the parameter's subclass, by key: it chooses the tensors to send
            and makes the full parameter (`tensor.extension`).
        wire: the wire format of segments; None if they travel in the compute dtype.
        hierarchy: the steps of a gather; None for one step.
        hints: wishes for the schedule, here so that a change of a wish compiles anew.
    """

    dtype: torch.dtype
    world_size: int
    group: str
    pieces: tuple[tuple[int, int | None], ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: tuple[bool, ...]
    reshard_after_forward: bool = True
    reduction: Reduction = Reduction()
    everyone: str | None = None
    param_dtype: torch.dtype | None = None
    device: str | None = None
    recut: tuple[int, str] | None = None
    held: bool = False
    kept: bool = False
    outside: bool = False
    gather: str | None = None
    memory: str | None = None
    extension: str | None = None
    wire: WireFormat | None = None
    hierarchy: Hierarchy | None = None
    hints: tuple[object, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the whole bucket."""
        return sum(size for size, _ in self.pieces)

    @property
    def starts(self) -> dict[int, int]:
        """The first element of each slot."""
        ends = itertools.accumulate(size for size, _ in self.pieces)
        pairs = zip(ends, self.pieces, strict=True)
        return {slot: end - size for end, (size, slot) in pairs if slot is not None}

    def table(self, slot: int) -> tuple[int, int, int]:
        """The place of a parameter of two dims: its first element, its rows, their width."""
        rows, width = self.shapes[slot]
        return self.starts[slot], rows, width

    @property
    def is_made_later(self) -> bool:
        """Whether full parameters are made from the gathered message, in storage of their own."""
        return self.extension is not None or self.wire is not None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the gathered parameters."""
        return self.param_dtype or self.dtype

    @property
    def names_objects(self) -> bool:
        """Whether the code calls objects of the user by key (`intern_object`)."""
        r = self.reduction
        keys = (self.gather, self.extension, r.function, r.scatter, r.hook)
        return any(key is not None for key in keys)

    @property
    def extras(self) -> tuple[str, ...]:
        """The inputs of the graph beside the segment, in order.

        full: the gathered bucket, `(W*S,)`. sink: the leaf that collects unreduced gradients.
        pending: the sum of unreduced gradients, `(W*S,)`. partial: the sum of gradients that were
        reduced over one copy of the model only, `(S,)`.
        """
        r = self.reduction
        flags = {"full": self.held, "sink": not r.sync, "pending": r.pending, "partial": r.partial}
        return tuple(name for name, flag in flags.items() if flag)


_SPECS: dict[str, UnshardSpec] = {}


def intern_spec(spec: UnshardSpec) -> str:
    """The signature of `spec`: the same string for equal specs, on every rank and in every run."""
    signature = hashlib.sha256(repr(spec).encode()).hexdigest()[:16]
    _SPECS[signature] = spec
    return signature


def spec_of(signature: str) -> UnshardSpec:
    """The spec that `intern_spec` gave this signature."""
    return _SPECS[signature]


def any_spec() -> bool:
    """Whether any bucket was made in this process."""
    return bool(_SPECS)


class Moved(NamedTuple):
    """A bucket that a graph gathers and reduces: the fact that its collectives carry.

    Attributes:
        signature: the signature of its spec.
        position: the input of the Dynamo graph that is its segment; -1 in code that several calls
            share, each with a bucket of its own.
        label: the label of the bucket.
        unit: the number of its unit.
    """

    signature: str
    position: int = -1
    label: str = "?"
    unit: int = -1

    @property
    def spec(self) -> UnshardSpec:
        """The spec of the bucket."""
        return spec_of(self.signature)


def divide_factors(factor: float, dtype: torch.dtype) -> tuple[float, float]:
    """Divisors before and after a sum, whose product is `factor`.

    A division after the sum touches less data. The range of float16 is too small for that: the
    divisor before the sum is about the square root, a power of two, which loses nothing.
    """
    if dtype != torch.float16:
        return 1.0, float(factor)
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return before, factor / before


# -- objects of the user that graphs call ---------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Interned:
    """An object that graphs call by key, as long as something refers to this instance."""

    key: str
    thing: object = field(repr=False)


_objects: weakref.WeakValueDictionary[str, Interned] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def intern_object(thing: object) -> Interned:
    """`thing` with a key, the same on all ranks that intern in the same order."""
    for known in _objects.values():
        if known.thing is thing:
            return known
    key = f"{getattr(thing, '__name__', type(thing).__name__)}:{next(_numbers)}"
    interned = _objects[key] = Interned(key, thing)
    return interned


def name_of_object(key: str) -> str:
    """The name of the object with this key."""
    return key.rpartition(":")[0]


def object_of(key: str) -> Any:
    """The object to which `intern_object` gave this key."""
    return _objects[key].thing
