"""The numbers of an update, read anew before each call: learning rates, betas, step counts.

torch's optimizers compute the numbers of their ops in Python. `optimizer.step()` runs again with
gradients that have no memory: ops on step counts run, of all other ops only the numbers are read.
Their results have no memory either.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardc.backend.recorder import Given, Op, Update, stepping
from shardc.runtime import compat


class OtherOps(RuntimeError):
    """An optimizer runs other ops than when the step was recorded."""


class Rerun(compat.OpMode):
    """A context around a call of an optimizer, which computes nothing.

    Attributes:
        numbers: the arguments of the ops that the host computed, in order.
    """

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.numbers: list[object] = []
        self._ops: Iterator[Op] = iter(update.ops)
        self._update = update

    def run(self, func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
        """Run an op on step counts; read the numbers of another op."""
        op = next(self._ops, None)
        if op is None or op.func is not func:
            name, was = type(self._update.optimizer).__name__, "nothing" if op is None else op.func
            raise OtherOps(f"{name} ran {was} when the step was recorded, and now runs {func}")
        if op.node is None:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, float))]
        if others != list(op.constants):
            raise OtherOps(f"{func} had the arguments {list(op.constants)}, and now has {others}")
        self.numbers += [leaves[place] for place in op.numbers]
        return tree_map(lambda each: leaves[each.place] if isinstance(each, Given) else each,
                        op.results)  # fmt: skip

    def is_over(self) -> bool:
        """Whether all ops of the update ran."""
        return next(self._ops, None) is None


def numbers_of(update: Update) -> list[object]:
    """The numbers that the next `optimizer.step()` computes with; its step counts go on.

    Raises:
        OtherOps: the optimizer runs other ops than when it was recorded.
    """
    optimizer = update.optimizer
    with stepping(optimizer, dict(update.grads), update.scaling), Rerun(update) as rerun:
        optimizer.step()
    if not rerun.is_over():
        raise OtherOps(f"{type(optimizer).__name__} runs fewer ops than before")
    return rerun.numbers
