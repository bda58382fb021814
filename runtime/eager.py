"""What runs around a call of a sharded module that no graph contains.

The buckets of the module's unit are open while it runs: reading a parameter gathers them. The
outermost call is the forward whose gathers are agreed on and started ahead.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardc.runtime import collectives, compat, lost_peers
from shardc.runtime.backward_pass import backward_pass
from shardc.runtime.gathers import Gathers
from shardc.runtime.unsharded import saving_handles

_running: list["EagerCall"] = []
_gathers: Gathers | None = None


@dataclass(eq=False)
class EagerCall:
    """A call of a sharded module, while it runs."""

    module: Any
    hooks: torch.autograd.graph.saved_tensors_hooks | None
    label: AbstractContextManager[Any]


@torch.compiler.disable
def begin_call(module: Any) -> EagerCall:
    """A sharded module is about to run eagerly."""
    global _gathers
    hooks = saving_handles() if module._shardc_slots else None
    if hooks is not None:
        hooks.__enter__()
    if not _running:
        _gathers = Gathers("forward")
    for bucket in module._shardc_buckets:
        bucket.gathered.enter()
    unit = getattr(module, "_shardc_unit", None)
    label = collectives.labelled(f"shardc: forward {unit.name}") if unit else nullcontext()
    label.__enter__()
    call = EagerCall(module, hooks, label)
    _running.append(call)
    return call


@torch.compiler.disable
def end_call(call: EagerCall) -> None:
    """It returned or raised (then this runs while the exception is handled)."""
    global _gathers
    _running.pop()
    call.label.__exit__(None, None, None)
    for bucket in call.module._shardc_buckets:
        bucket.gathered.leave()
    if call.hooks is not None:
        call.hooks.__exit__()
    error = sys.exc_info()[1]
    if not _running and error is not None:
        lost_peers.leave(error)
    if not _running and _gathers is not None:
        done, _gathers = _gathers, None
        done.close(raised=error is not None)


def gathers() -> Gathers:
    """Those of the pass that runs: a backward (where it recomputes a forward), a forward, or one
    read outside of both."""
    if compat.in_backward():
        return backward_pass().gathers
    return _gathers or Gathers("forward")


def is_inside_other_unit(unit: Any) -> bool:
    """Whether a module of a unit other than `unit` runs eagerly."""
    return any(getattr(call.module, "_shardc_unit", unit) is not unit for call in _running)
