"""Checks of arguments, options and settings against their annotations, before anything is done.

A signature is the table: types, choices (`Literal`) and, through `Annotated[T, Must(...)]`, ranges
and words of its own. One function reads a signature for setters, public functions and dataclasses,
so that every refusal names the argument, the value and the allowed values. A number or a flag of
numpy counts as one of Python. pydantic and beartype do the same for ten times the import time, and
their errors speak of hints and validators. The items of an iterable or a mapping are left to the
code that reads them.
"""

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Must:
    """A condition beside a type in `Annotated`, and its words for an error.

    Attributes:
        be: the condition, in words that follow "must be".
        test: whether a value of the type is allowed.
    """

    be: str
    test: Callable[[Any], bool] = field(default=lambda value: True, repr=False)


Count = Annotated[int, Must("a whole number of at least 1", lambda n: n >= 1)]
Positive = Annotated[float, Must("a positive finite number", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Must("a number of at least 0", lambda x: 0 <= x < math.inf)]
Dtype = Annotated[
    torch.dtype,
    Must(
        "torch.float16, bfloat16, float32, float64",
        lambda dtype: dtype.is_floating_point and dtype.itemsize > 1,
    ),
]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function`: each call checks the arguments against the annotations."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # Python says it better
            return function(*args, **kwargs)
        check_arguments(function, given)
        return function(*args, **kwargs)

    return call


def check_arguments(
    function: Callable[..., object], given: Mapping[str, object], only: Iterable[str] = ()
) -> None:
    """Raise for arguments in `given` that do not fit the annotations of `function`.

    With `only`, the check is for these names.

    Raises:
        TypeError, ValueError: as in `check_value`.
    """
    hints = hints_of(function)
    for name in only or given:
        if name in hints:
            check_value(f"{function.__name__}: {name}", given[name], hints[name])


@functools.cache
def hints_of(annotated: Callable[..., object]) -> dict[str, object]:
    """The annotations of a function or class, with the conditions in `Annotated`."""
    return typing.get_type_hints(annotated, include_extras=True)


def check_value(name: str, value: object, hint: object) -> None:
    """Raise unless `value` fits `hint`.

    Raises:
        TypeError: the value is of another type.
        ValueError: the value is of the type, but out of range or no choice.
    """
    if not _fits(value, hint):
        kind = ValueError if _fits(value, hint, any_value=True) else TypeError
        raise kind(f"{name} must be {hint_in_words(hint)}, got {shown(value)}")


def _fits(value: object, hint: object, any_value: bool = False) -> bool:
    """Whether `value` fits `hint`; with `any_value`, whether it fits the type of `hint`."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        musts = [] if any_value else [part for part in parts[1:] if isinstance(part, Must)]
        return _fits(value, parts[0], any_value) and all(must.test(value) for must in musts)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part, any_value) for part in parts)
    if origin is Literal:
        return any(type(value) is type(one) and (any_value or value == one) for one in parts)
    if origin is type:
        return isinstance(value, type) and issubclass(value, parts[0])
    if hint in _OF_KIND:
        return _OF_KIND[hint](value)
    kind = origin or hint
    assert isinstance(kind, type), hint
    return isinstance(value, kind)


_OF_KIND: dict[object, Callable[[object], bool]] = {
    Any: lambda value: True,
    bool: lambda value: (
        isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1))
    ),
    int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
    float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
}
_WORDS: dict[object, list[str]] = {
    bool: ["True", "False"],
    int: ["a whole number"],
    float: ["a number"],
    str: ["a text"],
    type(None): ["None"],
}


def hint_in_words(hint: object) -> str:
    """The values that `hint` takes, in words: "'auto' or a whole number"."""
    words = list(dict.fromkeys(_each_in_words(hint)))
    words.sort(key="None".__eq__)
    return " or ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])


def _each_in_words(hint: object) -> list[str]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        said = [part.be for part in parts[1:] if isinstance(part, Must)]
        return said or _each_in_words(parts[0])
    if origin in (typing.Union, types.UnionType):
        return [words for part in parts for words in _each_in_words(part)]
    if origin is Literal:
        return [repr(one) for one in parts]
    if origin is type:
        return [f"a subclass of {parts[0].__name__}"]
    if hint in _WORDS:
        return _WORDS[hint]
    kind = origin or hint
    assert isinstance(kind, type), hint
    name = kind.__name__
    return ["a function" if name == "Callable" else f"{'an' if name[0] in 'AEIO' else 'a'} {name}"]


def shown(value: object) -> str:
    """`value` in a few words: tensors and modules by class, other values as they print."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} module"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
