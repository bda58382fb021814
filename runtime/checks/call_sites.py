"""The place of a thread in the user's program: the call into torch, shardc or Python's library."""

import os
import sys
import threading
from pathlib import Path
from types import FrameType

from shardc.runtime import compat

_LIBRARIES = {"torch", "shardc", *sys.stdlib_module_names}
_WRAPPERS = {"wrapper", "decorate_context", "inner", "run", "call", "fn"}


def place_in(frame: FrameType | None) -> tuple[str, str]:
    """The function of a library that the user's code called, and the place of the call.

    The place is "train.py:12", or "train.py:12, through net.py:30" where net.py:30 is in a module's
    forward, which train.py:12 called. Code of installed packages is named only where no other code
    is found. The function or the place is "" where it is unknown.
    """
    called = ""
    while frame is not None and is_library(frame):
        name = frame.f_code.co_name
        if name == "__torch_dispatch__" and "func" in frame.f_locals:  # of a ShardTensor
            called = frame.f_locals["func"]._schema.name.removeprefix("aten::")
        elif not name.startswith(("_", "<")) and name not in _WRAPPERS:
            called = name
        frame = frame.f_back
    return called, _place_of(frame)


def _place_of(frame: FrameType | None) -> str:
    innermost, first, script = frame, None, None
    while frame is not None:
        if compat.is_module_call(frame):
            script = None  # the user's code was a forward: go on to its caller
        elif not (is_library(frame) or _is_installed(frame)):
            first, script = first or frame, script or frame
        frame = frame.f_back
    found = script or first or innermost
    if found is None:
        return ""
    return _line(found) if first in (None, found) else f"{_line(found)}, through {_line(first)}"


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def call_of_user() -> str:
    """The call that this thread is in: "clip_grad_norm_ at train.py:12"."""
    return " at ".join(filter(None, place_in(sys._getframe(1))))


def place_of_thread(thread: int) -> str:
    """The place where a thread called into a library ("train.py:12"), or "".

    For a thread of autograd, which the user's code did not start, the place is the main thread's.
    """
    main = threading.main_thread().ident or 0
    return place_in(_frame_of(thread))[1] or place_in(_frame_of(main))[1]


def own_collective_of(thread: int) -> str:
    """The collective of the program's own that a thread is in ("barrier at train.py:12"), or "".

    Only blocking collectives of torch.distributed count, called by code outside shardc.
    """
    return _own_collective_in(_frame_of(thread))


def _frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread.

    A caller passes the frame on at once. A function that kept a frame of its own thread in a
    variable would make a reference cycle, which holds the variables of all its callers.
    """
    return sys._current_frames().get(thread)


def _own_collective_in(innermost: FrameType | None) -> str:
    frame, modules = innermost, []
    while frame is not None and is_library(frame):
        modules.append(frame.f_globals.get("__name__") or "")
        frame = frame.f_back
    if "torch.distributed.distributed_c10d" not in modules or any(
        module.split(".")[0] == "shardc" for module in modules
    ):
        return ""
    return " at ".join(filter(None, place_in(innermost)))


def _is_installed(frame: FrameType) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(frame.f_code.co_filename).parts)


def is_library(frame: FrameType) -> bool:
    """Whether a frame runs code of torch, shardc or Python's own library."""
    module = frame.f_globals.get("__name__") or ""  # generated code has none
    return not module or module.split(".")[0] in _LIBRARIES
