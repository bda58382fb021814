"""Rows of a table: ranks fetch them from each other, and send their gradients back.

A rank looks up a few thousand rows of a table of `(rows, width)`, which lies in a bucket from
element `start` on. The rank fetches each of these rows once, even if it looks a row up often, from
the rank that serves the row, and sends one gradient for the row back. Frequent words have small
numbers, so the rank that holds the first segment would serve most rows. So the ranks first deal out
their rows, row r to rank r % ranks. A rank deals out its segment, a small part of the table.

    fetch:   deal the segment;  say which rows are wanted;  send the rows that others want
    return:  send the gradients;  add up the gradients of each row;  deal back

Every rank sends a byte for every row, 1 for a row that it wants. So no bound on the number of these
rows must be known, and messages of rows are as long as they must be. The host waits once, in the
forward, to read how many rows go to and come from each rank.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.words import plural
from shardc.runtime.comm.collectives import Started, start_all_to_all
from shardc.runtime.comm.ops import define_op
from shardc.runtime.layout.layout import interval

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class _Table:
    """A table of `(rows, width)` from `start` on in a bucket whose segments have `size` elements.

    Attributes:
        rank, ranks, group: this rank, the number of ranks that hold the table, their group.
        each: places for the rows that a rank serves; the last ranks may serve one row fewer.
    """

    rows: int
    width: int
    start: int
    size: int
    rank: int
    ranks: int
    group: str

    @property
    def each(self) -> int:
        return -(-self.rows // self.ranks)

    @property
    def served(self) -> int:
        """The number of rows that this rank serves."""
        return len(range(self.rank, self.rows, self.ranks))

    def held(self, rank: int) -> range:
        """The rows in the segment of `rank`."""
        first, last = interval(self.start, self.rows * self.width, self.size, rank)
        return range(first // self.width, last // self.width)

    def of_segment(self, segment: Tensor) -> Tensor:
        """The rows in this rank's segment, a view of `(rows held, width)`."""
        held = self.held(self.rank)
        begin = min(max(self.start - self.rank * self.size, 0), self.size)
        return segment.narrow(0, begin, len(held) * self.width).view(-1, self.width)

    def order(self, device: torch.device) -> Tensor:
        """The places of rows in the segment, ordered by the rank that serves each row."""
        held = self.held(self.rank)
        rows = torch.arange(held.start, held.stop, device=device)
        return (rows % self.ranks).argsort(stable=True)


@functools.lru_cache(64)
def _dealt(table: _Table) -> tuple[list[int], list[int]]:
    """The number of rows held here that each rank serves, and of rows served here that it holds."""
    given = [_count(table.held(table.rank), to, table.ranks) for to in range(table.ranks)]
    taken = [_count(table.held(i), table.rank, table.ranks) for i in range(table.ranks)]
    return given, taken


def _count(held: range, to: int, ranks: int) -> int:
    """The number of rows in `held` that rank `to` serves."""
    return len(held[(to - held.start) % ranks :: ranks])


