"""Plans that are made once and run after each step: weights from trainers to receivers.

A run has two phases (`rank_plan.py`) of a few rounds. In a round each pair of ranks exchanges one
message at most, packed from boxes of many tensors, and cast where the wire is narrower. A pair's
message is cut into as many equal slices as there are rounds. So no rank sends or receives more than
`buffer_bytes` in a round, and all links work in every round. Rank r sends to r+1, r+2, ... and
receives from r-1, r-2, ... .
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.passes.estimate.hardware import Profile, as_profile
from shardc.runtime import compat
from shardc.runtime.checks.arguments import Count, checked
from shardc.runtime.layout.interval_boxes import boxes_of
from shardc.runtime.watch.entering import entering, told
from shardc.sharding.units import units_of
from shardc.state.ranks import ModelRanks
from shardc.weights.adapters import Adapters
from shardc.weights.layouts import Layout, Shape
from shardc.weights.rank_plan import (
    Chunk,
    Messages,
    RankPlan,
    Source,
    Target,
    fitted,
    plan_rank,
    shifted,
)
from shardc.weights.sources import PLAN, Described, describe, exchange, local_part, named_tensors

_ALIGN = 16
"""Bytes to which messages are aligned in a buffer."""

Traffic = tuple[tuple[int, int, int], ...]


@checked
def plan(
    model: nn.Module | None = None,
    layout: Layout | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    merge_adapters: bool = False,
    buffer_bytes: Count | None = None,
) -> "Plan":
    """Plan the way of a model's weights to the layouts of receivers. Every rank must call it.

    No values move. The plan holds until the model is sharded otherwise.

    Args:
        model: the model, on trainers.
        layout: the tensors that this rank wants, on receivers. A rank may be both.
        group: the process group of all trainers and receivers; default: all ranks.
        merge_adapters: send `W + scaling * B @ A` for LoRA of PEFT, under the names of a model
            without adapters; A and B are gathered whole on each trainer during a run.
        buffer_bytes: the most bytes that a rank sends, and the most that it receives, at a time;
            default: the bytes of the largest bucket of the trainers.

    Raises:
        ValueError: this rank's layout does not fit the model, a parameter is on the meta device, or
            an adapter cannot be merged.
        RuntimeError: another rank cannot take part.
    """
    group = cast(dist.ProcessGroup, group or dist.group.WORLD)
    ranks = ModelRanks((group,), torch.device("cpu"))
    described, error = Described(), None
    try:
        described = describe(model, merge_adapters) if model is not None else described
    except ValueError as raised:
        error = raised
    ranks.agree(error, "nothing was sent")
    sources, layouts = exchange(described, layout, group)
    own = RankPlan(group.rank())
    try:
        own = plan_rank(group.rank(), sources, layouts)
    except ValueError as raised:
        error = raised
    ranks.agree(error, "nothing was sent")
    largest = buffer_bytes or _largest_bucket(model)
    traffic, limits = zip(*told((own.traffic(), largest), PLAN, group), strict=True)
    return Plan(own, sources, layout, group, max(limits), traffic, model, described)


def _largest_bucket(model: nn.Module | None) -> int:
    if model is None:
        return 1
    units = {module._shardc_unit for module in units_of(model).values()}
    sizes = [
        bucket.layout.numel * bucket.segment.element_size()
        for unit in units
        for bucket in unit.buckets
    ]
    plain = [value.numel() * value.element_size() for value in model.parameters()]
    return max(sizes, default=max(plain, default=1))


def rounds_of(traffic: Sequence[Traffic], phase: int, buffer_bytes: int) -> int:
    """The rounds of a phase in which no rank sends or receives more than `buffer_bytes`."""
    most = max((max(each[phase][:2]) for each in traffic), default=0)
    peers = max((each[phase][2] for each in traffic), default=0)
    room = max(buffer_bytes - 2 * _ALIGN * peers, buffer_bytes // 2, 1)
    return -(-most // room)


def seconds(
    traffic: Sequence[Traffic], profile: Profile | str, buffer_bytes: int | None = None
) -> float:
    """Predict the seconds of a run, with trainers and receivers on different nodes.

    Args:
        traffic: `RankPlan.traffic()` of all ranks.
        profile: the links; ranks of a node share its network cards.
        buffer_bytes: as in `plan`; None: one round.
    """
    link, total = as_profile(profile), 0.0
    bandwidth = link.across.bandwidth / link.node_size
    for phase in range(2):
        most = max((max(each[phase][:2]) for each in traffic), default=0)
        peers = max((each[phase][2] for each in traffic), default=0)
        rounds = rounds_of(traffic, phase, buffer_bytes or max(most, 1)) if most else 0
        total += most / bandwidth + rounds * (link.message + peers * link.across.latency)
    return total


@dataclass
class Plan:
    """The plan of one rank, ready to run after each step.

    Attributes:
        own: the boxes that this rank sends, receives and copies.
        traffic: for each rank and phase, the bytes sent, the bytes received and the peers.
        buffer_bytes: the most bytes that a rank sends, and receives, at a time.
    """

    own: RankPlan
    sources: Mapping[str, Source]
    layout: Layout | None
    group: dist.ProcessGroup
    buffer_bytes: int
    traffic: Sequence[Traffic]
    model: nn.Module | None = field(repr=False, default=None)
    described: Described = field(repr=False, default_factory=Described)

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank sends in a run."""
        return sum(sent for sent, _, _ in self.own.traffic())

    @property
    def bytes_received(self) -> int:
        """The bytes that this rank receives in a run."""
        return sum(got for _, got, _ in self.own.traffic())

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds of each phase, equal on all ranks."""
        return tuple(rounds_of(self.traffic, phase, self.buffer_bytes) for phase in range(2))

    def seconds(self, profile: Profile | str) -> float:
        """Predict the seconds of a run, with trainers and receivers on different nodes."""
        return seconds(self.traffic, profile, self.buffer_bytes)

    def send(self) -> None:
        """Send this trainer's weights, while the receivers receive."""
        self.run()

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Receive into `tensors`, while the trainers send."""
        self.run(tensors)

    @torch.no_grad()
    def run(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Send and receive. Every rank must call it, or `send` or `receive`.

        Raises:
            ValueError: a tensor is missing, or has another shape or dtype than in the layout.
        """
        tensors = tensors or {}
        self._check(tensors)
        values = _Values(self.model, self.described, tensors)
        for chunk in self.own.copies:
            values.write(chunk, values.read(chunk))
        with entering("weights for receivers", compat.group_name(self.group)):
            for phase in range(2):
                self._run_phase(phase, values)

    def _run_phase(self, phase: int, values: "_Values") -> None:
        sends, receives = self.own.sends[phase], self.own.receives[phase]
        rounds = self.rounds[phase]
        for number in range(rounds):
            out, into = (_slices_of(one, number, rounds) for one in (sends, receives))
            if out or into:
                self._round(out, into, values, phase)

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for name, wanted in (self.layout or Layout({})).tensors.items():
            have = tensors.get(name)
            if have is None or (tuple(have.shape), have.dtype) != (wanted.shape, wanted.dtype):
                found = "none" if have is None else f"{tuple(have.shape)} {have.dtype}"
                raise ValueError(
                    f"the plan fills '{name}', a tensor of shape {wanted.shape} and "
                    f"{wanted.dtype}, got {found}: give the tensors of the planned layout"
                )

    def _round(self, sends: Messages, receives: Messages, values: "_Values", phase: int) -> None:
        device = values.device
        parts = _buffer(sends, device)
        for peer, chunks in sends.items():
            for chunk, place in _placed_in(chunks, parts[peer]):
                place.copy_(values.read(chunk) if phase == 0 else values.passed_on(chunk))
        arriving = _buffer(receives, device)
        size, rank = self.group.size(), self.group.rank()
        operations = []
        for step in range(1, size):
            to, source = (rank + step) % size, (rank - step) % size
            if to in parts:
                operations.append(
                    dist.P2POp(dist.isend, parts[to], group=self.group, group_peer=to)
                )
            if source in arriving:
                operations.append(
                    dist.P2POp(dist.irecv, arriving[source], group=self.group, group_peer=source)
                )
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for peer, chunks in receives.items():
            for chunk, place in _placed_in(chunks, arriving[peer]):
                values.write(chunk, place)


