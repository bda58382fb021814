"""Python values that a step knows by name; in its graph they are constants.

A step knows its arguments, its closure, its globals, and `self` of a method. Functions of the same
file and methods of the same object are part of it. From the names on, it reads the attributes and
entries that its code names. A changed value has the step recorded anew. A value that a function of
another file reads is not seen.
"""

import dis
import enum
import functools
import inspect
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

PYTHONS = (bool, int, float, str, type(None))
"""The types of Python's numbers, texts and flags, which are constants in a graph."""
CONSTANTS = (complex, bytes, enum.Enum, numpy.generic, torch.dtype, torch.device, torch.Size)
"""The other types of values that are constants in a graph."""
DEPTH = 3
"""The most steps from a name to a value: `self.settings.loss.weight` has three."""
MOST_NUMBERS = 64
"""The most numbers in a list that is compared in each call."""


def is_constant(value: object) -> bool:
    """Whether a value is a constant in a graph."""
    return type(value) in PYTHONS or isinstance(value, CONSTANTS)


class Same:
    """An object that is equal to itself alone, and is not kept alive."""

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        try:
            self._get: Callable[[], object] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        own = self._get()
        return isinstance(other, Same) and own is not None and own is other._get()

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class _Named:
    """The names in the code of a function: globals, attributes, and texts, which may be keys."""

    globals: frozenset[str]
    attributes: frozenset[str]
    keys: frozenset[str]


