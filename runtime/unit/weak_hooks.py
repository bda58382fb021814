"""Hooks of leaves that do not keep alive what they call.

Autograd keeps the hooks of a leaf in C++, out of sight of Python's garbage collector: a leaf whose
hook leads back to it would never be freed. So the hook knows its target weakly. Whoever can still
see the gradient holds the target: a bucket is held by its parameters, and by every graph that reads
it.
"""

import weakref
from collections.abc import Callable

from torch import Tensor

from shardc.runtime import compat


def weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that calls a bound method for as long as something else holds its object."""
    reference = weakref.WeakMethod(method)

    @compat.untraced  # compiled autograd would trace it
    def hook(leaf: Tensor) -> None:
        target = reference()
        if target is not None:
            target(leaf)

    return hook
