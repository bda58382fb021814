"""Where in the user's program a thread is: the call that led into torch, shardc or Python's own."""

import os
import sys
from types import FrameType

_LIBRARIES = {"torch", "shardc", *sys.stdlib_module_names}
_WRAPPERS = {"wrapper", "decorate_context", "inner", "run", "call", "fn"}


def place_in(frame: FrameType | None) -> tuple[str, str]:
    """The function of a library that the user's code called, and from where ("train.py:12").

    Either is "" where it cannot be told.
    """
    called = ""
    while frame is not None and _is_library(frame):
        name = frame.f_code.co_name
        if name == "__torch_dispatch__" and "func" in frame.f_locals:  # of a ShardTensor
            called = frame.f_locals["func"]._schema.name.removeprefix("aten::")
        elif not name.startswith(("_", "<")) and name not in _WRAPPERS:
            called = name
        frame = frame.f_back
    if frame is None:
        return called, ""
    return called, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def call_of_user() -> str:
    """The call that this thread is in: "clip_grad_norm_ at train.py:12"."""
    return " at ".join(filter(None, place_in(sys._getframe(1))))


def place_of_thread(thread: int) -> str:
    """From where a thread called into a library ("train.py:12"), or ""."""
    return place_in(sys._current_frames().get(thread))[1]


def own_collective_of(thread: int) -> str:
    """The collective of the program's own that a thread is in ("barrier at train.py:12"), or "".

    One of torch.distributed that blocks, called by code that is not shardc's.
    """
    frame = innermost = sys._current_frames().get(thread)
    modules = []
    while frame is not None and _is_library(frame):
        modules.append(frame.f_globals.get("__name__") or "")
        frame = frame.f_back
    if "torch.distributed.distributed_c10d" not in modules or any(
        module.split(".")[0] == "shardc" for module in modules
    ):
        return ""
    return " at ".join(filter(None, place_in(innermost)))


def _is_library(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__") or ""  # generated code has none
    return not module or module.split(".")[0] in _LIBRARIES
