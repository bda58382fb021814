"""`compile_step`: a training step as one graph.

The first call of a step runs as usual: models are compiled, optimizers make their state. The second
call is recorded (`recorder.py`). From the third call on the graph runs, and the Python of
the step does not run. A step that no graph can have runs as usual; a warning names the reason.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeGuard, TypeVar, overload

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from shardc.backend.executor import BoxedCall
from shardc.backend.lowering import run_eagerly
from shardc.backend.recorded import recorders
from shardc.passes import pipeline
from shardc.passes.context import PassContext
from shardc.passes.nodes import groups_in, groups_named_in, is_view
from shardc.passes.runner import run_passes
from shardc.runtime import compat
from shardc.runtime.checks.telling import warn_once
from shardc.runtime.checks.words import plural
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.watch.entering import BoxedGraph
from shardc.step.accumulation import Accumulation, Watched
from shardc.step.ahead import Ahead
from shardc.step.captured import LEAVES_GRADIENTS, Held, buckets_of, find_holders, kind_of
from shardc.step.constants import CONSTANTS, PYTHONS, Known, Same
from shardc.step.cuda_graph import Replayed, check_capturable
from shardc.step.facts import Facts, params_of
from shardc.step.plans import Plans
from shardc.step.recorder import GIVEN, HELD, NUMBER, Recorder
from shardc.step.refusals import NotRecorded
from shardc.step.rerun import Numbers, OtherOps
from shardc.step.unseen import check_effects, effects_of, own_rates, seeing_reads
from shardc.step.updates import changed_settings

_P = ParamSpec("_P")
_R = TypeVar("_R")


@overload
def compile_step(
    step: Callable[_P, _R],
    *,
    mode: str | None = None,
    accumulate: Mapping[str, Any] | None = None,
    gather_ahead: bool = False,
) -> "CompiledStep[_P, _R]": ...
@overload
def compile_step(
    *,
    mode: str | None = None,
    accumulate: Mapping[str, Any] | None = None,
    gather_ahead: bool = False,
) -> Callable[[Callable[_P, _R]], "CompiledStep[_P, _R]"]: ...
def compile_step(
    step: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    accumulate: Mapping[str, Any] | None = None,
    gather_ahead: bool = False,
) -> Any:
    """Compile a training step into one graph: forward, backward, clipping, update.

        @shardc.compile_step
        def step(tokens, targets):
            loss = model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

    The graph is recorded in the second call with arguments of the same shapes, and runs from the
    third one on. Python values of the step are constants of the graph, as in CUDA graphs; a change
    of one that the step reads by name has the step recorded again. A step whose Python changes
    objects (`losses.append(loss)`, `scheduler.step()`) runs as usual. The settings of optimizers
    (`lr`, `betas`) and their step counts are read anew in each call, and `optimizer.step()` runs
    again without computing, with its hooks. An optimizer that reads values on the host, or calls
    other optimizers, is one call in the graph.

    Args:
        step: a function that trains a model given to `fully_shard`, and ends with gradients of
            None (`zero_grad`). It may call several models, optimizers and backwards.
        mode: "reduce-overhead" has the graph captured as one CUDA graph, with its collectives. Give
            learning rates that change as tensors on the GPU.
        accumulate: a plan for the micro-batches of a step, a dict with one or both of:
            "gathered_bytes", the bytes of buckets that may stay gathered between them (a count, a
            text such as "2GiB", or a fraction of the device's memory); "reduce_once", True to
            reduce gradients once, in the last backward: other bits, and full gradients wait.
        gather_ahead: keep the buckets gathered that the forward gathers first. A call gathers them
            again while it updates other parameters, and the next call begins to compute at once.
            Their memory is not free between calls and in the backward. Between calls, every rank
            writes to a parameter or none does.

    Returns:
        A callable with the arguments and results of `step`. Tensors in the results are detached.

    Raises:
        TypeError: `gather_ahead` is no bool.
        ValueError: another mode, or another key or value in `accumulate`.
    """
    plans = Plans.parse(accumulate, gather_ahead)
    if mode not in (None, "reduce-overhead"):
        raise ValueError(f"mode: 'reduce-overhead' or None, got {mode!r}")
    if step is None:
        return lambda step: CompiledStep(step, mode, plans.anew())
    return CompiledStep(step, mode, plans)


@dataclass
class _Graph:
    """The graph of a step, for arguments of one kind.

    Attributes:
        module: the graph.
        run: the graph as a callable.
        sources: of each input: an argument, a tensor that somebody holds, or a number.
        holders: the holders of those tensors, in order.
        held: those tensors, as the last call had them.
        like: their kinds when they were recorded.
        numbers: the numbers of each update that is no call.
        buckets: the buckets of the models that the optimizers train.
        constants: the leaves of the step's result; `_MADE` in place of a tensor of the graph.
        structure: the structure of the result.
        facts: the facts that shaped the graph.
        replayed: the graph as a CUDA graph, if it is one.
    """

    module: GraphModule
    run: BoxedGraph
    sources: list[str]
    holders: list[Held]
    held: list[Tensor]
    like: list[tuple[object, ...]]
    numbers: list[Numbers]
    buckets: list[Bucket]
    constants: list[object]
    structure: TreeSpec
    facts: Facts
    replayed: Replayed | None = None

    def capture(self, given: list[Tensor]) -> None:
        """Run the graph as a CUDA graph from the next call on.

        Raises:
            NotRecorded: no CUDA graph can have it.
        """
        check_capturable(self.module, [*given, *self.held])
        self.replayed = Replayed(self._compute, _groups_in(self.module))

    def changed(self) -> list[str]:
        """The names of facts that shaped the graph and have changed since."""
        before = self.held
        try:
            self.held = [hold() for hold in self.holders]
        except (KeyError, IndexError, AttributeError):
            return ["a parameter, buffer or state that is gone"]
        same = all(map(operator.is_, before, self.held)) and all(map(_is_like, before, self.like))
        if not same and [kind_of(each) for each in self.held] != self.like:
            return ["the shape, dtype or layout of a parameter, buffer or state"]
        return self.facts.changed()

    def __call__(self, given: list[Tensor]) -> Any:
        """Run the graph, and give the step's result.

        Raises:
            OtherOps: an optimizer runs other ops than when it was recorded; nothing has changed.
        """
        try:
            numbers = [number for each in self.numbers for number in each()]
            # With gradients on, a forward keeps more for the backward (LSTMs on CPUs).
            with torch.enable_grad(), compat.below_autograd():
                results = iter(self._results(given, numbers))
        except BaseException:  # the update has not run: OOM in the forward, an interrupt
            for each in reversed(self.numbers):
                each.take_back()
            raise
        for bucket in self.buckets:
            torch.autograd.graph.increment_version(bucket.segment)
        leaves = [next(results) if leaf is _MADE else _detached(leaf) for leaf in self.constants]
        return tree_unflatten(leaves, self.structure)

    def _results(self, given: list[Tensor], numbers: list[object]) -> Iterable[Any]:
        if self.replayed is not None:
            try:
                return self.replayed(given, self.held, numbers)
            except NotRecorded as error:
                self.replayed = None
                warn_once(f"capture: {error}", f"A step runs without a CUDA graph: {error}")
        return self._compute(given, self.held, numbers)

    def _compute(
        self, given: list[Tensor], held: list[Tensor], numbers: list[object]
    ) -> Iterable[Any]:
        values = {GIVEN: iter(given), HELD: iter(held), NUMBER: iter(numbers)}
        return self.run([next(values[source]) for source in self.sources])  # type: ignore[return-value]


def _is_like(value: Tensor, like: tuple[object, ...]) -> bool:
    """Whether a tensor that is the object of the last call is as it was then."""
    return (value.shape, value.dtype, value.requires_grad) == (like[0], like[1], like[-1])


@dataclass
class _Kind:
    """The calls with arguments of one kind.

    Attributes:
        calls: their number so far, since a fact that shapes the graph changed.
        changes: the number of such changes.
        graph: the graph for them, once it is recorded.
        reason: why they have no graph; empty if they have one, or may get one.
    """

    calls: int = 0
    changes: int = 0
    graph: _Graph | None = None
    reason: str = ""


MOST_KINDS, MOST_CHANGES = 16, 8
"""The most kinds of arguments that get graphs, and the most times that one kind is recorded."""


class CompiledStep(Generic[_P, _R]):
    """A training step that runs as one graph.

    Attributes:
        step: the function.
        mode: "reduce-overhead" for CUDA graphs, or None.
    """

    def __init__(self, step: Callable[_P, _R], mode: str | None, plans: Plans) -> None:
        functools.update_wrapper(self, step)
        self.step, self.mode, self._plans = step, mode, plans
        self._kinds: dict[object, _Kind] = {}
        self._others = _Kind()
        self._as_method = ""
        self._name = getattr(step, "__qualname__", type(step).__qualname__)

    @property
    def graphs(self) -> list[GraphModule]:
        """The graphs, in the order in which they were recorded."""
        return [kind.graph.module for kind in self._kinds.values() if kind.graph is not None]

    @property
    def accumulation(self) -> Accumulation | None:
        """The plan for its micro-batches; None until its first call has ended, and without one."""
        return self._plans.accumulation

    @property
    def ahead(self) -> Ahead | None:
        """The buckets that stay gathered; None until its first call has ended, and without any."""
        return self._plans.ahead

    @property
    def captures(self) -> int:
        """The number of times that the graphs were captured as CUDA graphs."""
        graphs = [kind.graph for kind in self._kinds.values() if kind.graph is not None]
        return sum(graph.replayed.captures for graph in graphs if graph.replayed is not None)

    @property
    def reasons(self) -> list[str]:
        """Why calls run without a graph, one text for each kind of arguments that has none.

        Also why the step does without `accumulate` or `gather_ahead`, though they were given, or
        keeps less gathered than it would without a memory budget.
        """
        kinds = [*self._kinds.values(), self._others]
        return [*(kind.reason for kind in kinds if kind.reason), *self._plans.reasons]

    def __set_name__(self, owner: type, name: str) -> None:
        self._as_method = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """The step of one object, where the step is a method: each object has graphs of its own."""
        if owner is None:
            return self
        name = f"_shardc_{self._as_method or self.step.__name__}"
        bound = vars(owner).get(name)
        if bound is None or bound.step.__self__ is not owner:  # a shallow copy has the original's
            bound = CompiledStep(MethodType(self.step, owner), self.mode, self._plans.anew())
            vars(owner)[name] = bound
        return bound

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no graphs and no plan: they have the tensors and units of the original."""
        none = {"_kinds": {}, "_others": _Kind(), "_plans": self._plans.anew()}
        return {**vars(self), **none}

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if recorders:  # a part of a step that is recorded
            return self.step(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        kind = self._kind(_kind_of(leaves, structure))
        kind.calls += 1
        if self._plans.is_due:
            return self._watch(kind, args, kwargs)
        self._plans.gather()
        if kind.graph is not None:
            changed = kind.graph.changed()
            if not changed:
                try:
                    return self._run(kind.graph, leaves)
                except OtherOps as error:
                    changed = [str(error)]
            self._forget(kind, changed)
        if kind.calls == 2 and not kind.reason:
            try:
                return self._record(kind, leaves, args, kwargs)
            except BaseException:
                kind.calls = 1  # a later call is recorded
                raise
        with compat.static_shapes(), self._plans.arranged():
            result = _detached(self.step(*args, **kwargs))
        self._plans.gather()
        return result

    def _watch(self, kind: _Kind, args: Any, kwargs: Any) -> _R:
        """Run the first call of a step as usual, and plan the others."""
        with compat.static_shapes(), Watched() as watched:
            result = _detached(self.step(*args, **kwargs))
        if self._plans.make(watched, self._name):
            kind.calls = 0  # the next call compiles other graphs
        return result

    def _run(self, graph: _Graph, leaves: list[Any]) -> Any:
        ahead = self._plans.ahead
        try:
            result = graph([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        except OtherOps:
            raise  # nothing has changed
        except BaseException:
            if ahead is not None:
                ahead.note_lost()
            raise
        if ahead is not None:
            ahead.note_gathered()
        return result

    def _kind(self, key: object) -> _Kind:
        if key not in self._kinds and len(self._kinds) == MOST_KINDS:
            self._refuse(
                self._others,
                f"its arguments were of more than {plural(MOST_KINDS, 'kind')} (shapes, and values "
                "that are no tensors): give values that change as tensors, in tuples, lists and "
                "dicts, and pad the tensors",
            )
        full = len(self._kinds) >= MOST_KINDS
        return self._kinds.get(key, self._others) if full else self._kinds.setdefault(key, _Kind())

    def _forget(self, kind: _Kind, changed: list[str]) -> None:
        """Drop a graph because facts that shaped it have changed."""
        kind.graph, kind.calls = None, 1
        kind.changes += 1
        if kind.changes == MOST_CHANGES:
            times, names = plural(MOST_CHANGES, "time"), ", ".join(changed)
            self._refuse(kind, f"what shapes its graph changed {times}: {names}")

    def _refuse(self, kind: _Kind, reason: str) -> None:
        """Run calls of a kind as usual from now on, and tell why."""
        kind.reason = reason
        warn_once(
            f"step: {reason}", f"{self._name} runs without a graph of the whole step: {reason}"
        )

    def _record(self, kind: _Kind, leaves: list[Any], args: Any, kwargs: Any) -> _R:
        recorder, known = Recorder(), Known(self.step, args, kwargs)
        before = effects_of(known)
        recorder.settings = own_rates(known)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in given:
            recorder.add_input(GIVEN, tensor)
        if any(tensor.requires_grad for tensor in given):
            recorder.reason = "an argument requires a gradient, which the graph would not leave"
        with (
            compat.static_shapes(),
            self._plans.arranged(),
            recorder,
            recorder.seeing_updates(),
            seeing_reads(recorder),
        ):
            recorders.append(recorder.call)
            try:
                result = self.step(*args, **kwargs)
                self._plans.gather()
            finally:
                recorders.pop()
        try:
            check_effects(before, known)
            kind.graph = _finish(known, recorder, result)
            if self.mode is not None:
                kind.graph.capture(given)
        except NotRecorded as error:
            if kind.graph is None:
                self._refuse(kind, str(error))
            else:
                warn_once(f"capture: {error}", f"{self._name} runs without a CUDA graph: {error}")
        return _detached(result)


_MADE = object()


def _finish(known: Known, recorder: Recorder, result: object) -> _Graph:
    """The graph of a recorded step.

    Raises:
        NotRecorded: the step has a part that no graph can have.
    """
    if recorder.reason:
        raise NotRecorded(recorder.reason)
    if not recorder.updates:
        raise NotRecorded("it calls no optimizer")
    optimizers = list(dict.fromkeys(update.optimizer for update in recorder.updates))
    buckets = list(buckets_of(optimizers))
    for bucket in buckets:
        if bucket.device.type not in ("cpu", "cuda"):
            raise NotRecorded(
                f"it trains on {bucket.device.type}: graphs of steps are for CPUs and CUDA"
            )
        if bucket.device != bucket.segment.device:
            raise NotRecorded("its parameters lie on the host (CPUOffloadPolicy)")
    for param in params_of(buckets, recorder.updates):
        if param.grad is not None:
            raise NotRecorded(LEAVES_GRADIENTS)
    for optimizer, before in recorder.settings.items():
        if optimizer in optimizers and (names := changed_settings(before, optimizer)):
            raise NotRecorded(
                f"it changes {names} of an optimizer, and its Python would not run again: call "
                "schedulers outside of it"
            )
    numbers = [
        Numbers(update, recorder.groups_of(update.optimizer))
        for update in recorder.updates
        if not update.is_call
    ]
    holders = find_holders(known, recorder)
    held = [hold() for hold in holders]
    leaves, structure = tree_flatten(result)
    _check_results(leaves, known)
    is_made = [_is_plain(leaf) and recorder.knows(leaf) for leaf in leaves]
    made = [recorder.node_of(leaf) for leaf, made in zip(leaves, is_made, strict=True) if made]
    recorder.graph.output(tuple(made))
    for node in reversed(recorder.graph.nodes):
        if not node.users and is_view(node):
            recorder.graph.erase_node(node)
    module = GraphModule(torch.nn.Module(), recorder.graph)
    module = run_passes(module, PassContext("step"), pipeline.STEP_PASSES)
    sources = [recorder.sources[node] for node in module.graph.find_nodes(op="placeholder")]
    return _Graph(
        module,
        run_eagerly(module, _groups_called(module)),
        sources,
        holders,
        held,
        [kind_of(each) for each in held],
        numbers,
        buckets,
        [_MADE if made else leaf for leaf, made in zip(leaves, is_made, strict=True)],
        structure,
        Facts(known, buckets, recorder.updates),
    )


def _check_results(leaves: list[object], known: Known) -> None:
    """Refuse results that would stay as they are: the graph gives tensors alone."""
    kinds, objects = (Tensor, *PYTHONS, *CONSTANTS), list(known.objects())
    for leaf in leaves:
        is_computed = isinstance(leaf, ShardTensor) and not hasattr(leaf, "_slot")
        is_known = isinstance(leaf, kinds) or any(leaf is each for each in objects)
        if is_computed or not is_known:
            raise NotRecorded(
                f"its result holds an object of type {type(leaf).__name__}, which would stay as it "
                "is: return plain tensors, in tuples, lists and dicts"
            )


def _is_plain(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not isinstance(value, ShardTensor)


def _groups_in(module: GraphModule) -> list[str]:
    """The groups of the collectives of a step."""
    named = groups_named_in(module)
    return list(dict.fromkeys([*groups_in(module), *named, *_groups_called(module)]))


def _groups_called(module: GraphModule) -> list[str]:
    """The groups of the collectives of compiled code that a step calls."""
    targets = [node.target for node in module.graph.nodes]
    return [group for each in targets if isinstance(each, BoxedCall) for group in each.groups]


def _kind_of(leaves: list[Any], structure: TreeSpec) -> object:
    """The kind of arguments for which a graph serves."""
    kinds = [kind_of(leaf) if isinstance(leaf, Tensor) else _value_of(leaf) for leaf in leaves]
    return structure, tuple(kinds), _equal_tensors(leaves), torch.is_grad_enabled()


def _value_of(leaf: object) -> object:
    """An argument that is no tensor, by its value; an object that has none is itself alone."""
    by_value = type(leaf).__hash__ not in (None, object.__hash__)
    return type(leaf), leaf if by_value else Same(leaf)


def _equal_tensors(leaves: list[Any]) -> object:
    """The places of arguments over the same memory: the graph reads the first of them for all."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    places = [(compat.storage_id(each), each.storage_offset()) for each in tensors]
    return None if len(set(places)) == len(places) else tuple(map(places.index, places))


def _detached(result: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
