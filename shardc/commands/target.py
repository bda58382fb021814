"""`package.module:function` on the command line: the function that builds the model."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardc.commands.errors import FoundProblem, UsageError

if TYPE_CHECKING:
    from torch import nn

EXAMPLE = "examples.models:llama3_8b"


def load_model(target: str) -> tuple["nn.Module", Any]:
    """Import and call the function that `target` names: the model, and its example inputs or None.

    Modules are looked for in the current folder first. An error of user code is printed with its
    traceback.

    Raises:
        UsageError: `target` does not exist, is no function, or returns no model.
        FoundProblem: the module or the function raised.
    """
    build = find_target(target)
    from torch import nn

    try:
        built = build()
    except Exception as error:
        traceback.print_exception(error)
        raise FoundProblem(
            f"{target} raised {type(error).__name__} (traceback above): {error}"
        ) from None
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{target} returned a value of type {type(model).__name__}; it must return a "
            "torch.nn.Module, or (module, example inputs)"
        )
    return model, inputs


def find_target(target: str) -> Callable[[], Any]:
    """Import the module and find the function that `target` names.

    Raises:
        UsageError: `target` does not exist, or is no function that can be called without arguments.
        FoundProblem: the module raised.
    """
    name, _, attribute = target.partition(":")
    if not name or not attribute or os.sep in name or name.endswith(".py"):
        raise UsageError(
            f"'{target}' names no function: write package.module:function, with dots and without "
            f".py, for example {EXAMPLE}"
        )
    module = _import(name, target)
    if not hasattr(module, attribute):
        functions = ((k, f) for k, f in vars(module).items() if inspect.isfunction(f))
        known = [k for k, f in functions if f.__module__ == name and f.__name__[0] != "_"]
        raise UsageError(
            f"module '{name}' has no '{attribute}'; its functions: {', '.join(known) or 'none'}"
        )
    build = getattr(module, attribute)
    torch = sys.modules.get("torch")
    if not callable(build) or (torch is not None and isinstance(build, torch.nn.Module)):
        raise UsageError(
            f"'{target}' is of type {type(build).__name__}, not a function: name one that takes no "
            "arguments and returns the model"
        )
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise UsageError(
            f"'{target}' cannot be called without arguments ({error}): write a function around it "
            "that gives them"
        ) from None
    return build


def _import(name: str, target: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{name}.".startswith(f"{missing}."):
            parent, _, last = missing.rpartition(".")
            if parent:
                raise UsageError(f"package '{parent}' has no module '{last}'") from None
            raise UsageError(
                f"no module '{missing}' for '{target}': run shardc in the folder that contains "
                f"'{missing}', or add that folder to PYTHONPATH"
            ) from None
        raise FoundProblem(
            f"module '{name}' needs '{missing}', which is not installed here"
        ) from None
    except Exception as error:
        traceback.print_exception(error)
        raise FoundProblem(
            f"importing '{name}' raised {type(error).__name__} (traceback above): {error}"
        ) from None
