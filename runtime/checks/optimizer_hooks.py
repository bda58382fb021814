"""Hooks on the steps of all optimizers of the process: one torch hook before a step, one after it.

A part of shardc registers its function when the process first needs the part. Each later step calls
the registered functions in the order of `Turn`. The order of registration has no effect.

Dynamo traces these hooks where the step itself is compiled. A compiled step leaves out most parts.
Hooks on state dicts are not here: torch has such hooks for a single optimizer only. A part that
needs one registers it at the first step of the optimizer.
"""

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardc.runtime import compat

Call: TypeAlias = Callable[
    [Optimizer, compat.Args, compat.Kwargs], "tuple[compat.Args, compat.Kwargs] | None"
]
"""The function of a part. It may return new arguments for the step, as torch's own hooks may."""


class Turn(enum.IntEnum):
    """The parts, in the order of calls: parts that refuse steps come before parts that change them.

    REPLACED: refuses DTensors that sharding has replaced (`runtime/tensor/tensor_parallel.py`).
    LATE: refuses parameters that came after `fully_shard` (`runtime/modules/late_params.py`).
    FIRST: refuses or warns of values and dtypes in a first step (`runtime/modules/first_step.py`).
    FEWER: reduces gradients of a step with fewer micro-batches than planned (`shardc/step`).
    UNREDUCED: refuses gradients that wait for a reduction (`runtime/unit/accumulate.py`).
    QUANTISED: shards quantised state (`runtime/tensor/quantised_state.py`).
    ON_HOST: brings state back from the host (`runtime/tensor/state_on_host.py`).
    COUNTED: counts the steps in which ops gather (`runtime/tensor/shard_gathers.py`).
    """

    REPLACED = enum.auto()
    LATE = enum.auto()
    FIRST = enum.auto()
    FEWER = enum.auto()
    UNREDUCED = enum.auto()
    QUANTISED = enum.auto()
    ON_HOST = enum.auto()
    COUNTED = enum.auto()


@dataclass(eq=False)
class _Hook:
    turn: Turn
    call: Call
    once: bool
    compiled: bool
    passed: "weakref.WeakSet[Optimizer]" = field(default_factory=weakref.WeakSet)


class Steps:
    """The functions that one torch hook calls, before or after each step."""

    def __init__(self, register: Callable[..., object]) -> None:
        self._register = register
        self._hooks: list[_Hook] = []

    def call(self, turn: Turn, call: Call, *, once: bool = False, compiled: bool = False) -> None:
        """Register a part for all later steps; a second registration of a turn has no effect.

        Args:
            once: call the part at one step of each optimizer: the first step that it allows.
            compiled: call the part in compiled steps too, where Dynamo traces it.
        """
        if any(hook.turn == turn for hook in self._hooks):
            return
        if not self._hooks:
            self._register(self.run)
        hooks = [*self._hooks, _Hook(turn, call, once, compiled)]
        self._hooks = sorted(hooks, key=lambda hook: hook.turn)

    def call_again(self, turn: Turn) -> None:
        """Call a part that has `once` again, at the next step of each optimizer."""
        for hook in self._hooks:
            if hook.turn == turn:
                hook.passed.clear()

    def run(
        self, optimizer: Optimizer, args: compat.Args, kwargs: compat.Kwargs
    ) -> tuple[compat.Args, compat.Kwargs]:
        """Call the parts: the hook of torch."""
        for hook in self._hooks:
            is_left_out = torch.compiler.is_compiling() and not hook.compiled
            if is_left_out or optimizer in hook.passed:
                continue
            changed = hook.call(optimizer, args, kwargs)
            if hook.once:
                hook.passed.add(optimizer)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs


before_steps = Steps(register_optimizer_step_pre_hook)
after_steps = Steps(register_optimizer_step_post_hook)
