"""The gather of a parameter that says itself what is sent of it (`tensor.extension`).

What is sent may be several tensors of several dtypes: they travel as the bytes of one message, as
FSDP2's do, and one tensor as it is.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardc.runtime.comm.collectives import Started
from shardc.runtime.layout.spec import UnshardSpec, object_of


def start_extended(local: Tensor, spec: UnshardSpec, start: Callable[[Tensor], Started]) -> Started:
    """Start the gather of a parameter of which `local: (S,)` is this rank's segment.

    Args:
        local: on the device that it is gathered on.
        spec: that of its bucket.
        start: starts an all-gather of a flat tensor.

    Returns:
        What gives the full parameter. It has no value `early`.
    """
    extension = object_of(spec.extension or "")
    sent, metadata = extension.before_gather(local)
    started = start(_message(sent))

    def finish(raw: Tensor) -> Tensor:
        gathered = _received(started.then(raw), sent, spec.world_size)
        return extension.after_gather(gathered, metadata, spec.compute_dtype, local)

    return Started(started.raw, finish, started.done)


def _message(sent: Sequence[Tensor]) -> Tensor:
    """All of `sent` in one flat tensor."""
    if len(sent) == 1:
        return sent[0].reshape(-1)
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in sent])


def _received(full: Tensor, sent: Sequence[Tensor], world_size: int) -> list[Tensor]:
    """The messages of all ranks as one tensor for each of `sent`, joined along dim 0."""
    if len(sent) == 1:
        return [full.view(-1, *sent[0].shape[1:])]
    by_rank = full.view(world_size, -1)
    sizes = [tensor.numel() * tensor.element_size() for tensor in sent]
    parts = [part.contiguous().view(-1) for part in by_rank.split(sizes, dim=1)]
    pairs = zip(parts, sent, strict=True)
    return [part.view(tensor.dtype).view(-1, *tensor.shape[1:]) for part, tensor in pairs]
