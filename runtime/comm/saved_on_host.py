"""Values that a forward saves for its backward on the host, and not on the device.

The forward saves, and waits until the values are saved; the backward loads. Copies are started on
streams of their own (`host_copies.stream_of`). The stream that computes waits for the copies, the
host does not. A save holds `value` until its wait, so the device's memory is free again at a known
place of the graph. The wait takes `value` as an input: a compiler would else let another kernel
write to its memory. A loaded value is waited for like a collective, by `wait_tensor`. The host's
memory is pinned, and comes from torch's cache of pinned memory. Sizes and strides stay.
"""

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm import collectives
from shardc.runtime.comm.host_copies import stream_of
from shardc.runtime.comm.ops import define_op


def _save_on_host(value: Tensor) -> Tensor:
    """Start to copy `value` to the host."""
    pinned = value.device.type != "cpu"
    host = torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device="cpu", pin_memory=pinned
    )
    _copy(host, value, value.device, "out")
    return host


def _wait_until_saved(host: Tensor, value: Tensor) -> Tensor:
    """Make the device wait until `host` has the values; the result is the same tensor."""
    return collectives.ops.wait_tensor(host)


def _load_from_host(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy `host` to the device."""
    value = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    _copy(value, host, device, "in")
    return value


def _copy(target: Tensor, source: Tensor, device: torch.device, direction: str) -> None:
    """Copy once the work queued on `device` is done; a wait for `target` waits for the copy."""
    if device.type == "cpu":
        target.copy_(source)
        return
    stream = stream_of(device, direction)
    with stream:
        target.copy_(source, non_blocking=True)
        done = stream.record_event()
    compat.call_when_waited_for(
        target, lambda: torch.accelerator.current_stream(device).wait_event(done)
    )


def _like(value: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


define_op(
    "save_on_host(Tensor value) -> Tensor",
    _save_on_host,
    lambda value: _like(value, torch.device("cpu")),
)
define_op(
    "wait_until_saved(Tensor(a) host, Tensor value) -> Tensor(a)",
    _wait_until_saved,
    lambda host, value: host,
)
define_op("load_from_host(Tensor host, Device device) -> Tensor", _load_from_host, _like)