def _named_in(code: CodeType) -> _Named:
    names: dict[str, set[str]] = {"GLOBAL": set(), "ATTR": set(), "METHOD": set(), "NAME": set()}
    for instruction in dis.get_instructions(code):
        _, _, kind = instruction.opname.rpartition("_")
        if kind in names and isinstance(instruction.argval, str):
            names[kind].add(instruction.argval)
    texts = {each for each in code.co_consts if isinstance(each, str)}
    inner = [_named_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return _Named(
        frozenset(names["GLOBAL"] | names["NAME"]).union(*(each.globals for each in inner)),
        frozenset(names["ATTR"] | names["METHOD"]).union(*(each.attributes for each in inner)),
        frozenset(texts).union(*(each.keys for each in inner)),
    )


class Known:
    """The objects that a step knows by name, for arguments of one kind."""

    def __init__(self, step: Callable[..., object], args: Any = (), kwargs: Any = None) -> None:
        kwargs = kwargs or {}
        while isinstance(step, functools.partial):
            args, kwargs = (*step.args, *args), {**step.keywords, **kwargs}
            step = step.func
        self._given = _arguments(step, args, kwargs)
        function = _function_of(step)
        owner, given = self._given.get("self"), self._given.values()
        reached = () if function is None else _reached(function, owner, given)
        self._functions = {each: _named_in(each.__code__) for each in reached}
        named = self._functions.values()
        self._keys = frozenset[str]().union(*(each.keys for each in named))
        # `getattr(self, "factor")` names an attribute by a text.
        self._attributes = self._keys.union(*(each.attributes for each in named))

    def names(self) -> dict[str, Any]:
        """The objects, by name."""
        found = dict(self._given)
        for function, named in self._functions.items():
            for name, value in _outside(function, named):
                if found.setdefault(name, value) is not value:
                    found[f"{name} of {function.__name__}"] = value
        return found

    def constants(self, lists: bool = False) -> dict[str, object]:
        """The values that shape the graph, as they are now: numbers, texts, flags, functions,
        modules and optimizers.

        Args:
            lists: whether numbers in lists count, which may be notes of the user.
        """
        found: dict[str, object] = {}
        for name, value in self.names().items():
            self._read(found, name, value, 0)
        if not lists:
            found = {k: v for k, v in found.items() if not isinstance(v, _Numbers)}
        return found

    def _read(self, found: dict[str, object], name: str, value: Any, depth: int) -> None:
        if is_constant(value):
            found[name] = value
        elif not isinstance(value, Tensor):
            if _shapes_graphs(value):
                found[name] = Same(value)
            elif isinstance(value, (list, tuple)) and value and _shapes_graphs(value[0]):
                found[name] = [*map(Same, value)]
            elif isinstance(value, (list, tuple)) and _is_short(value):
                found[name] = _Numbers(value)
            if depth < DEPTH and not isinstance(value, Optimizer):  # settings are facts anyway
                for key, own in self._parts_read(value):
                    self._read(found, f"{name}{key}", own, depth + 1)

    def _parts_read(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            yield from ((f"[{key!r}]", value[key]) for key in self._keys & value.keys())
        for own in _dictionaries_of(value):
            for key in self._attributes & own.keys():
                part = own[key]
                if isinstance(part, MemberDescriptorType):  # of __slots__
                    part = getattr(value, key, None)
                yield f".{key}", part

    def effects(self) -> dict[str, object]:
        """The numbers, texts, flags and tensors in objects, which the step may change."""
        found: dict[str, object] = {}
        seen = set[int]()
        for name, value in self.names().items():
            _note_parts(found, seen, name, value, 0)
        return found

    def objects(self) -> Iterator[Any]:
        """The objects, their attributes, and the elements of containers."""
        for each in self.names().values():
            yield each
            if not isinstance(each, (type, ModuleType, nn.Module)):
                yield from (part for _, part in _parts(each))


def _function_of(step: Callable[..., object]) -> FunctionType | None:
    """The Python function of a step; None for another callable."""
    function = inspect.unwrap(getattr(step, "__func__", step))
    if not isinstance(function, FunctionType):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    return function if isinstance(function, FunctionType) else None


def _arguments(step: Callable[..., object], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a step that are no tensors, and `self`, by name."""
    try:
        bound = inspect.signature(step).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
    except (TypeError, ValueError):  # the call will raise, or the callable has no signature
        given = {}
    plain = {name: value for name, value in given.items() if not _has_tensors(value)}
    return {"self": getattr(step, "__self__", step), **plain}


def _has_tensors(value: object) -> bool:
    return any(isinstance(each, Tensor) for each in tree_leaves(value))


def _reached(
    function: FunctionType, owner: object, given: Iterable[object]
) -> Iterator[FunctionType]:
    """A function, functions of its file that it names, and methods that they name.

    The methods are those of `owner`, and of objects whose classes are of the same file: of `given`,
    and outside of a function.
    """
    owners = [owner, *(each for each in given if _is_near(each, function))]
    found: dict[FunctionType, None] = {}
    waiting: list[Any] = [function]
    while waiting:
        each = inspect.unwrap(waiting.pop(0))
        if not isinstance(each, FunctionType) or each in found:
            continue
        of_owner = (each.__module__ or "").partition(".")[0] not in ("torch", "shardc")
        if each.__globals__ is function.__globals__ or of_owner:
            found[each], named = None, _named_in(each.__code__)
            waiting += (value for _, value in _outside(each, named) if _is_of(value, function))
            near = (each for _, each in _outside(each, named) if _is_near(each, function))
            for kind in dict.fromkeys(map(type, (*owners, *near))):
                methods = (getattr(kind, name, None) for name in named.attributes)
                waiting += (getattr(method, "fget", method) for method in methods)
    return iter(found)


def _is_of(value: object, function: FunctionType) -> bool:
    """Whether a function is of the same file."""
    inner = inspect.unwrap(value) if callable(value) else None
    return isinstance(inner, FunctionType) and inner.__globals__ is function.__globals__


def _is_near(value: object, function: FunctionType) -> bool:
    """Whether the class of an object is of the same file."""
    return type(value).__module__ == function.__module__


def _outside(function: FunctionType, named: _Named) -> Iterator[tuple[str, Any]]:
    """The objects outside of a function that its code names."""
    known = function.__globals__
    yield from ((n, known[n]) for n in named.globals if n in known)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue


class _Numbers(tuple[object, ...]):
    """The numbers, texts and flags in a list."""


def _is_short(value: list[object] | tuple[object, ...]) -> bool:
    return len(value) <= MOST_NUMBERS and all(map(is_constant, value))


def _shapes_graphs(value: object) -> bool:
    return callable(value) or isinstance(value, (Optimizer, torch.amp.GradScaler))


def _dictionaries_of(value: object) -> Iterable[Mapping[str, Any]]:
    """The attributes of an object and of its classes, and the inner modules of a module."""
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    yield from (vars(kind) for kind in reversed(kinds[:-1]))
    if hasattr(value, "__dict__"):
        yield vars(value)
    if isinstance(value, nn.Module):
        yield value._modules


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a container, or the attributes of another object, each with its name."""
    if isinstance(value, dict):
        for number, (key, each) in enumerate(list(value.items())):
            yield f"[{key!r}]" if is_constant(key) else f"[{number}]", each
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", each) for number, each in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", each) for key, each in list(vars(value).items()))


def _note_parts(
    found: dict[str, object], seen: set[int], name: str, value: Any, depth: int
) -> None:
    """Note the numbers, texts, flags and tensors of an object, and of its parts."""
    if is_constant(value):
        found[name] = value
    elif isinstance(value, Tensor):
        found[name] = Same(value)
    elif isinstance(value, random.Random):
        found[f"the random numbers of {name}"] = value.getstate()
    elif isinstance(value, numpy.random.Generator):
        found[f"the random numbers of {name}"] = repr(value.bit_generator.state)
    elif isinstance(value, nn.Module):
        for inner, module in value.named_modules():
            numbers = {k: v for k, v in vars(module).items() if is_constant(v)}
            found |= {f"{name}.{inner}.{key}": each for key, each in numbers.items()}
    elif not _is_left_out(value) and id(value) not in seen and depth < DEPTH:
        seen.add(id(value))
        in_list = isinstance(value, (list, tuple, set))  # numbers there are notes of the user
        for key, part in _parts(value):
            if not in_list or not is_constant(part):
                _note_parts(found, seen, f"{name}{key}", part, depth + 1)


def _is_left_out(value: object) -> bool:
    """Whether steps may change an object: the graph reads its tensors and settings anew."""
    of_shardc = (type(value).__module__ or "").partition(".")[0] == "shardc"
    kinds = (type, ModuleType, FunctionType, Optimizer, torch.amp.GradScaler)
    return of_shardc or isinstance(value, kinds)
