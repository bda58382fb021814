"""The gather of a parameter with an extension, which chooses the tensors to send.

Several tensors of several dtypes travel as the bytes of one message, as in FSDP2; one tensor
travels as it is. Extensions are in `tensor.extension`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardc.runtime.comm.collectives import Started
from shardc.runtime.layout.spec import UnshardSpec, object_of


def start_extended(local: Tensor, spec: UnshardSpec, start: Callable[[Tensor], Started]) -> Started:
    """Start the gather of a parameter from this rank's segment, `local: (S,)`.

    Args:
        local: the segment, on the device that gathers it.
        spec: the spec of the bucket.
        start: starts an all-gather of a flat tensor.

    Returns:
        The started gather. Its result is the full parameter; `early` may not be read.
    """
    extension = object_of(spec.extension or "")
    sent, metadata = extension.before_gather(local)
    started = start(_message(sent))

    def finish(raw: Tensor) -> Tensor:
        gathered = _received(started.then(raw), sent, spec.world_size)
        return extension.after_gather(gathered, metadata, spec.compute_dtype, local)

    return Started(started.raw, finish, started.done)


def _message(sent: Sequence[Tensor]) -> Tensor:
    """The tensors `sent` in one flat tensor."""
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
