"""FSDP2's names, with shardc behind them: code that imports FSDP2 shards by shardc, unchanged.

`as_fsdp2()` replaces the names from a script. The environment variable SHARDC_AS_FSDP2=1 replaces
them in every process that imports torch, also where a launcher or a library starts the processes:
torch calls `from_environment` at the end of its import (entry point "torch.backends").

FSDP2's classes stay as they are: policies are torch's own, and `isinstance(module, FSDPModule)` is
true of sharded modules.
"""

import functools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from types import FunctionType
from typing import Any

VARIABLE = "SHARDC_AS_FSDP2"

_NAMES = {
    "torch.distributed.fsdp": "fully_shard register_fsdp_forward_method share_comm_ctx",
    "torch.distributed.checkpoint.state_dict": "get_model_state_dict get_optimizer_state_dict "
    "get_state_dict set_model_state_dict set_optimizer_state_dict set_state_dict",
}
"""The functions of torch that shardc has under the same names, by their public module."""


def as_fsdp2() -> ExitStack:
    """Put shardc under the names of FSDP2, and of DCP's functions for state dicts.

    The names change in all loaded modules; a module that is loaded later imports the changed names.
    A model that FSDP2 has sharded before stays as it is. A second call changes nothing.

    Returns:
        A context: at its end, or at `close()`, the names are torch's again.
    """
    theirs = [
        getattr(import_module(home), name)
        for home, names in _NAMES.items()
        for name in names.split()
    ]
    ours = {function: _ours(function) for function in theirs if not hasattr(function, VARIABLE)}
    undo = ExitStack()
    for place, module in list(sys.modules.items()):
        if place.split(".")[0] == "shardc":
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is FunctionType and value in ours:
                setattr(module, name, ours[value])
                undo.callback(_bind_back, module, name, ours[value], value)
    return undo


def from_environment() -> None:
    """Call `as_fsdp2` if the environment variable SHARDC_AS_FSDP2 is 1.

    Raises:
        ValueError: the variable is neither 1 nor 0 nor empty.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {asked!r}: set it to 1, or to 0 for torch's own FSDP2")
    if asked == "1":
        as_fsdp2()


def _ours(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The function of shardc under the name of torch's; shardc is loaded at its first call.

    torch calls `from_environment` also where a module of shardc imports torch, half loaded itself.
    """

    @functools.wraps(theirs)  # with the attributes of `fully_shard`, too
    def call(*args: Any, **kwargs: Any) -> Any:
        if "transformers.core_model_loading" in sys.modules:  # it may shard a model to fill it
            import_module("shardc.integrations.sharded_at_load").let_transformers_load()
        return getattr(import_module("shardc"), theirs.__name__)(*args, **kwargs)

    setattr(call, VARIABLE, True)
    return call


def _bind_back(module: object, name: str, replacement: object, value: object) -> None:
    if getattr(module, name, None) is replacement:
        setattr(module, name, value)
