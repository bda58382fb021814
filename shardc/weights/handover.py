"""Weights handed to an engine: to a process of the same machine, or by broadcast.

Tensors of a stream are packed into one flat buffer after another, each with a table of names,
shapes, dtypes and byte offsets, as vLLM, SGLang and verl send them. `share` places the buffers in
memory that another process opens: a file in shared memory, or a CUDA IPC handle. The receiver needs
no process group. `broadcast` is the sender of `update_weights_from_distributed`: it announces the
tensors of a buffer, then broadcasts each one.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from shardc.runtime.checks.words import dtype_name

_ALIGN = 256
"""Bytes to which a tensor is aligned in a buffer."""
_SHARED = Path("/dev/shm")


class Entry(TypedDict):
    """A tensor in a buffer, at `offset` bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True)
class Packed:
    """Tensors in one flat buffer of bytes.

    Attributes:
        table: the tensors in the buffer.
        buffer: the bytes; they are written again when the iterator advances.
    """

    table: list[Entry]
    buffer: Tensor

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The names and the tensors, as views of the buffer."""
        return [(entry["name"], _view(entry, self.buffer)) for entry in self.table]


def _view(entry: Entry, buffer: Tensor) -> Tensor:
    numel = torch.Size(entry["shape"]).numel()
    flat = buffer[entry["offset"] : entry["offset"] + numel * entry["dtype"].itemsize]
    return flat.view(entry["dtype"]).view(entry["shape"])


def _bytes_on(device: torch.device, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def packed(
    stream: Iterable[tuple[str, Tensor]],
    buffer_bytes: int = 2**28,
    allocate: Callable[[torch.device, int], Tensor] = _bytes_on,
) -> Iterator[Packed]:
    """Pack the tensors of a stream into a buffer of `buffer_bytes`, again and again.

    A larger tensor gets a larger buffer of its own.
    """
    buffer: Tensor | None = None
    table: list[Entry] = []
    used = 0
    for name, value in stream:
        size = value.numel() * value.element_size()
        if table and (buffer is None or used + size > buffer.numel()):
            assert buffer is not None
            yield Packed(table, buffer)
            table, used = [], 0
        if buffer is None or size > buffer.numel() or buffer.device != value.device:
            buffer = None  # the old memory goes first
            buffer = allocate(value.device, max(buffer_bytes, size))
        entry = Entry(name=name, shape=tuple(value.shape), dtype=value.dtype, offset=used)
        _view(entry, buffer).copy_(value)
        table.append(entry)
        used += -(-size // _ALIGN) * _ALIGN
    if table:
        assert buffer is not None
        yield Packed(table, buffer)


# -- on one machine ------------------------------------------------------------------------------


class Shared(NamedTuple):
    """A packed buffer for another process of the machine; it can be pickled.

    Attributes:
        table: the tensors in the buffer.
        file: the path and the bytes of a file in shared memory; None on CUDA.
        handle: on CUDA, the function and the arguments of `reduce_tensor`; None on CPUs.
    """

    table: list[Entry]
    file: tuple[str, int] | None
    handle: tuple[Callable[..., Tensor], tuple[Any, ...]] | None


def share(stream: Iterable[tuple[str, Tensor]], buffer_bytes: int = 2**28) -> Iterator[Shared]:
    """Share the tensors of a stream with another process, a buffer at a time.

    Send each `Shared` to the other process, and advance when it has answered that it is done.
    """
    files: list[str] = []

    def allocate(device: torch.device, size: int) -> Tensor:
        if device.type != "cpu":
            return _bytes_on(device, size)
        folder = _SHARED if _SHARED.is_dir() else None
        number, path = tempfile.mkstemp(prefix="shardc_weights_", dir=folder)
        os.close(number)
        _remove(files)
        files.append(path)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    try:
        for each in packed(stream, buffer_bytes, allocate):
            if each.buffer.device.type == "cpu":
                yield Shared(each.table, (files[-1], each.buffer.numel()), None)
            else:
                torch.accelerator.synchronize(each.buffer.device)
                yield Shared(each.table, None, reduce_tensor(each.buffer))
    finally:
        _remove(files)


def _remove(files: list[str]) -> None:
    while files:
        with suppress(FileNotFoundError):
            os.unlink(files.pop())


def opened(shared: Shared) -> list[tuple[str, Tensor]]:
    """The tensors of a `Shared`, in the process that received it: views, for `load_weights`."""
    if shared.file is not None:
        path, size = shared.file
        buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    else:
        assert shared.handle is not None
        rebuild, arguments = shared.handle
        buffer = rebuild(*arguments)
    return Packed(shared.table, buffer).tensors()


# -- by broadcast --------------------------------------------------------------------------------


def broadcast(
    stream: Iterable[tuple[str, Tensor]],
    announce: Callable[[list[str], list[str], list[list[int]]], object] | None,
    group: dist.ProcessGroup | None,
    buffer_bytes: int = 2**28,
) -> None:
    """Send a stream as `update_weights_from_distributed` of SGLang and vLLM expects it.

    Args:
        stream: of `full_tensors`; every trainer iterates.
        announce: on the sender, a function that makes the engines receive tensors with these names,
            dtypes ("bfloat16") and shapes, and that does not wait for them; None on other trainers.
        group: the group of the sender and the engines, in which the sender is rank 0.
        buffer_bytes: the bytes that are announced and sent at a time.
    """
    if announce is None:
        for _ in stream:  # the others take part in its gathers
            pass
        return
    for each in packed(stream, buffer_bytes):
        dtypes = [dtype_name(entry["dtype"]) for entry in each.table]
        shapes = [list(entry["shape"]) for entry in each.table]
        announce([entry["name"] for entry in each.table], dtypes, shapes)
        for _, value in each.tensors():
            dist.broadcast(value, group=group, group_src=0)