def fetch_rows(
    segment: Tensor,
    ids: Tensor,
    dtype: torch.dtype,
    device: torch.device | None,
    ranks: int,
    group: str,
    start: int,
    rows: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows `ids` of a table, of any shape: `(*ids.shape, width)`, as `dtype`.

    Args:
        device: the device that holds `ids` and sends rows, if the segment lies on another.

    Returns:
        The values; the place of each value among the fetched rows; for each rank, a byte for each
        row that this rank serves, 1 for a row that the other wants; the numbers of rows that came
        from each rank and that went to each rank, on the host: `(2, ranks)`.

    Raises:
        IndexError: an id is no row of the table.
    """
    rank = compat.resolve_group(group).rank()
    table = _Table(rows, width, start, segment.numel(), rank, ranks, group)
    given, taken = _dealt(table)
    own = table.of_segment(segment).to(device or segment.device, dtype)
    dealing = _start_exchange(own.index_select(0, table.order(own.device)), given, taken, group)
    flat = ids.reshape(-1)
    is_wrong = (flat < 0) | (flat >= rows)
    spots = torch.where(is_wrong, 0, flat % ranks * table.each + flat // ranks)
    wanted = torch.zeros(ranks * table.each, dtype=torch.uint8, device=ids.device)
    wanted.scatter_(0, spots.long(), 1)
    asked = start_all_to_all(wanted, ranks, group).wait()
    places = wanted.cumsum(0).index_select(0, spots) - 1
    totals = [message.view(ranks, -1).sum(1, dtype=torch.int64) for message in (wanted, asked)]
    read = read_by_host(torch.cat([*totals, is_wrong.any().view(1)]))
    come, go, (refused,) = (part.tolist() for part in read.split([ranks, ranks, 1]))
    served = dealing.wait().view(-1, width)
    if refused:
        wrong = flat[is_wrong][0].item()
        raise IndexError(f"index {wrong} is out of range of an embedding of {plural(rows, 'row')}")
    answers = served.index_select(0, _rows_of(asked, table, sum(go)))
    fetched = _start_exchange(answers, go, come, group).wait().view(-1, width)
    values = fetched.index_select(0, places).view(*ids.shape, width)
    return values, places, asked, read[: 2 * ranks].view(2, ranks).clone()


def read_by_host(counts: Tensor) -> Tensor:
    """Copy counts to the host, which waits for them: `(2 * ranks + 1,)`.

    The counts: the rows that this rank gets from each rank, the rows that it gives to each rank,
    and whether an id is no row.
    """
    return counts.cpu()


def return_rows(
    grads: Tensor,
    places: Tensor,
    asked: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    ranks: int,
    group: str,
    size: int,
    start: int,
    rows: int,
    width: int,
) -> Tensor:
    """The sum of all ranks' gradients for this rank's segment, `(size,)`.

    Args:
        grads: gradients of the values that were looked up, `(lookups, width)`; they are added up by
            row in their own dtype, and sent as `dtype`.
        places, asked, counts: results of the fetch; `counts` on the host.
    """
    table = _Table(rows, width, start, size, compat.resolve_group(group).rank(), ranks, group)
    come, go = counts.tolist()
    sums = aten.embedding_dense_backward(grads, places, sum(come), -1, False).to(dtype)
    arrived = _start_exchange(sums, come, go, group).wait().view(-1, width)
    spots = _rows_of(asked, table, sum(go))
    served = aten.embedding_dense_backward(arrived, spots, table.served, -1, False)
    given, taken = _dealt(table)
    back = _start_exchange(served, taken, given, group).wait().view(-1, width)
    part = served.new_zeros(size)
    table.of_segment(part).index_copy_(0, table.order(part.device), back)
    return part


def _rows_of(asked: Tensor, table: _Table, count: int) -> Tensor:
    """The rows that ranks want, rank by rank, as places among those served here: `(count,)`."""
    return torch.nonzero_static(asked, size=count).view(-1) % table.each


def _start_exchange(rows: Tensor, given: list[int], taken: list[int], group: str) -> Started:
    """Start to send each rank its number of rows, `given`, in order, and to get `taken` of each."""
    width = rows.shape[1]
    out, sent = ([width * count for count in counts] for counts in (taken, given))
    return Started(c10d.all_to_all_single(rows.reshape(-1), out, sent, group))


def _shapes_of_fetch(
    segment: Tensor,
    ids: Tensor,
    dtype: torch.dtype,
    device: object,
    ranks: int,
    group: str,
    *table: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _start, rows, width = table
    spots = ids.new_empty(ids.numel(), dtype=torch.int64)
    return (
        ids.new_empty(*ids.shape, width, dtype=dtype),
        spots,
        spots.new_empty(ranks * -(-rows // ranks), dtype=torch.uint8),
        torch.empty(2, ranks, dtype=torch.int64, device="cpu"),
    )


define_op(
    "fetch_rows(Tensor segment, Tensor ids, ScalarType dtype, Device? device, int ranks, "
    "str group, int start, int rows, int width) -> (Tensor, Tensor, Tensor, Tensor)",
    fetch_rows,
    _shapes_of_fetch,
)
define_op(
    "return_rows(Tensor grads, Tensor places, Tensor asked, Tensor counts, ScalarType dtype, "
    "int ranks, str group, int size, int start, int rows, int width) -> Tensor",
    return_rows,
    lambda grads, places, asked, counts, dtype, ranks, group, size, *_: grads.new_empty(
        size, dtype=dtype
    ),
)
