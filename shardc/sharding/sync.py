"""`sync_module_states`: every rank starts from the values of rank 0 of its mesh.

Rank 0 lays out one bucket at a time and scatters its segments. So only rank 0 holds full
parameters: its own model and one bucket. With copies of the model (HSDP), each rank of the first
copy then broadcasts its segment to the other copies. Each buffer is broadcast once, even where
several units hold it.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.groups.ranks import Ranks
from shardc.runtime.layout.layout import BucketLayout
from shardc.runtime.layout.padding import new_padded
from shardc.runtime.tensor.tensor_parallel import local_value
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.watch.entering import entering

Held = tuple[nn.Module, str, Tensor]
"""A buffer with the module that holds it, and its name there."""


def what_has_values(
    ranks: Ranks, params: Sequence[nn.Parameter], buffers: Sequence[Held], init: bool
) -> str:
    """This rank's note for `can_scatter`: whether it is the source, and has values or is on meta.

    `init`: whether this rank has a `param_init_fn`.
    """
    on_meta = [param.is_meta for param in params]
    everything = on_meta + [buffer.is_meta for *_, buffer in buffers]
    have = "values" if not any(everything) else "meta" if all(on_meta) else "mixed"
    return f"{'source' if _is_source(ranks) else 'other'} {have}{' init' if init else ''}"


def can_scatter(notes: Iterable[str]) -> bool:
    """Whether rank 0 sends its values, or all ranks make values first, by the notes of all ranks.

    Raises:
        ValueError: rank 0 lacks values, and not all ranks can make them; raised on all ranks.
    """
    said = [note.split() for note in notes]
    if not any(note[0] == "source" and note[1] != "values" for note in said):
        return True
    if all(note[1:] == ["meta", "init"] for note in said):
        return False
    raise ValueError(
        "sync_module_states starts from the values of rank 0 of the mesh, where parameters or "
        "buffers are on meta: build the model with values there, or on meta on all ranks and give "
        "all of them a param_init_fn"
    )


def _is_source(ranks: Ranks) -> bool:
    return ranks.rank == 0 and _is_first_copy(ranks)


def _is_first_copy(ranks: Ranks) -> bool:
    return ranks.replicas is None or compat.resolve_group(ranks.replicas).rank() == 0


@torch.no_grad()
def scatter_segment(
    layout: BucketLayout, params: Sequence[nn.Parameter], ranks: Ranks, device: torch.device
) -> Tensor:
    """This rank's segment, `(S,)` on `device`, of the bucket that rank 0's parameters fill."""
    segment = new_padded(layout.segment, layout.dtype, device)
    if not layout.segment:
        return segment
    if _is_first_copy(ranks):
        parts = None
        if _is_source(ranks):
            flat = new_padded(layout.numel, layout.dtype, device)
            for slot, param in zip(layout.slots, params, strict=True):
                place = flat[slot.start : slot.start + slot.numel]
                place.copy_(local_value(param).reshape(-1))
            parts = [_bytes(part) for part in flat.chunk(ranks.world_size)]
        with entering(f"a scatter of {segment.numel()}", ranks.shard):
            group = compat.resolve_group(ranks.shard)
            dist.scatter(_bytes(segment), parts, group=group, group_src=0)
    _to_copies(segment, ranks)
    return segment


@torch.no_grad()
def sync_copies(buckets: Iterable[Bucket]) -> None:
    """Broadcast the segments of the first copy to the other copies of the model."""
    for bucket in buckets:
        sent = bucket.segment.detach().to(bucket.owner.device)
        _to_copies(sent, bucket.ranks)
        if sent.device != bucket.segment.device:
            bucket.segment.copy_(sent)


def _to_copies(tensor: Tensor, ranks: Ranks) -> None:
    if ranks.replicas is not None and tensor.numel():
        with entering(f"a broadcast of {tensor.numel()}", ranks.replicas):
            dist.broadcast(_bytes(tensor), group=compat.resolve_group(ranks.replicas), group_src=0)


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as bytes: not every backend carries every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


# -- buffers -------------------------------------------------------------------------------------


def unsynced_buffers(modules: Iterable[nn.Module], skipped: Iterable[nn.Module]) -> Iterator[Held]:
    """The buffers below `modules`, except in `skipped` and synced ones: (module, name, buffer)."""
    left_alone = set(skipped)
    for module in dict.fromkeys(m for root in modules for m in root.modules()):
        if module not in left_alone:
            done = vars(module).get("_shardc_synced", ())
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if name not in done:
                    yield module, name, buffer


def buffer_facts(buffers: Iterable[Held]) -> list[str]:
    """Facts that must be equal on all ranks before buffers are broadcast."""
    return [
        f"buffer {name}{list(buffer.shape)} {buffer.dtype}, {type(buffer).__name__}"
        for _, name, buffer in buffers
    ]


@torch.no_grad()
def sync_buffers(
    modules: Iterable[nn.Module],
    skipped: Iterable[nn.Module],
    ranks: Ranks,
    device: torch.device,
) -> None:
    """Broadcast the buffers of rank 0; ranks with a buffer on meta make it on `device`."""
    sent: dict[int, Tensor] = {}
    for module, name, buffer in list(unsynced_buffers(modules, skipped)):
        if id(buffer) not in sent:
            sent[id(buffer)] = value = _writable(buffer, device)
            for part in local_parts(value):
                _broadcast(part, ranks)
        if sent[id(buffer)] is not buffer:
            setattr(module, name, sent[id(buffer)])
        vars(module).setdefault("_shardc_synced", set()).add(name)


def _writable(buffer: Tensor, device: torch.device) -> Tensor:
    """`buffer`, or one in its place: a meta buffer has no memory, an expanded one too little."""
    if buffer.is_meta:
        return torch.empty_like(buffer, device=device)
    return buffer.contiguous() if type(buffer) is Tensor else buffer


def local_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of, as `__tensor_flatten__` names them."""
    value = compat.local_of(tensor) if compat.is_dtensor(tensor) else tensor
    return [part.detach() for part in compat.plain_parts(value)]


def _broadcast(tensor: Tensor, ranks: Ranks) -> None:
    if not tensor.numel():
        return
    whole = tensor.contiguous()
    if _is_first_copy(ranks):
        with entering(f"a broadcast of {whole.numel()}", ranks.shard):
            dist.broadcast(_bytes(whole), group=compat.resolve_group(ranks.shard), group_src=0)
    _to_copies(whole, ranks)
    if whole is not tensor:
        tensor.copy_(whole)
