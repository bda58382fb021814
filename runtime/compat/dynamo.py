"""Dynamo: its traces, the graphs that it hands to a backend, its counters."""

import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame as _set_eval_frame
from torch.fx import GraphModule

F = TypeVar("F", bound=Callable[..., object])


def inline_only(fn: F) -> F:
    """Let Dynamo inline `fn` into a traced caller, and never compile `fn` by itself.

    A call from an eager frame then stays eager, instead of becoming a small graph of its own.
    """
    tell_later(functools.partial(_skip_code, fn))
    return fn


def static_shapes() -> AbstractContextManager[None]:
    """Inside, Dynamo compiles a graph for each shape, and makes no size dynamic by itself."""
    import torch._dynamo.config

    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


def _skip_code(fn: Callable[..., object]) -> None:
    from torch._dynamo.eval_frame import skip_code

    skip_code(fn.__code__)


def untraced(fn: F) -> F:
    """Do as `torch.compiler.disable`, at a third of its cost, and without Dynamo's import.

    Autograd and modules call such functions hundreds of times a step.
    """

    @functools.wraps(fn)
    def run(*args: object, **kwargs: object) -> object:
        tracing = _set_eval_frame(None)
        if tracing is None:
            return fn(*args, **kwargs)
        try:
            return fn(*args, **kwargs)
        finally:
            _set_eval_frame(tracing)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # where Dynamo would inline it
    return cast(F, inline_only(run))


def allow_in_graph(fn: F) -> F:
    """Do as `torch.compiler.allow_in_graph`, once Dynamo is imported."""
    tell_later(functools.partial(torch.compiler.allow_in_graph, fn))
    return fn


_told_later: list[Callable[[], object]] = []


def tell_later(tell: Callable[[], object]) -> None:
    """Call `tell` now if Dynamo is imported, else in `tell_dynamo`."""
    if "torch._dynamo" in sys.modules:
        tell()
    else:
        _told_later.append(tell)


def tell_dynamo() -> None:
    """Import Dynamo, a third of all that torch imports, and tell it how to take our functions.

    Dynamo must know before it traces the first of our functions, so code that makes a class with
    such functions calls this.
    """
    while _told_later:
        _told_later.pop()()


class CallOutsideGraphs:
    """A `__call__` of modules that Dynamo does not see: Dynamo finds the next class's `__call__`.

    In an `nn.Module.__call__` without hooks Dynamo traces `forward` alone. It traces all of any
    other `__call__`.

    Args:
        call: runs where nothing is traced.
    """

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner: Any = owner

    def __get__(self, module: nn.Module | None, cls: type) -> Callable[..., object]:
        if module is None:
            return self._call
        if torch._guards.TracingContext.try_get() is None:
            return self._call.__get__(module)
        return super(self._owner, module).__call__  # type: ignore[misc]


def ask_while_tracing(fn: Callable[..., object]) -> None:
    """Let Dynamo call `fn` while it traces, and take the result for a constant without a guard.

    `torch.compiler.assume_constant_result` does the same, and imports all of Dynamo.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_exporting() -> bool:
    """Whether torch.export traces now.

    In 2.11 Dynamo takes `torch.compiler.is_exporting()` for true in every compile.
    """
    return torch.compiler._is_exporting_flag


ask_while_tracing(is_exporting)


def stop_compiling(why: str) -> NoReturn:
    """End a compile with an error; an error raised in traced code would only break the graph.

    Raises:
        torch._dynamo.exc.TorchRuntimeError: `why`.
    """
    from torch._dynamo.exc import TorchRuntimeError

    raise TorchRuntimeError(why)


ask_while_tracing(stop_compiling)


def compile_calls(module: nn.Module, *args: object, **kwargs: Any) -> None:
    """Compile a module as `nn.Module.compile` does, also where Dynamo skips the module's `forward`.

    Dynamo skips the `forward` of torch's own modules. Here it gets a frame to compile, as from
    `torch.compile(module)`.
    """
    from torch._dynamo import external_utils, trace_rules

    call: Callable[..., object] = module._call_impl
    if trace_rules.check(module.forward):
        call = external_utils.wrap_inline(call)
    module._compiled_call_impl = torch.compile(call, *args, **kwargs)


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile` was called on a module or on a submodule."""
    wrapped = hasattr(module, "_orig_mod")
    return wrapped or any(each._compiled_call_impl is not None for each in module.modules())


def copy_dynamo_graph(gm: GraphModule) -> GraphModule:
    """A copy of a Dynamo graph that passes as Dynamo's; the original must keep its inputs."""
    graph, nodes = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    graph.graph_copy(gm.graph, nodes)
    result = gm.graph.output_node()
    graph.output(torch.fx.node.map_arg(result.args[0], nodes.__getitem__))
    graph.output_node().meta = dict(result.meta)
    copied = GraphModule(gm, graph, type(gm).__name__)  # copies attributes that the graph uses
    for node, twin in nodes.items():
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    copied.meta = gm.meta
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(copied, name, getattr(gm, name))
    return copied


def make_input_without_source(placeholder: torch.fx.Node, like: torch.fx.Node) -> None:
    """Give a new placeholder the value of `like`; the placeholder passes as one of Dynamo's."""
    placeholder.meta.update(
        {key: like.meta[key] for key in ("example_value", "stack_trace") if key in like.meta}
    )
    placeholder._dynamo_source = None


def real_input(placeholder: torch.fx.Node) -> Tensor | None:
    """The tensor for which Dynamo made a placeholder, while a backend compiles."""
    argument = placeholder.meta.get("grapharg")
    value = None if argument is None else argument.example
    return value if isinstance(value, Tensor) else None


