"""Intervals to their owners and back: one all-to-all for each process group and dtype.

Every rank has an interval of every parameter, and every parameter has one owner. A rank sends each
owner its intervals of all that this one owns, one after the other; what comes back has the same
order. All sizes follow from layouts, which are equal on all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.runtime.comm.collectives import all_to_all
from shardc.runtime.tensor.shard_tensor import ShardTensor


@dataclass(frozen=True)
class Route:
    """Parameters of one dtype that one process group cuts, and the owner of each."""

    params: tuple[ShardTensor, ...]
    owners: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This one of the group."""
        return self.params[0]._spec.rank

    @property
    def world_size(self) -> int:
        return self.params[0]._spec.world_size

    @property
    def group(self) -> str:
        """The process group, by name."""
        return self.params[0]._spec.group

    def owned(self) -> list[int]:
        """The parameters that this rank owns, by position."""
        return [index for index, owner in enumerate(self.owners) if owner == self.rank]

    def to_owners(self, rows: Sequence[tuple[int, Tensor]], what: str) -> list[Tensor]:
        """Send intervals; the whole tensors of those that this rank owns, in order.

        Args:
            rows: (position of the parameter, this rank's interval of it or of its gradient).
            what: what they are, the same on all ranks.
        """
        mine = [index for index, _ in rows if self.owners[index] == self.rank]
        sent = [part for o in range(self.world_size) for i, part in rows if self.owners[i] == o]
        given = self._all_to_all(sent, [i for i, _ in rows], what, back=False)
        wholes = [given.new_empty(self.params[index].shape) for index in mine]
        at = 0
        for rank in range(self.world_size):
            for index, whole in zip(mine, wholes, strict=True):
                start, stop = self.params[index]._spec.interval(rank)
                whole.view(-1)[start:stop] = given[at : at + stop - start]
                at += stop - start
        return wholes

    def to_parts(self, wholes: Sequence[Tensor], what: str) -> list[Tensor]:
        """Send whole tensors of all that this rank owns; its interval of every parameter."""
        everything, mine = range(len(self.params)), self.owned()
        sent = []
        for rank in range(self.world_size):
            for index, whole in zip(mine, wholes, strict=True):
                start, stop = self.params[index]._spec.interval(rank)
                sent.append(whole.reshape(-1)[start:stop])
        given = self._all_to_all(sent, list(everything), what, back=True)
        parts: dict[int, Tensor] = {}
        at = 0
        for index in sorted(everything, key=lambda i: (self.owners[i], i)):
            size = self._size(index, self.rank)
            parts[index] = given[at : at + size]
            at += size
        return [parts[index] for index in everything]

    def _size(self, index: int, rank: int) -> int:
        start, stop = self.params[index]._spec.interval(rank)
        return stop - start

    def _all_to_all(self, sent: list[Tensor], indices: list[int], what: str, back: bool) -> Tensor:
        """Concatenated, in the order of ranks that they are for, and come from."""
        ranks = range(self.world_size)
        owned_by = [[i for i in indices if self.owners[i] == rank] for rank in ranks]
        mine_at = [sum(self._size(i, self.rank) for i in owned_by[rank]) for rank in ranks]
        theirs_here = [sum(self._size(i, rank) for i in owned_by[self.rank]) for rank in ranks]
        local = self.params[0]._local
        flat = torch.cat(sent) if sent else local.new_empty(0)
        out, into = (theirs_here, mine_at) if back else (mine_at, theirs_here)
        return all_to_all(flat.to(local.dtype), into, out, self.group, what)


def routes_of(params: Sequence[ShardTensor], owners: dict[Tensor, int]) -> list[Route]:
    """One for each process group and dtype, in the order of the parameters."""
    kinds: dict[tuple[str, torch.dtype], list[ShardTensor]] = {}
    for param in params:
        kinds.setdefault((param._spec.group, param.dtype), []).append(param)
    return [Route(tuple(kind), tuple(owners[p] for p in kind)) for kind in kinds.values()]
