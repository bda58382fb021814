"""An op that needs a whole parameter gathers it and reports the gather; `strict` refuses the op.

A gather costs a message, and memory for one full parameter. Each gather is logged
(`TORCH_LOGS=+shardc`) and counted for `shardc.report`. An op that gathers in several steps is
warned of once.
"""

import logging
from collections import Counter
from typing import NoReturn

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.arguments import checked
from shardc.runtime.checks.optimizer_hooks import Turn, after_steps
from shardc.runtime.checks.refusal import caller_and_way_out, is_refused_to_caller
from shardc.runtime.checks.telling import warn
from shardc.runtime.tensor.shard_spec import Over, ShardSpec, whole_gradient
from shardc.runtime.tensor.sharded import Sharded

log = logging.getLogger("shardc")

WARNED_AFTER = 3
"""The number of steps in which an op gathers until a warning names it."""
NEEDS_WHOLE = "it needs more than this rank's part"
_USER_NAMES = {"aten._local_scalar_dense.default": ".item()"}


class GatherCounts:
    """The ops of this process that gathered.

    Attributes:
        strict: whether ops that gather are refused.
        counts: the number of gathers of each op.
        steps: optimizer steps since the first gather; None before the first gather.
    """

    def __init__(self) -> None:
        self.strict = False
        self.counts: Counter[str] = Counter()
        self.steps: int | None = None
        self._seen: dict[str, tuple[int, int]] = {}

    def note(self, func: compat.Op, tensor: Sharded) -> None:
        """Count and log a gather of `tensor` for `func`; warn once if `func` gathers every step."""
        name = str(func)
        if self.steps is None:
            self.steps = 0
            after_steps.call(Turn.COUNTED, self._end_step, compiled=True)
        self.counts[name] += 1
        if log.isEnabledFor(logging.DEBUG):
            caller, _ = caller_and_way_out()
            log.debug("%s gathers %s%s", name, tensor._label(), caller)
        last, several = self._seen.get(name, (-1, 0))
        if last != self.steps:
            self._seen[name] = (self.steps, several + 1)
            if several + 1 == WARNED_AFTER:
                caller, _ = caller_and_way_out()
                warn(
                    f"{name} gathers {tensor._label()} in every step{caller}: each time that is a "
                    "message and memory for the whole tensor. For an optimizer take "
                    "shardc.WholeTensorOptimizer; shardc.strict(True) shows where it happens, by "
                    "an error"
                )

    def _end_step(self, *_: object) -> None:
        assert self.steps is not None
        self.steps += 1


gather_counts = GatherCounts()


@checked
def strict(on: bool = True) -> None:
    """Refuse ops on ShardTensors that need the whole tensor, instead of gathering it.

    The setting is for this process, from now on. At first such ops are allowed; `strict(False)`
    allows them again. The error names the op, its caller and a way out. All ranks must have the
    same setting.
    """
    gather_counts.strict = on


def refuse(func: compat.Op, why: str = NEEDS_WHOLE) -> NoReturn:
    """Raise NotImplementedError for an op that cannot run on parts."""
    name = str(func)
    caller, way_out = caller_and_way_out()
    raise NotImplementedError(
        f"{_USER_NAMES.get(name, name)} is not supported on a ShardTensor: {why}{caller}. {way_out}"
    )


def gathered(func: compat.Op, tensor: Sharded, why: str = NEEDS_WHOLE) -> Tensor:
    """Gather the whole of `tensor` for `func`. Every rank that holds a part must make this call.

    Raises:
        NotImplementedError: `strict` is on, the local part is no plain tensor (as in a trace), or
            the caller is a library that would go wrong with whole values.
    """
    if gather_counts.strict or type(tensor._local) is not Tensor or is_refused_to_caller():
        refuse(func, why)
    gather_counts.note(func, tensor)
    with torch.no_grad():
        return tensor._gathered()


def plain(func: compat.Op, operand: Tensor, like: Sharded | None = None) -> Tensor:
    """Gather an operand of `func` that is a DTensor; every rank of its mesh must make this call.

    A DTensor with the shape, mesh and placements that `like` had before `fully_shard` is returned
    itself, and so is a tensor that is no DTensor of torch.

    Raises:
        NotImplementedError: `strict` is on.
    """
    if not compat.is_dtensor(operand):
        return operand
    tp = None if like is None else like._shard_spec.tp
    if tp is not None and tp.lies_as(operand):
        return operand
    if gather_counts.strict:
        refuse(func, f"an operand is a DTensor, placed otherwise: {operand.placements}")
    parts = compat.dtensor_parts(operand)
    assert parts is not None
    with torch.no_grad():  # from its parts: torch 2.11 cannot detach a parameter here
        return compat.make_dtensor(*parts).full_tensor()


# -- gradients that come back plain ----------------------------------------------------------------


class _PlainGradients:
    """A hook of a ShardTensor reduces a whole gradient over the ranks and keeps this rank's part.

    Attributes:
        over: the reduction; "own" for a statistic, as its gradients are equal on all ranks
            (`WholeValue`).
    """

    def __init__(self, spec: ShardSpec, over: Over) -> None:
        self.spec, self.over = spec, over

    def __call__(self, grad: Tensor) -> Tensor | None:
        if isinstance(grad, Sharded):
            return None
        part = whole_gradient(grad, self.spec, self.over)
        return Sharded.make(part, tuple(grad.shape), self.spec)


def expect_plain_gradient(tensor: Sharded, over: Over = "mean") -> None:
    """Reduce the whole gradients that ops give `tensor` from now on.

    Each rank's gradient is of the rank's own batch.
    """
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return
    hooks = compat.grad_hooks(tensor)
    hook = next((hook for hook in hooks if isinstance(hook, _PlainGradients)), None)
    if hook is None:
        tensor.register_hook(_PlainGradients(tensor._shard_spec, over))
    elif over == "mean":
        hook.over = over


def reduce_plain_gradients(param: compat.Subclass) -> None:
    """Reduce the whole gradients that autograd computes for a parameter from now on.

    An `autograd.Function` that gets the parameter outside of its module's forward gives a whole
    gradient.
    """
    with torch.enable_grad():
        expect_plain_gradient(param)
