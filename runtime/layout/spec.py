"""Specs: values that shape the code which gathers and reduces a bucket, and that graphs can name.

A graph carries an interned signature instead of names or ranks, so identical units trace to
identical code, and units that differ in anything that shapes the graph never share it.
"""

import hashlib
import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardc.runtime.layout.wire_format import WireFormat


class Hierarchy(NamedTuple):
    """The two steps in which all ranks of several nodes gather: across nodes, then inside of each.

    Attributes:
        nodes, across: one rank of each node; the first step goes among them.
        local, inside: the ranks of one node; the second step goes among them.
    """

    nodes: int
    across: str
    local: int
    inside: str


@dataclass(frozen=True)
class Reduction:
    """How the gradient of a bucket travels back to the segments.

    Attributes:
        op: "sum" or "avg".
        dtype: what it is reduced and accumulated in; None for the dtype it comes in.
        group: the communicator of the reduce-scatter where it is not that of the gather.
        predivide, postdivide: what it is divided by before and after.
        divide_later: what the bucket divides by, in place, when the graph is done: where nothing
            follows the division in the graph, a kernel for it would only have to be compiled.
        replicas: the group over which copies of the segment are reduced, if there are `copies`.
        all_reduce: False leaves that out; the bucket adds up what was not reduced over copies.
        sync: False leaves out all of it; the bucket adds up what was not reduced.
        pending, partial: whether such sums of earlier backwards are added to this gradient.
        function: the user's function in place of the reduce-scatter, by key.
        scatter: the user's communication object for the reduce-scatter, by key.
        memory: where the buffers of the reduce-scatter come from; None for the device's allocator.
        hook: the user's function that is given the reduced gradient, by key.
        hook_sees_mean: whether that is after all divisions, as where the backend averages.
        wire: how it travels, where that is not in its dtype; with `replicas`, among those; with
            `hierarchy`, across nodes.
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
        """The collectives that follow each other, by kind."""
        if self.replicas is None:
            last = "reduce_scatter" if self.wire is None else "all_to_all"
            return [last] if self.hierarchy is None else ["reduce_scatter", last]
        across = ["all_reduce"] if self.wire is None else ["all_to_all", "all_to_all"]
        return ["reduce_scatter", *(across if self.all_reduce else [])]


@dataclass(frozen=True)
class UnshardSpec:
    """All that shapes the code that unshards a bucket; equal on every rank.

    Attributes:
        dtype: of the segment and of its gradient.
        world_size, group: the ranks that hold the segments of one copy.
        pieces: the bucket's consecutive parts: (elements, slot index or None for padding).
        shapes, trainable: of the slots.
        reshard_after_forward: whether the gathered bucket is freed after the forward.
        reduction: how the gradient travels back.
        everyone: the group of all ranks that run the same graph, copies included; None: `group`.
        param_dtype: what the segment is cast to before it is gathered, if it is.
        device: the device it is gathered on where the segment lies on another.
        recut: (ranks, group) among which the backward gathers, where not among all.
        held: whether the bucket is gathered already: the graph is given all of it.
        outside: whether the eager runtime gathers it: several graphs of one forward read it.
        gather: the user's communication object for the all-gather, by key.
        memory: where the buffer of the all-gather comes from, as in `Reduction`.
        extension: what the parameter sends and makes of what it gets, by key, where its subclass
            says that (`tensor.extension`).
        wire: how segments travel, where that is not in the dtype that they are computed in.
        hierarchy: the steps of a gather; None for one step.
        hints: wishes for the schedule, here so that a change of them compiles anew.
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
        """Where a parameter of two dimensions is: its first element, its rows, their width."""
        rows, width = self.shapes[slot]
        return self.starts[slot], rows, width

    @property
    def is_made_later(self) -> bool:
        """Whether what is computed with is made of what arrives, in memory of its own."""
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
        pending: what it has collected, `(W*S,)`. partial: the same of one segment, `(S,)`.
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
        signature: of its spec.
        position: the input of the Dynamo graph that is its segment; -1 in code that several calls
            share, each with a bucket of its own.
        label: its name.
        unit: the number of its unit.
    """

    signature: str
    position: int = -1
    label: str = "?"
    unit: int = -1

    @property
    def spec(self) -> UnshardSpec:
        """The spec of its code."""
        return spec_of(self.signature)


def divide_factors(factor: float, dtype: torch.dtype) -> tuple[float, float]:
    """Divisors before and after a sum, whose product is `factor`.

    Dividing after touches less data. float16 has too small a range for it: there about the square
    root is divided before, as a power of two, which loses nothing.
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
    """An object that graphs call by its key, as long as something holds this."""

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
