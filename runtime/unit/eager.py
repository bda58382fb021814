"""Eager calls of sharded modules, outside of graphs: gather before, reshard after.

While a module runs, the buckets of its unit are open: a read of a parameter gathers its bucket. The
outermost call is a forward: ranks agree on the forward's gathers, and gathers start ahead of need.
"""

import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from shardc.runtime import compat
from shardc.runtime.unit.backward_pass import backward_pass
from shardc.runtime.unit.gather_order import Gathers
from shardc.runtime.unit.precision import map_tensors
from shardc.runtime.unit.regather import saving_handles
from shardc.runtime.watch import lost_peers

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket
    from shardc.runtime.unit.unit import Unit


class HoldsSlots(Protocol):
    """A module that holds sharded parameters, by name in `_shardc_slots`."""

    @property
    def _shardc_slots(self) -> Mapping[str, object]: ...

    @property
    def _shardc_buckets(self) -> Iterable["Bucket"]: ...


@dataclass(eq=False)
class EagerCall:
    """A running call of a sharded module."""

    module: HoldsSlots
    buckets: list["Bucket"]
    hooks: torch.autograd.graph.saved_tensors_hooks | None
    label: AbstractContextManager[object]


class _Forward(threading.local):
    """The forward that runs on this thread: its nested calls, and buckets that stay after them."""

    def __init__(self) -> None:
        self.calls: list[EagerCall] = []
        self.gathers: Gathers | None = None
        self.records = False
        self.staying: dict[Bucket, None] = {}


_forward = _Forward()


@compat.untraced
def begin_call(module: HoldsSlots) -> EagerCall:
    """Begin an eager call of a sharded module: open its buckets."""
    if torch.jit.is_tracing():
        raise NotImplementedError(
            f"torch.jit.trace cannot trace the sharded {type(module).__name__}: trace an unsharded "
            "copy with the values of get_model_state_dict, or use torch.compile"
        )
    hooks = saving_handles() if module._shardc_slots else None
    if hooks is not None:
        hooks.__enter__()
    if not _forward.calls:
        _forward.gathers = Gathers("forward")
        _forward.records = torch.is_grad_enabled()
    buckets = list(module._shardc_buckets)
    for bucket in buckets:
        bucket.gathered.enter()
    unit = getattr(module, "_shardc_unit", None)
    label = record_function(f"shardc: forward {unit.name}") if unit else nullcontext()
    label.__enter__()
    call = EagerCall(module, buckets, hooks, label)
    _forward.calls.append(call)
    return call


def open_in_forward(bucket: "Bucket") -> bool:
    """Open a bucket until the innermost running call ends; False where no forward runs.

    A module that shares a parameter with another unit may read the parameter of a child that it
    does not call.
    """
    if _forward.calls:
        bucket.gathered.enter()
        _forward.calls[-1].buckets.append(bucket)
    return bool(_forward.calls)


@compat.untraced
def end_call(call: EagerCall, outputs: object, raised: bool) -> None:
    """End an eager call that returned `outputs`, or raised: close its buckets.

    After a raise, `end_call` runs while the exception is handled.

    Raises:
        RuntimeError: the forward wrote to a full parameter.
    """
    calls = _forward.calls
    calls.pop()
    call.label.__exit__(None, None, None)
    written = [bucket for bucket in call.buckets if bucket.gathered.is_written]
    stops = raised or bool(written)
    for bucket in call.buckets:
        if bucket.gathered.leave(call.module, stops):
            _forward.staying[bucket] = None
    for bucket in written:
        bucket.gathered.drop()
    if call.hooks is not None:
        call.hooks.__exit__()
    error = sys.exc_info()[1] if raised else None
    if not calls and error is not None:
        lost_peers.leave(error)
    if not calls and _forward.gathers is not None:
        done, _forward.gathers = _forward.gathers, None
        done.close(stops)
        _end_forward(outputs, stops)
    if written:
        _refuse_written(written[0])


def _refuse_written(bucket: "Bucket") -> NoReturn:
    """Raise for a forward that wrote to a full parameter.

    The error takes the place of autograd's own error for an op after the write.
    """
    raise RuntimeError(
        f"a forward updates a sharded parameter of {bucket.label} in place, and the write is "
        "lost: it went to a gathered copy. Update parameters outside of the forward: sharded "
        "ones of parameters(), or full ones inside summon_full_params(module)"
    )


def _end_forward(outputs: object, raised: bool) -> None:
    """End the outermost call; buckets that stay for its backward are freed when that one ends."""
    buckets, _forward.staying = list(_forward.staying), {}
    if compat.in_backward():  # a recomputed forward
        backward_pass().opened.extend(buckets)
        return
    for bucket in buckets:
        bucket.gathered.end_forward(raised)
    kept = [bucket.gathered for bucket in buckets if bucket.gathered.is_kept]
    if not kept:
        return

    def end_backward() -> None:
        for gathered in kept:
            gathered.end_backward()

    def begin_backward(_: object) -> None:
        compat.when_backward_ends(end_backward)

    def note(output: Tensor) -> Tensor:
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(begin_backward)
        return output

    map_tensors(note, outputs)


def gathers() -> Gathers:
    """The gathers of the running pass: a backward (which recomputes a forward), a forward, or a
    read outside of both."""
    if compat.in_backward():
        return backward_pass().gathers
    return _forward.gathers or Gathers("forward")


def suspends_gradients() -> bool:
    """Whether the running forward records gradients, and the caller runs inside `no_grad`."""
    return _forward.records and not torch.is_grad_enabled()


def innermost_unit() -> int | None:
    """The number of the innermost unit that runs eagerly; None outside of all units.

    Dynamo asks once, while it traces, and makes no guard.
    """
    units = (getattr(call.module, "_shardc_unit", None) for call in reversed(_forward.calls))
    return next((unit.number for unit in units if unit is not None), None)


compat.ask_while_tracing(innermost_unit)


def is_inside_other_unit(unit: "Unit") -> bool:
    """Whether a module of a unit other than `unit` runs eagerly."""
    return any(getattr(call.module, "_shardc_unit", unit) is not unit for call in _forward.calls)
