"""Layouts: the rectangles of the trainers' tensors that each tensor of a receiver is made of.

A receiver of an inference engine holds fused and cut weights: rows of q, k and v in one tensor, its
own experts in another. A `Piece` is one such rectangle. `LayoutBuilder` cuts by the rules of vLLM
and SGLang (`packed_modules_mapping`, `stacked_params_mapping`): fused weights lie one after the
other along dim 0, k and v heads are repeated where there are fewer heads than ranks, vocabularies
are padded to a multiple of 64. Where experts do not divide, the first ranks have one more.

Left out: sources that a receiver holds transposed, and quantised destinations.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardc.runtime.checks.words import plural

Shape = tuple[int, ...]
Cut = Literal["rows", "columns", "none"]


class Piece(NamedTuple):
    """A rectangle of a source, and its place in a destination.

    Attributes:
        source: the name of the trainers' tensor.
        start, stop: the slice of each dim of the source.
        at: the place of the first element in the destination. Where the two tensors differ in the
            number of dims, the leading dims of the rectangle have size 1.
    """

    source: str
    start: Shape
    stop: Shape
    at: Shape


class Destination(NamedTuple):
    """A tensor of a receiver. Elements outside of its pieces stay as they are."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """The tensors that one receiving rank wants, by name."""

    tensors: Mapping[str, Destination]

    def empty(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Make tensors of zeros for all destinations."""
        return {
            name: torch.zeros(one.shape, dtype=one.dtype, device=device)
            for name, one in self.tensors.items()
        }


