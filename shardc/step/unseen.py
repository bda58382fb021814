"""Effects of a step that no op shows: it changes objects, reads memory, draws random numbers.

The Python of a recorded step does not run again, so a step that does so is refused.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.step.constants import Known
from shardc.step.recorder import Recorder
from shardc.step.refusals import NotRecorded
from shardc.step.updates import FRESH, Settings, group_settings

_MISSING = object()


def effects_of(known: Known) -> dict[str, object]:
    """The values that a step could change by its Python, as they are now."""
    return {**known.constants(), **known.effects(), _RANDOM: _random_states()}


def check_effects(before: dict[str, object], known: Known) -> None:
    """Refuse a step that has changed objects by its Python.

    Raises:
        NotRecorded: it has.
    """
    after = effects_of(known)
    names = [n for n, value in after.items() if (before.get(n, _MISSING),) != (value,)]
    names += before.keys() - after.keys()
    if names:
        shown = ", ".join(sorted(names, key=len)[:3]) + ", ..." * (len(names) > 3)
        raise NotRecorded(
            f"it changes {shown}, and its Python would not run again: do so outside of it"
        )


def own_rates(known: Known) -> dict[Optimizer, Settings]:
    """Give settings of optimizers objects of their own (`FRESH`); the settings.

    A step that writes a setting shows by that, though the value may be equal.
    """
    optimizers = dict.fromkeys(each for each in known.objects() if isinstance(each, Optimizer))
    for group in (group for each in optimizers for group in each.param_groups):
        group.update({name: FRESH[type(v)](v) for name, v in group.items() if type(v) in FRESH})
    return {each: group_settings(each) for each in optimizers}


_RANDOM = "the random numbers of Python or NumPy"


def _random_states() -> object:
    return random.getstate(), repr(numpy.random.get_state(legacy=False))


@contextmanager
def seeing_reads(recorder: Recorder) -> Iterator[None]:
    """Inside, a step that reads the memory of a tensor past all ops is refused."""

    thread = threading.get_ident()

    def noting(read: Callable[..., object]) -> Callable[..., object]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> object:
            is_plain = type(tensor) in (Tensor, nn.Parameter)
            if is_plain and threading.get_ident() == thread and not torch.compiler.is_compiling():
                recorder.note_read()
            return read(tensor, *args, **kwargs)

        return call

    own = {name: vars(Tensor).get(name) for name in _READS}
    for name in _READS:
        setattr(Tensor, name, noting(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


_READS = ("tolist", "numpy", "__dlpack__")
