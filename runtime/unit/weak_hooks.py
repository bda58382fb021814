"""Hooks of autograd leaves that refer to their targets weakly.

Autograd keeps the hooks of a leaf in C++, out of sight of Python's garbage collector: a leaf with a
hook that refers back to the leaf would never be freed. So a hook refers to its target weakly. While
the gradient can be seen, the target is alive: the parameters of a bucket hold the bucket, and so
does every graph that reads it.
"""

import weakref
from collections.abc import Callable

from torch import Tensor

from shardc.runtime import compat


def weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that calls a bound method while the object of the method is alive."""
    reference = weakref.WeakMethod(method)

    @compat.untraced  # compiled autograd would trace it
    def hook(leaf: Tensor) -> None:
        target = reference()
        if target is not None:
            target(leaf)

    return hook