@dataclass
class LayoutBuilder:
    """A builder of the layout of one rank of a TP x EP grid.

    Attributes:
        sources: shapes and dtypes of the trainers' tensors.
        tp, tp_rank: the tensor-parallel ranks and this rank among them.
        ep, ep_rank: the ranks over which experts are dealt out, and this rank among them.
        expert_tp, expert_tp_rank: the ranks that cut each expert, and this rank among them.
        dtype: the dtype of floating-point destinations; None: the dtype of the source.
    """

    sources: Mapping[str, tuple[Shape, torch.dtype]]
    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    expert_tp: int = 1
    expert_tp_rank: int = 0
    dtype: torch.dtype | None = None
    tensors: dict[str, Destination] = field(default_factory=dict)

    def build(self) -> Layout:
        """The layout of all destinations so far."""
        return Layout(dict(self.tensors))

    def replicated(self, *sources: str, name: str = "") -> None:
        """Take whole sources, one after the other along dim 0."""
        self._stack(name or sources[0], [self._rectangle(source) for source in sources])

    def column(self, *sources: str, name: str = "") -> None:
        """Take this rank's rows of each source, one after the other (column-parallel, gate_up)."""
        rows = [self._rectangle(source, 0, self.tp, self.tp_rank) for source in sources]
        self._stack(name or sources[0], rows)

    def row(self, source: str, name: str = "") -> None:
        """Take this rank's part of the last dim (row-parallel)."""
        last = len(self._shape(source)) - 1
        self._stack(name or source, [self._rectangle(source, last, self.tp, self.tp_rank)])

    def vocabulary(self, source: str, name: str = "", pad_to: int = 64) -> None:
        """Take this rank's rows of a vocabulary that is padded to a multiple of `pad_to`."""
        shape = self._shape(source)
        size = self._share(-(-shape[0] // pad_to) * pad_to, self.tp, source)
        start = min(self.tp_rank * size, shape[0])
        stop = min(start + size, shape[0])
        pieces = [(source, (start, *(0 for _ in shape[1:])), (stop, *shape[1:]))]
        self._stack(name or source, pieces if stop > start else [], (size, *shape[1:]), source)

    def qkv(self, sources: Sequence[str], name: str, heads: int, kv_heads: int) -> None:
        """Take this rank's heads of q, k and v; k and v heads repeat where there are too few."""
        copies = max(1, self.tp // kv_heads)
        rows = []
        for source, count, ranks, rank in (
            (sources[0], heads, self.tp, self.tp_rank),
            (sources[1], kv_heads, self.tp // copies, self.tp_rank // copies),
            (sources[2], kv_heads, self.tp // copies, self.tp_rank // copies),
        ):
            self._share(self._shape(source)[0], count, source)
            self._share(count, ranks, f"the {plural(count, 'head')} of {source}")
            rows.append(self._rectangle(source, 0, ranks, rank))
        self._stack(name, rows)

    def experts(
        self,
        sources: str | Sequence[Sequence[str]],
        name: str | Callable[[int], str],
        cut: Cut = "none",
    ) -> None:
        """Take this rank's experts.

        Args:
            sources: for each expert, the sources that lie one after the other (w1 and w3); or the
                name of one 3-D source `(experts, rows, columns)`.
            name: the name of one 3-D destination, or a function that names a tensor an expert.
            cut: the dim of an expert that `expert_tp` ranks cut.
        """
        total = self._shape(sources)[0] if isinstance(sources, str) else len(sources)
        base, more = divmod(total, self.ep)
        first = self.ep_rank * base + min(self.ep_rank, more)
        stacks = [
            self._expert(sources, expert, cut)
            for expert in range(first, first + base + (self.ep_rank < more))
        ]
        if callable(name):
            for number, rows in enumerate(stacks, first):
                self._stack(name(number), rows)
        elif stacks:
            shape = self._stacked_shape(stacks[0])
            pieces = [
                piece for place, rows in enumerate(stacks) for piece in self._pieces(rows, (place,))
            ]
            self._add(name, (len(stacks), *shape), stacks[0][0][0], pieces)

    def _expert(
        self, sources: str | Sequence[Sequence[str]], expert: int, cut: Cut
    ) -> list[tuple[str, Shape, Shape]]:
        inner = 1 if isinstance(sources, str) else 0
        names = [sources] if isinstance(sources, str) else sources[expert]
        ranks = 1 if cut == "none" else self.expert_tp
        rows = []
        for source in names:
            dim = inner if cut != "columns" else len(self._shape(source)) - 1
            _, start, stop = self._rectangle(source, dim, ranks, self.expert_tp_rank % ranks)
            if inner:
                start, stop = (expert, *start[1:]), (expert + 1, *stop[1:])
            rows.append((source, start, stop))
        return rows

    # -- rectangles ------------------------------------------------------------------------------

    def _shape(self, source: str) -> Shape:
        if source not in self.sources:
            raise ValueError(
                f"the layout takes '{source}', which the trainers do not have: give the names of "
                "their state dict"
            )
        return self.sources[source][0]

    def _share(self, size: int, ranks: int, what: str) -> int:
        if size % ranks:
            raise ValueError(f"{size} of {what} do not divide by {ranks}: choose another grid")
        return size // ranks

    def _rectangle(
        self, source: str, dim: int = 0, ranks: int = 1, rank: int = 0
    ) -> tuple[str, Shape, Shape]:
        shape = self._shape(source)
        start, stop = [0] * len(shape), list(shape)
        if ranks > 1:
            size = self._share(shape[dim], ranks, f"dim {dim} of '{source}'")
            start[dim], stop[dim] = rank * size, (rank + 1) * size
        return source, tuple(start), tuple(stop)

    def _stacked_shape(self, rows: Sequence[tuple[str, Shape, Shape]]) -> Shape:
        sizes = [tuple(b - a for a, b in zip(*row[1:], strict=True)) for row in rows]
        if any(size[:1] == (1,) and len(size) == 3 for size in sizes):
            sizes = [size[1:] for size in sizes]
        return (sum(size[0] for size in sizes), *sizes[0][1:]) if sizes[0] else ()

    def _pieces(self, rows: Sequence[tuple[str, Shape, Shape]], lead: Shape = ()) -> list[Piece]:
        found, place = [], 0
        for source, start, stop in rows:
            size = self._stacked_shape([(source, start, stop)])
            at = (*lead, place, *(0 for _ in size[1:])) if size else lead
            if 0 not in size:
                found.append(Piece(source, start, stop, at))
            place += size[0] if size else 0
        return found

    def _stack(
        self,
        name: str,
        rows: Sequence[tuple[str, Shape, Shape]],
        shape: Shape | None = None,
        like: str = "",
    ) -> None:
        self._add(
            name, self._stacked_shape(rows) if shape is None else shape, like or rows[0][0],
            self._pieces(rows),
        )  # fmt: skip

    def _add(self, name: str, shape: Shape, like: str, pieces: Sequence[Piece]) -> None:
        own = self.sources[like][1]
        dtype = self.dtype if self.dtype is not None and own.is_floating_point else own
        if name in self.tensors:
            raise ValueError(f"the layout has '{name}' twice: name each destination once")
        self.tensors[name] = Destination(shape, dtype, tuple(pieces))


# -- rules by name -------------------------------------------------------------------------------

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "q_a_proj": ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
}
_LATER = {"k_proj", "v_proj", "up_proj", "kv_a_proj_with_mqa"}
_COLUMN, _ROW = {"q_b_proj", "kv_b_proj"}, {"o_proj", "down_proj"}
_VOCABULARY = {"embed_tokens", "lm_head"}


def inference_layout(builder: LayoutBuilder, heads: int, kv_heads: int) -> Layout:
    """Lay out a decoder of transformers (Llama, Qwen, Mixtral-like, DeepSeek) as vLLM holds it.

    The last part of each name decides: q, k and v become `qkv_proj`, gate and up `gate_up_proj`,
    experts `w13_weight` and `w2_weight`. Names without a rule are replicated.
    """
    experts: dict[str, dict[int, str]] = {}
    for source in builder.sources:
        if match := _EXPERT.match(source):
            experts.setdefault(match[1], {})[int(match[2])] = f"{match[1]}.{match[2]}"
            continue
        parts = source.rsplit(".", 2)
        kind = parts[-2] if len(parts) > 1 else ""
        _by_rule(builder, source, kind, heads, kv_heads)
    for name, numbers in experts.items():
        bases = [numbers[number] for number in sorted(numbers)]
        w13 = [(f"{one}.gate_proj.weight", f"{one}.up_proj.weight") for one in bases]
        builder.experts(w13, f"{name}.w13_weight", "rows")
        builder.experts([(f"{one}.down_proj.weight",) for one in bases], f"{name}.w2_weight",
                        "columns")  # fmt: skip
    return builder.build()


def _by_rule(builder: LayoutBuilder, source: str, kind: str, heads: int, kv_heads: int) -> None:
    def beside(other: str) -> str:
        return source.replace(f"{kind}.", f"{other}.") if kind else source

    fused, kinds = _FUSED.get(kind, ("", ()))
    names = [beside(other) for other in kinds]
    complete = bool(names) and all(name in builder.sources for name in names)
    if kind in _LATER:
        first = next(one for one, (_, all_kinds) in _FUSED.items() if kind in all_kinds)
        whole = all(beside(other) in builder.sources for other in _FUSED[first][1])
        if not whole:
            builder.replicated(source)
    elif complete and kind == "q_proj":
        builder.qkv(names, beside(fused), heads, kv_heads)
    elif complete and kind == "q_a_proj":
        builder.replicated(*names, name=beside(fused))
    elif complete:
        builder.column(*names, name=beside(fused))
    elif kind in _COLUMN or kind == "q_proj":
        builder.column(source)
    elif kind in _ROW and math.prod(builder.sources[source][0][1:]) > 1:
        builder.row(source)
    elif kind in _VOCABULARY:
        builder.vocabulary(source)
    else:
        builder.replicated(source)