def forget_classes(gm: GraphModule) -> None:
    """Remove from a Dynamo graph the classes of its tensors: parameters, fake tensors.

    The classes are part of the key of AOT autograd's cache, and nothing else reads them.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        if isinstance(node.type, type) and issubclass(node.type, Tensor):
            node.type = Tensor
    gm.recompile()


def is_cut_by_break(gm: GraphModule) -> bool:
    """Whether Dynamo ended the graph at a graph break."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def region_nodes() -> tuple[set[object], set[object]]:
    """The functions that open and close a function transform in a Dynamo graph."""
    from torch._C import _functorch
    from torch._functorch import predispatch

    kinds = ("_vmap", "_grad", "_jvp")
    opens = {getattr(_functorch, f"{kind}_increment_nesting") for kind in kinds}
    closes = {getattr(_functorch, f"{kind}_decrement_nesting") for kind in kinds}
    opens.add(predispatch._vmap_increment_nesting)
    closes.add(predispatch._vmap_decrement_nesting)
    return opens, closes


def is_higher_order(target: object) -> bool:
    """Whether a node calls an op that runs a body of its own."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_op(target: object) -> bool:
    """Whether a node calls an op of a library; the text of such an op identifies it."""
    return isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""The function that a Dynamo graph calls for `torch.no_grad()`."""

AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
"""The functions that a Dynamo graph calls for `torch.autocast`."""


def read_as_data(graph: torch.fx.Graph, value: Tensor) -> list[Tensor]:
    """The values of `.data` of a traced `value`, or of a view of it, in a Dynamo graph.

    Writes to `.data` do not count as writes to `value`.
    """
    read = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
    nodes = graph.find_nodes(op="call_function", target=read)
    values: list[Tensor] = [node.meta["example_value"] for node in nodes]
    memory = value.untyped_storage()._cdata
    return [data for data in values if data.untyped_storage()._cdata == memory]


def compile_id() -> tuple[int, int] | None:
    """The number of the frame that Dynamo compiles now, and the number of its earlier compiles.

    None outside of a compile.
    """
    from torch._guards import CompileContext

    known = CompileContext.current_compile_id()
    if known is None or known.frame_id is None or known.frame_compile_id is None:
        return None
    return known.frame_id, known.frame_compile_id


def seconds_of_dynamo() -> float:
    """The seconds that Dynamo's compile under way has taken; 0 outside of a compile."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return (time.time_ns() - context._start_time_ns) / 1e9 if context.in_progress() else 0.0


def recompile_reason() -> str:
    """The reason of the recompile under way; "" if Dynamo gives none."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return str(context._metrics.get("recompile_reason") or "") if context.in_progress() else ""


def allow_recompiles(pieces: int) -> None:
    """Raise Dynamo's limits for `pieces` modules of one code, each with and without gradients."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, 8 + 2 * pieces)
    config.accumulated_recompile_limit = max(
        config.accumulated_recompile_limit, config.recompile_limit
    )


def forget_compiled() -> None:
    """Reset Dynamo and its counters."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """A context without garbage collection: Python's own, and Dynamo's after each compile."""
    from torch._dynamo import config

    on = gc.isenabled()
    gc.disable()
    try:
        with config.patch(run_gc_after_compile=False):
            yield
    finally:
        if on:
            gc.enable()


def graph_break_reasons() -> list[str]:
    """The reasons why Dynamo broke graphs, one for each break."""
    from torch._dynamo.utils import counters

    return [str(reason) for reason, times in counters["graph_break"].items() for _ in range(times)]


def is_traced() -> bool:
    """Whether torch's structured trace, `TORCH_TRACE`, is on.

    If the trace is off, its handler removes itself at the first record. Other handlers of the
    logger, such as those of pytest, do not ask for a trace.
    """
    from torch._logging import _internal

    return any(isinstance(h, _internal.LazyTraceHandler) for h in _internal.trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Add a text to torch's structured trace, if the trace is on."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def check_backend_options(backend: object, options: object) -> None:
    """Call `check_options` of the backend with the given name, if the backend has one.

    `torch.compile` hands options over only when a first graph is compiled.
    """
    from torch._dynamo.backends.registry import lookup_backend

    if isinstance(backend, str):
        getattr(lookup_backend(backend), "check_options", lambda options: None)(options)


def failing_in_words(backend: F) -> F:
    """`backend`; its own errors reach the user without Dynamo's advice to report a bug (2.13).

    An own error is one that code of the backend's package raised itself. Dynamo lets errors of its
    own class pass, and appends the advice to their arguments. The `str` of the error raised here
    does not read its arguments.
    """
    package = backend.__module__.partition(".")[0]

    @functools.wraps(backend)
    def run(*args: object, **kwargs: object) -> object:
        try:
            return backend(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if _raised_in(error).partition(".")[0] != package:
                raise
            told = _told_in_words()(backend, error, sys._getframe())
            raise told.with_traceback(error.__traceback__) from None

    return cast(F, run)


def _raised_in(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")) if trace is not None else ""


@functools.cache
def _told_in_words() -> Callable[..., Exception]:
    from torch._dynamo.exc import BackendCompilerFailed

    class Told(BackendCompilerFailed):
        def __str__(self) -> str:
            kind = type(self.inner_exception).__name__
            return f"backend={self.backend_name!r} raised:\n{kind}: {self.inner_exception}"

    Told.__name__ = Told.__qualname__ = BackendCompilerFailed.__name__
    Told.__module__ = BackendCompilerFailed.__module__
    return Told


def raised_by_backend(error: Exception) -> Exception:
    """The exception of a backend inside Dynamo's error; any other error as it is (2.13)."""
    from torch._dynamo.exc import BackendCompilerFailed

    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error
