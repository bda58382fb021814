"""Python values that a step reads by name; in its graph they are constants.

The values are the numbers, texts and flags among the step's globals, its closure and the attributes
of objects there, if the code of the step has the name. A changed value has the step recorded anew.
A value that a function reads further down is not seen.
"""

import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

_CONSTANTS = (bool, int, float, str, type(None))


def function_of(step: Callable[..., object]) -> FunctionType | None:
    """The Python function of a step; None for another callable."""
    function = inspect.unwrap(getattr(step, "__func__", step))
    return function if isinstance(function, FunctionType) else None


def names_known_to(step: Callable[..., object]) -> dict[str, Any]:
    """The objects that a step knows by name: its closure, its globals, and `self` of a method."""
    function = function_of(step)
    owner = {"self": getattr(step, "__self__", step)}
    if function is None:
        return owner
    found = inspect.getclosurevars(function)
    return {**owner, **found.globals, **found.nonlocals}


def constants_of(step: Callable[..., object]) -> dict[str, object]:
    """The Python values that a step reads by name, as they are now."""
    function = function_of(step)
    if function is None:
        return {}
    attributes = set(_names_in(function.__code__))
    found: dict[str, object] = {}
    for name, value in names_known_to(step).items():
        if type(value) in _CONSTANTS:
            found[name] = value
        elif isinstance(value, type) or not hasattr(value, "__dict__"):
            continue
        else:
            own = vars(value)
            of_code = ((key, own[key]) for key in attributes & own.keys())
            found |= {f"{name}.{key}": x for key, x in of_code if type(x) in _CONSTANTS}
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
