"""The numbers of an update, read anew before each call: learning rates, betas, step counts.

torch's optimizers compute the numbers of their ops in Python. `optimizer.step()` runs again with
gradients that have no memory: ops on step counts run, of all other ops only the numbers are read.
Their results have no memory either. Where each number is a setting, as in torch's fused optimizers,
and no hook waits for the call, the settings are read instead.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from shardc.runtime import compat
from shardc.runtime.checks.optimizer_hooks import after_steps, before_steps
from shardc.step.updates import Given, Op, Update, stepping
from shardc.step.values import Entry


class OtherOps(RuntimeError):
    """An optimizer runs other ops than when the step was recorded."""


class Rerun(compat.OpMode):
    """A context around a call of an optimizer, which computes nothing.

    Attributes:
        numbers: the arguments of the ops that the host computed, in order.
        before: the step counts that ops have written to, each with a copy from before.
    """

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.numbers: list[object] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self._ops: Iterator[Op] = iter(update.ops)
        self._update = update

    def run(self, func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
        """Run an op on step counts; read the numbers of another op."""
        op = next(self._ops, None)
        if op is None or op.func is not func:
            name, was = type(self._update.optimizer).__name__, "nothing" if op is None else op.func
            raise OtherOps(f"{name} ran {was} when the step was recorded, and now runs {func}")
        if op.node is None:
            self._keep(func, args)
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, float))]
        if others != list(op.constants):
            raise OtherOps(f"{func} had the arguments {list(op.constants)}, and now has {others}")
        self.numbers += [leaves[place] for place in op.numbers]
        return tree_map(lambda each: leaves[each.place] if isinstance(each, Given) else each,
                        op.results)  # fmt: skip

    def _keep(self, func: compat.Op, args: compat.Args) -> None:
        if func._schema.is_mutable:
            counts = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor)]
            self.before += ((count, count.clone()) for count in counts)

    def take_back(self) -> None:
        """Give the step counts the values that they had."""
        for count, before in reversed(self.before):
            count.copy_(before)

    def is_over(self) -> bool:
        """Whether all ops of the update ran."""
        return next(self._ops, None) is None


class Numbers:
    """The numbers that the next `optimizer.step()` computes with."""

    def __init__(self, update: Update, groups: dict[Node, int]) -> None:
        """`groups` has the number of the parameter group for the node of each parameter."""
        self._update = update
        self._settings = settings_of(update, groups)
        self._is_checked = False
        self._rerun: Rerun | None = None

    def __call__(self) -> list[object]:
        """Give the numbers; the optimizer's step counts go on.

        Raises:
            OtherOps: the optimizer runs other ops than when it was recorded.
        """
        optimizer, settings = self._update.optimizer, self._settings
        self._rerun = None
        if settings is None or compat.is_watched(optimizer, (before_steps.run, after_steps.run)):
            return self._run_again()
        read: list[object] = [setting() for setting in settings]
        if not self._is_checked:
            self._is_checked, computed = True, self._run_again()
            if read != computed:
                self._settings = None
            return computed
        return read

    def _run_again(self) -> list[object]:
        self._rerun = Rerun(self._update)
        run_again(self._update, self._rerun)
        return self._rerun.numbers

    def take_back(self) -> None:
        """Take the last call back: step counts have the values from before."""
        if self._rerun is not None:
            self._rerun.take_back()
            self._rerun = None


def run_again(update: Update, rerun: Rerun) -> None:
    """Run `optimizer.step()` without computing."""
    optimizer = update.optimizer
    with stepping(optimizer, dict(update.grads), update.scaling), rerun:
        optimizer.step()
    if not rerun.is_over():
        raise OtherOps(f"{type(optimizer).__name__} runs fewer ops than before")


def settings_of(update: Update, groups: dict[Node, int]) -> list[Entry] | None:
    """The setting of each number, by its name in the op; None if a number is no setting."""
    found = []
    for op in update.ops:
        if not op.numbers:
            continue
        if op.node is None or op.func.name() not in _FUSED:
            return None
        first: Any = op.node.args[0]
        names = {value: name for name, value in op.node.kwargs.items() if isinstance(value, Node)}
        leaves = tree_leaves((op.node.args, op.node.kwargs))
        paths = (_IN_BETAS.get(name := names[leaves[at]], (name,)) for at in op.numbers)
        own = groups[first[0]]
        found += [Entry(update.optimizer, "param_groups", (own, *path)) for path in paths]
    return found


_IN_BETAS: dict[str, tuple[Any, ...]] = {"beta1": ("betas", 0), "beta2": ("betas", 1)}
_FUSED = {f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad")}
