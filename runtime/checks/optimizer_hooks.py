"""Hooks on the steps of all optimizers of the process: one of torch's before a step, one after it.

A part of shardc asks for its turn when it is first needed. From then on it is called at every step,
in the order of `Turn`, whichever part has asked first.

Dynamo traces these hooks where a step itself is compiled. Most parts are left out of such a step.
Hooks on state dicts are no part of it: torch has them for a single optimizer, and the parts that
need one register it at that optimizer's first step.
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
"""A part's function: given a step's arguments, it may return others, as torch's own hooks may."""


class Turn(enum.IntEnum):
    """The parts, in their order: those that refuse a step come before those that change something.

    REPLACED: refuses DTensors that sharding has replaced (`runtime/tensor/tensor_parallel.py`).
    LATE: refuses parameters that came after `fully_shard` (`runtime/modules/late_params.py`).
    FIRST: refuses or warns of values and dtypes in a first step (`runtime/modules/first_step.py`).
    UNREDUCED: refuses gradients that wait for a reduction (`runtime/eager/accumulate.py`).
    QUANTISED: shards quantised state (`runtime/tensor/quantised_state.py`).
    ON_HOST: brings state back from the host (`runtime/tensor/state_on_host.py`).
    COUNTED: counts the steps in which ops gather (`runtime/tensor/shard_gathers.py`).
    """

    REPLACED = enum.auto()
    LATE = enum.auto()
    FIRST = enum.auto()
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
    """The parts that are called on one side of a step."""

    def __init__(self, register: Callable[..., object]) -> None:
        self._register = register
        self._hooks: list[_Hook] = []

    def call(self, turn: Turn, call: Call, *, once: bool = False, compiled: bool = False) -> None:
        """Call a part at steps from now on; it makes no difference to ask again.

        Args:
            once: at one step of each optimizer only, the first that it does not refuse.
            compiled: in compiled steps too, where Dynamo traces it.
        """
        if any(hook.turn == turn for hook in self._hooks):
            return
        if not self._hooks:
            self._register(self._run)
        hooks = [*self._hooks, _Hook(turn, call, once, compiled)]
        self._hooks = sorted(hooks, key=lambda hook: hook.turn)

    def call_again(self, turn: Turn) -> None:
        """Call a part that is called once an optimizer anew."""
        for hook in self._hooks:
            if hook.turn == turn:
                hook.passed.clear()

    def _run(
        self, optimizer: Optimizer, args: compat.Args, kwargs: compat.Kwargs
    ) -> tuple[compat.Args, compat.Kwargs]:
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
