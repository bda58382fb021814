"""CPU offload's copies between the host and the device, on streams of their own.

A segment on the host is copied in on one stream, and its gather starts behind that stream: compute
waits for neither until it reads the result. A reduced gradient is copied out on the other stream,
into pinned memory if the segment is pinned. Nothing in the graph waits for that copy: the tensor
that goes on to autograd has no values yet. At the backward's end the copies are looked up by
segment (`arriving`), not by tensor: autograd may have copied the tensor, or added up several.

Memory belongs to the stream that computes: a stream of ours first waits for the work queued there,
and memory that it still reads is marked as in use (`record_stream`). Segments that are not pinned
are copied at once, as torch does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardc.runtime import compat
from shardc.runtime.comm.ops import define_op

_streams: dict[tuple[torch.device, str], torch.Stream] = {}


def stream_of(device: torch.device, direction: str) -> torch.Stream:
    """The stream of a device for one direction; it waits for the work queued so far.

    Directions: "in" and "out" for copies to and from the device, "steps" for gathers in steps.
    """
    key = (device, direction)
    if key not in _streams:
        _streams[key] = torch.Stream(device=device)
    _streams[key].wait_stream(torch.accelerator.current_stream(device))
    return _streams[key]


def copy_in(segment: Tensor, part: Tensor) -> torch.Stream:
    """Start to copy and cast `segment: (S,)` from the host into `part`; the stream that does so."""
    stream = stream_of(part.device, "in")
    staged = part
    if part.dtype != segment.dtype:  # the cast is the device's work
        staged = torch.empty_like(segment, device=part.device)
        staged.record_stream(stream)
    with stream:
        staged.copy_(segment, non_blocking=True)
        if staged is not part:
            part.copy_(staged)
    return stream


@dataclass(frozen=True, eq=False)
class Arrival:
    """A gradient on its way to the host.

    Attributes:
        segment: the address of the segment.
        part: the gradient on the host, `(S,)`.
        done: the event after which the values are there; None if they are there.
        backward: the backward that made the gradient (`compat.backward_number`).
    """

    segment: int
    part: Tensor
    done: torch.Event | None
    backward: int

    def wait(self) -> Tensor:
        """Wait for the values of the gradient."""
        if self.done is not None:
            self.done.synchronize()
        return self.part


_arriving = WeakIdKeyDictionary()
"""`Arrival`s by the storage of the segment; the entry is freed with the storage."""


def arriving(segment: Tensor, part: Tensor) -> list[Arrival]:
    """Take over the copies to the host that became `part`, a gradient of `segment`.

    The backward under way began these copies. A copy that was taken over is not given again.
    """
    sent, address = _sent(segment), segment.data_ptr()
    mine = [arrival for arrival in sent if arrival.segment == address]
    own = [arrival for arrival in mine if arrival.part.data_ptr() == part.data_ptr()] or mine
    _keep(segment, [arrival for arrival in sent if arrival not in own])
    return own


def _sent(segment: Tensor) -> list[Arrival]:
    """The copies that the backward under way began for segments in this storage."""
    backward, sent = compat.backward_number(), _arriving.get(segment.untyped_storage(), [])
    return [arrival for arrival in sent if arrival.backward == backward]


def _keep(segment: Tensor, arrivals: list[Arrival]) -> None:
    storage = segment.untyped_storage()
    if arrivals:
        _arriving[storage] = arrivals
    else:
        _arriving.pop(storage, None)


def _to_host(part: Tensor, segment: Tensor) -> Tensor:
    """Start to copy the gradient of a `segment` on the host there: `part: (S,)` -> `(S,)`.

    The result has its values once its `Arrival` is done.
    """
    # A copy of its own: the memory of `part` may be reused by the next kernel at once.
    staged = part.to(segment.dtype, copy=True)
    host = torch.empty_like(staged, device="cpu", pin_memory=segment.is_pinned())
    done = None
    if host.is_pinned():
        stream = stream_of(part.device, "out")
        with stream:
            host.copy_(staged, non_blocking=True)
            done = stream.record_event()
        staged.record_stream(stream)
    else:
        host.copy_(staged)
    # An alias: autograd takes over a tensor without a copy if no other reference to that object
    # exists, and adds nothing in place into storage that another tensor shares.
    arrival = Arrival(segment.data_ptr(), host.detach(), done, compat.backward_number())
    _keep(segment, [*_sent(segment), arrival])
    return host


define_op(
    "to_host(Tensor part, Tensor segment) -> Tensor",
    _to_host,
    lambda part, segment: torch.empty_like(part, dtype=segment.dtype, device="cpu"),
)
