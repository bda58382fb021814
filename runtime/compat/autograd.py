"""The autograd engine and its hooks, function transforms, the profiler."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

FunctionContext: TypeAlias = Any
"""The `ctx` in the methods of an autograd Function: any attribute may be set on it."""

PackHook = Callable[[Tensor], object]
UnpackHook = Callable[[Any], Tensor]
SavedTensorsHooks = tuple[PackHook, UnpackHook]


def below_autograd() -> AbstractContextManager[None]:
    """Inside, ops do not enter autograd, and nothing is differentiated.

    Collectives enter autograd in Python, which takes 10 us each.
    """
    return torch._C._AutoDispatchBelowAutograd()


def entering_autograd() -> AbstractContextManager[None]:
    """Inside, ops enter autograd, also within `below_autograd`."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


def grad_hooks(param: Tensor) -> Iterable[Callable[[Tensor], Tensor | None]]:
    """The hooks that `param.register_hook` collected."""
    return list((param._backward_hooks or {}).values())


def post_accumulate_hooks(param: Tensor) -> Iterable[Callable[[Tensor], None]]:
    """The hooks that `register_post_accumulate_grad_hook` collected."""
    return list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values())


def all_hooks(param: Tensor) -> list[Callable[..., object]]:
    """The hooks of a parameter, of both kinds."""
    if not param._backward_hooks and not getattr(param, "_post_accumulate_grad_hooks", None):
        return []
    return [*grad_hooks(param), *post_accumulate_hooks(param)]


def leave_gradient_dtype(param: Tensor) -> None:
    """Let `param.grad` have another dtype than `param`."""
    param.grad_dtype = None


def when_backward_ends(call: Callable[[], None]) -> None:
    """Call `call` at the end of the backward under way; must be called within one."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class _Nested(threading.local):
    """The calls to make when an outer backward ends, for each backward that runs inside it.

    The calls are kept by thread: autograd runs a checkpoint and its inner backwards on the thread
    of one device, unless more than 60 backwards are nested.
    """

    def __init__(self) -> None:
        self.postponed: list[list[Callable[[], None]]] = []


_nested = _Nested()


def when_outermost_backward_ends(call: Callable[[], None]) -> None:
    """Call `call` at the end of the outermost backward; reentrant checkpoints run an inner one."""
    if _nested.postponed:
        _nested.postponed[-1].append(call)
    else:
        when_backward_ends(call)


def _nesting(engine: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Run the engine; the end calls of a nested backward wait for the end of the outer backward."""
    if not in_backward():
        return engine(*args, **kwargs)
    _nested.postponed.append([])
    try:
        result = engine(*args, **kwargs)
    finally:
        postponed = _nested.postponed.pop()
    for call in postponed:
        when_outermost_backward_ends(call)
    return result


def give_engine_inputs(run_for: Callable[..., object], is_meant: Callable[[object], bool]) -> None:
    """Call `run_for` in place of torch's engine, where `is_meant` accepts one of the inputs.

    `run_for` takes the arguments of `selection.run_for_inputs`. The engine looks up the node of a
    tensor without calling any override of torch's functions.
    """
    engine = functools.partial(_nesting, torch.autograd._engine_run_backward)

    @functools.wraps(torch.autograd._engine_run_backward)
    def run_backward(outputs: object, *args: Any, **kwargs: Any) -> object:
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        if not any(map(is_meant, inputs)):
            return engine(outputs, *args, **kwargs)
        given = dict(zip(_ENGINE_ARGUMENTS, args, strict=False)) | kwargs

        def run(known: Sequence[object], allow_missing: bool) -> object:
            where = (tuple(known), allow_missing, True)
            return engine(outputs, *(given[name] for name in _ENGINE_ARGUMENTS[:3]), *where)

        return run_for(
            run,
            inputs,
            given.get("accumulate_grad", False),
            given["create_graph"],
            given.get("allow_unreachable", False),
        )

    torch.autograd._engine_run_backward = run_backward  # type: ignore[assignment]


_ENGINE_ARGUMENTS = ("grad_tensors", "keep_graph", "create_graph", "inputs", "allow_unreachable")


def backward_number() -> int:
    """A number of the backward that autograd runs on this thread; -1 if none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return backward_number() != -1


def in_nested_backward() -> bool:
    """Whether the running backward began inside of another one, as reentrant checkpoints do."""
    return bool(_nested.postponed)


def top_saved_tensors_hooks() -> SavedTensorsHooks | None:
    """The innermost saved-tensor hooks, (pack, unpack); None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saved_tensors_hooks_allowed() -> bool:
    """Whether saved-tensor hooks are allowed; `torch.func` transforms refuse them."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def is_checkpoint_hook(pack: PackHook) -> bool:
    """Whether a pack hook belongs to `torch.utils.checkpoint`, which recomputes."""
    return pack.__module__ == "torch.utils.checkpoint"


def checkpoint_frames() -> list[Any]:
    """The checkpoints with a running forward, innermost first; `recompute_fn` recomputes one.

    Checkpoints that are being recomputed are left out.
    """
    stack: list[SavedTensorsHooks] = []
    if saved_tensors_hooks_allowed():
        while hooks := top_saved_tensors_hooks():
            stack.append(hooks)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for hooks in reversed(stack):
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    cells = [
        cell.cell_contents
        for pack, _ in stack
        if is_checkpoint_hook(pack)
        for cell in getattr(pack, "__closure__", None) or ()
    ]
    return [value for value in cells if hasattr(value, "recompute_fn")]


def outside_function_transforms() -> AbstractContextManager[object]:
    """Inside, `vmap`, `grad` and their like around the caller do not apply."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


@contextmanager
def outside_selective_checkpoints() -> Iterator[None]:
    """Inside, selective activation checkpoints around the caller see no op.

    Selective checkpoints save or recompute op by op, in order. The recomputation may run other ops:
    a gather that the forward did not need, or a graph that was compiled for other sizes since.
    """
    from torch.utils import _python_dispatch as dispatch
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    ours = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    stack = dispatch._get_current_dispatch_mode_stack()
    lowest = next((i for i, mode in enumerate(stack) if isinstance(mode, ours)), len(stack))
    above = [dispatch._pop_mode() for _ in stack[lowest:]][::-1]
    kept = [mode for mode in above if not isinstance(mode, ours)]
    for mode in kept:
        dispatch._push_mode(mode)
    try:
        yield
    finally:
        if above:
            for _ in kept:
                dispatch._pop_mode()
            for mode in above:
                dispatch._push_mode(mode)


is_profiled = torch.autograd._profiler_enabled
"""Whether a profiler runs on this thread."""
