"""Parts of a step that no graph can have: ops, random numbers, values that the host reads."""

from collections.abc import Sequence

import torch

from shardc.runtime import compat

aten = torch.ops.aten
READS_A_VALUE = (
    "it reads a value on the host, as `.item()` and `if tensor:` do. Return the value, and "
    "read it outside of the step; give an optimizer that reads values fused=True"
)


class NotRecorded(Exception):
    """A step has a part that no graph can have; the text names the part and the way out."""


class RandomNumbers:
    """The states of the default generators, as the last random op of the step left them."""

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            self._generators += torch.cuda.default_generators
        self.note()

    def note(self) -> None:
        """Note the states after an op."""
        self._states = [generator.get_state() for generator in self._generators]

    def check(self) -> None:
        """Refuse a state that no op left: the graph would draw other numbers.

        Raises:
            NotRecorded: somebody has set the state.
        """
        now = (generator.get_state() for generator in self._generators)
        if not all(map(torch.equal, now, self._states)):
            raise NotRecorded(
                "it sets the state of random numbers, as manual_seed does, and a checkpoint around "
                "dropout in an uncompiled model: compile the model, and set seeds outside"
            )


def check_op(func: compat.Op, args: compat.Args, leaves: Sequence[object]) -> None:
    """Refuse an op that a graph cannot run again.

    Args:
        leaves: the leaves of all its arguments.

    Raises:
        NotRecorded: it is one.
    """
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise NotRecorded(
            f"{func} draws from a torch.Generator, whose state no graph has: draw outside of the "
            "step, and give the tensor as an argument"
        )
    others = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
    if others:
        raise NotRecorded(
            f"it calls {func} with an object of torch.distributed: communicate outside of the "
            "step, or by torch.distributed._functional_collectives"
        )
    if torch.Tag.dynamic_output_shape in func.tags:
        by_number = func is aten.index.Tensor and not any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if not by_number:
            raise NotRecorded(
                f"the shape of a result of {func} depends on values: keep the shape, as "
                "torch.where does"
            )