class _Values:
    """The values of a run: this trainer's tensors and this receiver's."""

    def __init__(
        self, model: nn.Module | None, described: Described, tensors: Mapping[str, Tensor]
    ) -> None:
        self.tensors, self.adapters = tensors, Adapters()
        self.device = next((t.device for t in tensors.values()), torch.device("cpu"))
        self.local: dict[str, tuple[Tensor, int, Shape]] = {}
        if model is not None:
            for module in units_of(model).values():
                module._shardc_unit.await_updates()
                self.device = module._shardc_unit.device
            found = named_tensors(model, described.adapters)
            self.local = {name: local_part(value) for name, value in found.items()}
            self.adapters = described.adapters.gathered(self.device)
        self.offsets = {row.name: row.offsets for row in described.rows}

    def read(self, chunk: Chunk) -> Tensor:
        """The box of this trainer's own part."""
        flat, first, box = self.local[chunk.source]
        strides, offset, step = [0] * len(box), 0, 1
        corner = self.offsets[chunk.source]
        for dim in reversed(range(len(box))):
            strides[dim] = step
            offset += (chunk.start[dim] - corner[dim]) * step
            step *= box[dim]
        value = flat[offset - first :].as_strided(chunk.sizes, strides)
        return self.adapters.merged(chunk.source, value, chunk.start)

    def passed_on(self, chunk: Chunk) -> Tensor:
        """The box as it arrived in this receiver's tensors."""
        return self._places(chunk)[0].reshape(chunk.sizes)

    def write(self, chunk: Chunk, value: Tensor) -> None:
        """Write the box to all of its places."""
        for place in self._places(chunk):
            place.copy_(value.reshape(place.shape))

    def _places(self, chunk: Chunk) -> list[Tensor]:
        found = []
        for target in chunk.targets:
            tensor = self.tensors[target.name]
            sizes = fitted(chunk.sizes, tensor.dim())
            assert sizes is not None
            for dim, (at, size) in enumerate(zip(target.at, sizes, strict=True)):
                tensor = tensor.narrow(dim, at, size)
            found.append(tensor)
        return found


