"""Intervals travel to their owners and back: one all-to-all each way for a route's parameters.

Every rank has an interval of every parameter, and every parameter has one owner. A rank sends each
owner its intervals of all parameters of this owner, one after the other; intervals come back in the
same order. All sizes follow from layouts, which are equal on all ranks. A method starts a message,
and the function that it returns waits for the message and gives the result.

Where tensor parallelism cuts a parameter as well, the intervals are those of the local value. Each
tensor-parallel rank at the owner's place gets intervals of its own local value, and these ranks
gather the whole tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardc.optim.owners import stages_of
from shardc.runtime.comm.collectives import CallStarted, start_exchange
from shardc.runtime.tensor.shard_tensor import ShardTensor


@dataclass(frozen=True)
class Route:
    """Parameters of one dtype that one process group cuts, and the owner of each."""

    params: tuple[ShardTensor, ...]
    owners: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.params[0]._shard_spec.rank

    @property
    def world_size(self) -> int:
        return self.params[0]._shard_spec.world_size

    @property
    def group(self) -> str:
        """The process group, by name."""
        return self.params[0]._shard_spec.group

    def owned(self) -> list[int]:
        """The positions of the parameters that this rank owns."""
        return [index for index, owner in enumerate(self.owners) if owner == self.rank]

    def in_stages(self) -> list["Route"]:
        """The parameters in several routes; each owner has about as many bytes in every route."""
        nbytes = [param.nbytes for param in self.params]  # whole: equal on tensor-parallel ranks
        return [
            Route(tuple(self.params[i] for i in some), tuple(self.owners[i] for i in some))
            for some in stages_of(nbytes, self.owners, self.world_size)
        ]

    def to_owners(
        self, rows: Sequence[tuple[int, Tensor]], what: str
    ) -> Callable[[], list[Tensor]]:
        """Start to send intervals; gives a function that waits for the whole tensors of this rank.

        The whole tensors come in the order of `rows`: (position of the parameter, this rank's
        interval of it or of its gradient). The last argument names the intervals in a text that is
        equal on all ranks.
        """
        mine = [index for index, _ in rows if self.owners[index] == self.rank]
        sent = [part for o in range(self.world_size) for i, part in rows if self.owners[i] == o]
        started = self._start(sent, [i for i, _ in rows], what, back=False)
        return lambda: self._joined(mine, started.wait())

    def _joined(self, mine: Sequence[int], given: Tensor) -> list[Tensor]:
        """Join the intervals of all ranks to whole tensors."""
        flats = [given.new_empty(self.params[index]._shard_spec.numel) for index in mine]
        at = 0
        for rank in range(self.world_size):
            for index, flat in zip(mine, flats, strict=True):
                start, stop = self.params[index]._shard_spec.interval(rank)
                flat[start:stop] = given[at : at + stop - start]
                at += stop - start
        return [_whole(self.params[i], flat) for i, flat in zip(mine, flats, strict=True)]

    def to_parts(self, wholes: Sequence[Tensor], what: str) -> Callable[[], list[Tensor]]:
        """Start to send the whole tensors of this rank, which may be freed afterwards.

        Gives a function that waits for this rank's intervals of all parameters.
        """
        everything, mine = range(len(self.params)), self.owned()
        flats = [_flat(self.params[i], whole) for i, whole in zip(mine, wholes, strict=True)]
        sent = []
        for rank in range(self.world_size):
            for index, flat in zip(mine, flats, strict=True):
                start, stop = self.params[index]._shard_spec.interval(rank)
                sent.append(flat[start:stop])
        started = self._start(sent, list(everything), what, back=True)

        def finish() -> list[Tensor]:
            given, parts, at = started.wait(), {}, 0
            for index in sorted(everything, key=lambda i: (self.owners[i], i)):
                size = self._size(index, self.rank)
                parts[index] = given[at : at + size]
                at += size
            return [parts[index] for index in everything]

        return finish

    def _size(self, index: int, rank: int) -> int:
        start, stop = self.params[index]._shard_spec.interval(rank)
        return stop - start

    def _start(self, sent: list[Tensor], indices: list[int], what: str, back: bool) -> CallStarted:
        """Start to send intervals, concatenated in the order of receiving and sending ranks."""
        ranks = range(self.world_size)
        owned_by = [[i for i in indices if self.owners[i] == rank] for rank in ranks]
        mine_at = [sum(self._size(i, self.rank) for i in owned_by[rank]) for rank in ranks]
        theirs_here = [sum(self._size(i, rank) for i in owned_by[self.rank]) for rank in ranks]
        local = self.params[0]._local
        flat = torch.cat(sent) if sent else local.new_empty(0)
        out, into = (theirs_here, mine_at) if back else (mine_at, theirs_here)
        return start_exchange(flat.to(local.dtype), into, out, self.group, what)


def _whole(param: ShardTensor, flat: Tensor) -> Tensor:
    """The whole tensor of the flattened value that `param`'s group cuts."""
    tp = param._shard_spec.tp
    if tp is None:
        return flat.view(param.shape)
    return tp.wrap(flat.view(tp.local_shape)).full_tensor().contiguous()


def _flat(param: ShardTensor, whole: Tensor) -> Tensor:
    """The inverse of `_whole`: the flattened value that `param`'s group cuts."""
    tp = param._shard_spec.tp
    return (whole if tp is None else tp.local_of(whole)).reshape(-1)


def routes_of(params: Sequence[ShardTensor], owners: dict[Tensor, int]) -> list[Route]:
    """A route for each process group and dtype, in the order of the parameters."""
    kinds: dict[tuple[str, torch.dtype], list[ShardTensor]] = {}
    for param in params:
        kinds.setdefault((param._shard_spec.group, param.dtype), []).append(param)
    return [Route(tuple(kind), tuple(owners[p] for p in kind)) for kind in kinds.values()]
