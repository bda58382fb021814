"""Writes what runs, and the memory it touches, into the trace of the stand-ins.

The stand-ins see launches but not what a kernel reads and writes. In eager code a dispatch mode
knows; in code of Inductor the names of a Triton kernel's arguments say it, and the same mode the
rest.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.output_code import CompiledFxGraph
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardc.runtime.comm import table_rows

LIBRARY = ctypes.CDLL(None)  # the stand-ins, which were loaded before all else
TRANSFERS = ("c10d", "_c10d_functional", "symm_mem")
"""Namespaces of collectives, which the stand-in for NCCL notes."""
OURS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "to_host", "wait")
"""How ops of the project are called that start or wait for transfers."""


def note(line: str) -> None:
    """Write a line into the trace, if there is one."""
    LIBRARY.standin_note(line.encode())


@contextmanager
def tracing(path: Path) -> Iterator[None]:
    """Inside, the stand-ins write a trace."""
    LIBRARY.standin_trace(str(path).encode())
    try:
        yield
    finally:
        LIBRARY.standin_trace(b"")


def _local(value: Any) -> Any:
    """The part of a sharded tensor that this rank has."""
    for name in ("_local_tensor", "_local"):
        value = getattr(value, name, value)
    return value


def _span(tensor: Tensor) -> str:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return f"{start:x}-{start + (last + 1) * tensor.element_size():x}"


def _note_op(name: str, read: list[Any], written: list[Any]) -> None:
    writes = {id(t): t for t in map(_local, written) if type(t) in _PLAIN}
    reads = {id(t): t for t in map(_local, read) if type(t) in _PLAIN and id(t) not in writes}
    touched = [("w", t) for t in writes.values()] + [("r", t) for t in reads.values()]
    known = [(how, t) for how, t in touched if t.numel() and (t.is_cuda or t.is_pinned())]
    if not known:
        return
    on_device = any(t.is_cuda for _, t in known)
    if on_device and not all(t.is_cuda for _, t in known):
        return  # a copy between host and device, which the stand-in notes
    stream = hex(torch.cuda.current_stream().cuda_stream) if on_device else "host"
    note(f"op {stream} {name} " + " ".join(f"{how}:{_span(t)}" for how, t in known))


_PLAIN = (Tensor, torch.nn.Parameter)
_OF_SEVERAL = {
    "fetch_rows.default": table_rows.fetch_rows,
    "return_rows.default": table_rows.return_rows,
}
"""Ops of the project that are made of operators and transfers."""


class NotedOps(TorchDispatchMode):
    """Notes every operator that is no view and no transfer."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles under this mode as without."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _OF_SEVERAL:
            with self:
                return _OF_SEVERAL[func.__name__](*args)
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            _note_op(func.name(), tree_leaves([args, kwargs or {}]), tree_leaves(result))
            return result
        transfer = func.namespace in TRANSFERS
        if func.namespace == "shardc":
            transfer = func.__name__.startswith(OURS)
        if transfer or func.is_view or "empty" in func.__name__:
            return result
        schema = func._schema.arguments
        named = [*zip(schema, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in schema if kwargs and a.name in kwargs]
        mutable = [v for a, v in named if a.alias_info is not None and a.alias_info.is_write]
        _note_op(func.__name__, tree_leaves([args, kwargs or {}]), tree_leaves([mutable, result]))
        return result


class NotedKernel:
    """A Triton kernel of Inductor that is noted when it runs; its arguments' names say how."""

    def __init__(self, name: str, source: str, kernel: Any) -> None:
        self.name = name
        self.kernel = kernel
        signature = re.search(rf"def {name}\(([^)]*)\)", source)
        self.arguments = re.findall(r"(\w+)(?::[^,]*)?(?:,|$)", signature[1] if signature else "")
        mutated = re.search(r"'mutated_arg_names': \[([^\]]*)\]", source)
        self.mutated = re.findall(r"'(\w+)'", mutated[1]) if mutated else []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def run(self, *args: Any, stream: Any, **kwargs: Any) -> Any:
        """Note it, and launch it."""
        named = [*zip(self.arguments, args, strict=False)]
        writes = [v for n, v in named if n in self.mutated or "out_ptr" in n or n.startswith("ws")]
        _note_op(self.name, list(args), writes)
        return self.kernel.run(*args, stream=stream, **kwargs)


def note_compiled_code() -> list[str]:
    """From now on, code of Inductor is noted; gives the names of the kernels as they are loaded."""
    names: list[str] = []
    triton: Callable[..., Any] = AsyncCompile.triton
    call = CompiledFxGraph.__call__

    def noted_triton(self: Any, name: str, source: str, *args: Any, **kwargs: Any) -> NotedKernel:
        names.append(name)
        return NotedKernel(name, source, triton(self, name, source, *args, **kwargs))

    def noted_call(self: Any, inputs: Any) -> Any:
        with NotedOps():
            return call(self, inputs)

    AsyncCompile.triton = noted_triton
    CompiledFxGraph.__call__ = noted_call  # type: ignore[method-assign]
    return names