# -- messages of a round -------------------------------------------------------------------------


def _slices_of(messages: Messages, number: int, rounds: int) -> Messages:
    """The slice `number` of each message, cut into `rounds` slices of equal bytes."""
    found = {peer: slice_of(chunks, number, rounds) for peer, chunks in messages.items()}
    return {peer: chunks for peer, chunks in found.items() if chunks}


def slice_of(chunks: Sequence[Chunk], number: int, rounds: int) -> list[Chunk]:
    """The chunks of one round; a chunk is cut between two elements."""
    if rounds == 1:
        return list(chunks)
    total = sum(chunk.bytes for chunk in chunks)
    low, high = total * number // rounds, total * (number + 1) // rounds
    found: list[Chunk] = []
    at = 0
    for chunk in chunks:
        size, width = chunk.bytes, chunk.wire.itemsize
        first, last = (min(max(edge - at, 0), size) // width for edge in (low, high))
        found += _cut(chunk, first, last)
        at += size
    return found


def _cut(chunk: Chunk, first: int, last: int) -> list[Chunk]:
    """Elements `[first, last)` of a chunk, as chunks."""
    if (last - first) * chunk.wire.itemsize == chunk.bytes:
        return [chunk]
    return [
        chunk._replace(
            start=tuple(map(sum, zip(chunk.start, box.offsets, strict=True))),
            sizes=box.sizes,
            targets=tuple(Target(t.name, shifted(t.at, box.offsets)) for t in chunk.targets),
        )
        for box in boxes_of(chunk.sizes, first, last)
    ]


def _buffer(messages: Messages, device: torch.device) -> dict[int, Tensor]:
    """The bytes of each message of a round, in one buffer."""
    sizes = {peer: sum(chunk.bytes for chunk in chunks) for peer, chunks in messages.items()}
    room = {peer: -(-size // _ALIGN) * _ALIGN for peer, size in sizes.items()}
    buffer = torch.empty(sum(room.values()), dtype=torch.uint8, device=device)
    parts, at = {}, 0
    for peer, size in sizes.items():
        parts[peer] = buffer[at : at + size]
        at += room[peer]
    return parts


def _placed_in(chunks: Sequence[Chunk], message: Tensor) -> list[tuple[Chunk, Tensor]]:
    """Each chunk with its place in the message, a view of its sizes."""
    found, at = [], 0
    for chunk in chunks:
        place = message[at : at + chunk.bytes].view(chunk.wire).view(chunk.sizes)
        found.append((chunk, place))
        at += chunk.bytes
    return found
