"""The recorder of a training step: it runs the step as usual, and writes the ops into one graph.

The recorder sees each op on plain tensors, below autograd and below ShardTensors. A compiled graph
runs as usual, and the recorder writes the nodes of the graph in place of the call (`recorded`). So
the graph of the step has forward, backward and update, in the order in which they ran.

A value is known by its memory: two tensors over the same elements of one storage are one value. A
tensor that no op of the step made is an input of the graph.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardc.backend.executor import BoxedCall
from shardc.passes.nodes import MEMORY, is_collective, is_wait
from shardc.runtime import compat
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.watch.entering import BoxedGraph, InGroup
from shardc.runtime.watch.progress import label_of, progress, set_label

aten = torch.ops.aten
READS_A_VALUE = (
    "it reads a value on the host, as `.item()` and `if tensor:` do. Return the value, and "
    "read it outside of the step; give an optimizer that reads values fused=True"
)
GIVEN, HELD, NUMBER = "given", "held", "number"
"""The sources of inputs: an argument of the step, a tensor that somebody holds, a number of an
update."""


class NotRecorded(Exception):
    """A step has a part that no graph can have; the text names the part and the way out."""


@dataclass(frozen=True)
class Given:
    """An argument of an op, by its place among the leaves of all arguments."""

    place: int


@dataclass(frozen=True)
class Op:
    """One op of an update.

    Attributes:
        func: the op.
        node: its node; None for an op that the host runs before each call of the graph.
        constants: its arguments that are neither tensors nor numbers, in order.
        numbers: its arguments that are inputs of the graph, read anew in each call, by their places
            among the leaves of all arguments.
        results: its results without memory; `Given` in place of a result that is an argument.
    """

    func: compat.Op
    node: Node | None
    constants: tuple[object, ...] = ()
    numbers: tuple[int, ...] = ()
    results: object = None


@dataclass
class Update:
    """One call of `optimizer.step()`.

    Attributes:
        optimizer: the optimizer.
        grads: its parameters that had a gradient, each with the gradient, without memory.
        scaling: the attributes that a `GradScaler` sets on a fused optimizer, without memory.
        ops: its ops, in order.
        is_call: whether the graph calls `optimizer.step()`, and has none of the ops.
        settings: its settings when the step called it.
    """

    optimizer: Optimizer
    grads: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    scaling: dict[str, object] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    is_call: bool = False
    settings: list[dict[str, object]] = field(default_factory=list)

    def check_settings(self) -> None:
        """Refuse a step that changes settings after the update, as a scheduler does.

        Raises:
            NotRecorded: it does.
        """
        now = _group_settings(self.optimizer)
        for before, after in zip(self.settings, now, strict=False):
            names = [name for name, value in after.items() if before.get(name) != value]
            if names:
                raise NotRecorded(
                    f"it changes {', '.join(names)} of an optimizer, and its Python would not run "
                    "again: call schedulers outside of it"
                )

    def has_count(self, value: Tensor) -> bool:
        """Whether a tensor is a step count: a number on the host, in the optimizer's state."""
        storage = value.untyped_storage()._cdata
        return any(
            isinstance(own, Tensor) and compat.storage_id(own) == storage
            for state in self.optimizer.state.values()
            for own in state.values()
        )


def _group_settings(optimizer: Optimizer) -> list[dict[str, object]]:
    """The settings of each parameter group that are no tensors."""
    return [
        {
            name: tuple(value) if isinstance(value, (list, tuple)) else value
            for name, value in group.items()
            if name != "params" and not any(isinstance(x, Tensor) for x in tree_leaves(value))
        }
        for group in optimizer.param_groups
    ]


@dataclass(frozen=True, eq=False)
class Rate:
    """A number among the settings of a parameter group, and the object that it is."""

    group: dict[str, Any]
    name: str
    value: float


@dataclass(frozen=True, eq=False)
class UpdateCall:
    """The target of a node that calls `optimizer.step()` with gradients and scales of the graph."""

    update: Update
    __name__ = "optimizer_step"

    def __call__(self, grads: list[Tensor], scaling: dict[str, Tensor]) -> None:
        update = self.update
        shards = (_over(like, grad) for (_, like), grad in zip(update.grads, grads, strict=True))
        params = [param for param, _ in update.grads]
        grads_of = dict(zip(params, shards, strict=True))
        with compat.entering_autograd(), stepping(update.optimizer, grads_of, scaling):
            update.optimizer.step()


@contextmanager
def stepping(
    optimizer: Optimizer, grads: dict[Tensor, Tensor], scaling: dict[str, Any]
) -> Iterator[None]:
    """Inside, parameters have gradients, and the optimizer has the scale of the scaler."""
    for param, grad in grads.items():
        param.grad = grad
    vars(optimizer).update(scaling)
    try:
        yield
    finally:
        for param in grads:
            param.grad = None
        for name in scaling:
            delattr(optimizer, name)


class Recorder(compat.OpMode):
    """A context around one training step, which it writes into `graph`.

    Attributes:
        graph: the nodes so far; without an output.
        captured: the inputs that are no arguments of the step, each with its tensor.
        sources: the source of each input.
        updates: the calls of optimizers.
        reason: why the step cannot be a graph; empty where it can. The step runs to its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self.graph = Graph()
        self.sources: dict[Node, str] = {}
        self.captured: dict[Node, Tensor] = {}
        self.updates: list[Update] = []
        self.rates: list[Rate] = []
        self._nodes: dict[tuple[object, ...], Node] = {}
        self._bases: dict[int, tuple[StorageWeakRef, Node, int]] = {}
        self._last_input: Node | None = None
        self._update: Update | None = None
        self._counts: dict[int, StorageWeakRef] = {}
        self._paused = False
        self._inner = 0
        self._random = _RandomNumbers()
        self._before_update: Callable[[], None] = lambda: None
        self._call: tuple[Any, ...] = ()

    # -- values --------------------------------------------------------------------------------

    def add_input(self, source: str, value: object) -> Node:
        """Add an input behind the others."""
        name = f"{source}_{len(self.sources)}"
        if self._last_input is None:
            node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self._last_input):
                node = self.graph.placeholder(name)
        self._last_input, self.sources[node] = node, source
        if isinstance(value, Tensor):
            self._know(value, node)
        return node

    def _know(self, value: Tensor, node: Node) -> None:
        storage = value.untyped_storage()
        base = StorageWeakRef(storage), node, int(value.storage_offset())
        self._bases.setdefault(storage._cdata, base)
        self._nodes.setdefault(_place(value), node)
        node.meta.setdefault("val", without_memory(value))
        node.meta.setdefault(MEMORY, self._bases[storage._cdata][1])

    def knows(self, value: Tensor) -> bool:
        """Whether the step was given a tensor, or made it."""
        return value.untyped_storage()._cdata in self._bases

    def made(self, value: Tensor) -> bool:
        """Whether an op of the step made the memory of a tensor."""
        base = self._bases.get(value.untyped_storage()._cdata)
        return base is not None and base[1] not in self.sources

    def node_of(self, value: Tensor) -> Node:
        """The node of a tensor; a tensor that no op of the step made becomes an input."""
        node = self._nodes.get(_place(value))
        if node is not None:
            return node
        if self.knows(value):
            _, base, offset = self._bases[value.untyped_storage()._cdata]
            if base.meta["val"].dtype != value.dtype:
                raise NotRecorded(f"it reads memory of {base.meta['val'].dtype} as {value.dtype}")
            where = list(value.shape), list(value.stride()), value.storage_offset() - offset
            node = self.graph.call_function(part_of, (base, *where))
            self._know(value, node)
        else:
            node = self.add_input(HELD, value)
            self.captured[node] = value
        return node

    def read_as(self, captured: Node, value: Tensor, whole: Tensor) -> None:
        """Make a captured input the tensor `whole`, of which `value` is a part."""
        if _place(value) != _place(whole):
            offset = value.storage_offset() - whole.storage_offset()
            where = list(value.shape), list(value.stride()), offset
            with self.graph.inserting_after(self._last_input):
                part = self.graph.call_function(part_of, (captured, *where))
            part.meta["val"] = captured.meta["val"]
            captured.replace_all_uses_with(part, lambda user: user is not part)
            captured.meta["val"] = without_memory(whole)

    # -- ops -----------------------------------------------------------------------------------

    def run(self, func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
        """Run an op, and write it."""
        if self._paused or self.reason:
            return func(*args, **kwargs)
        if self._is_for_host(func, args, kwargs):
            return self._run_on_host(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        leaves, structure = tree_flatten((args, kwargs))
        numbers = [place for place, leaf in enumerate(leaves) if self._is_number(leaf)]
        if func is aten._local_scalar_dense.default:
            self.note_read()
            return func(*args, **kwargs)
        try:
            _check(func, args, leaves)
            if is_random:
                self._random.check()
            written = [
                self.add_input(NUMBER, leaf) if place in numbers else self._argument(leaf)
                for place, leaf in enumerate(leaves)
            ]
        except NotRecorded as error:
            self.reason = str(error)
            return func(*args, **kwargs)
        results = func(*args, **kwargs)
        if isinstance(results, bool) and any(isinstance(leaf, Tensor) for leaf in leaves):
            self.note_read()
            return results
        if is_random:
            self._random.note()
        node = self.graph.call_function(func, *tree_unflatten(written, structure))
        self._know_results(node, results)
        if is_collective(node) or is_wait(node):
            _label(node)
        if self._update is not None:
            constants = tuple(leaf for leaf in leaves if not isinstance(leaf, (Tensor, float)))
            shown = tree_map(lambda result: _shown(result, leaves), results)
            self._update.ops.append(Op(func, node, constants, tuple(numbers), shown))
        return results

    def note_read(self) -> None:
        """Note that the host reads a value: an update becomes a call, another step is refused."""
        if self._update is not None:
            self._take_call()
        elif not (self._paused or self.reason):
            self.reason = READS_A_VALUE

    def _argument(self, value: object) -> object:
        return self.node_of(value) if isinstance(value, Tensor) else value

    def _is_number(self, value: object) -> bool:
        """Whether the host computes an argument of an update anew in each call."""
        if self._update is None:
            return False
        if isinstance(value, Tensor):
            return value.untyped_storage()._cdata in self._counts
        return type(value) is float

    def _know_results(self, node: Node, results: object) -> None:
        if isinstance(results, Tensor):
            self._know(results, node)
        elif isinstance(results, (list, tuple)):
            node.meta["val"] = tree_map(_without_memory_if_tensor, results)
            for index, result in enumerate(results):
                if isinstance(result, Tensor) and _place(result) not in self._nodes:
                    self._know(result, self.graph.call_function(operator.getitem, (node, index)))

    # -- updates -------------------------------------------------------------------------------

    @contextmanager
    def seeing_updates(self) -> Iterator[None]:
        """Inside, calls of optimizers are noted."""
        hooks = (
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin(optimizer)),
            register_optimizer_step_post_hook(lambda *_: self._end()),
        )
        try:
            yield
        finally:
            self._update, self._inner, self._paused = None, 0, False
            for hook in hooks:
                hook.remove()

    def _begin(self, optimizer: Optimizer) -> None:
        if self._update is not None:  # an optimizer that calls others
            self._inner += 1
            self._take_call()
            return
        self._check_rates(optimizer)
        self._update = update = Update(optimizer, settings=_group_settings(optimizer))
        self.updates.append(update)
        with self._quietly():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        update.grads.append((param, _shard_without_memory(param.grad)))
            given = {name: value for name, value in vars(optimizer).items() if name in _SCALING}
            update.scaling = tree_map(_without_memory_if_tensor, given)
            try:
                grads = [self._argument(_memory(param.grad)) for param, _ in update.grads]
                self._call = grads, tree_map(self._argument, given)
            except NotRecorded as error:
                self.reason = str(error)
        self._before_update = self._going_back()
        if getattr(optimizer, "calls_optimizers", False):
            self._take_call()

    def _check_rates(self, optimizer: Optimizer) -> None:
        """Refuse a step that sets a number of an optimizer before the update."""
        groups = list(map(id, optimizer.param_groups))
        own = [rate for rate in self.rates if id(rate.group) in groups]
        names = {rate.name for rate in own if rate.group.get(rate.name) is not rate.value}
        if names and not self.reason and optimizer not in {u.optimizer for u in self.updates}:
            self.reason = (
                f"it sets {', '.join(sorted(names))} of an optimizer, and its Python would not run "
                "again: do so outside of it"
            )

    def _end(self) -> None:
        if self._inner:
            self._inner -= 1
            return
        update, self._update, self._paused = self._update, None, False
        self._random.note()
        if update is not None and update.is_call and not self.reason:
            self.graph.call_function(UpdateCall(update), self._call)

    def groups_of(self, optimizer: Optimizer) -> dict[Node, int]:
        """The number of the parameter group for the node of each parameter that the step read."""
        params = [
            (_place(_memory(param)), number)
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        ]
        return {self._nodes[place]: n for place, n in params if place in self._nodes}

    def _take_call(self) -> None:
        """Take back the ops of the update so far: the graph calls `optimizer.step()`."""
        assert self._update is not None
        if not self._update.is_call:
            self._before_update()
            self._update.is_call, self._update.ops, self._paused = True, [], True

    def _going_back(self) -> Callable[[], None]:
        """A function that takes back all that is written from now on."""
        names = ("sources", "captured", "_nodes", "_bases")
        then: dict[str, Any] = {name: copy.copy(vars(self)[name]) for name in names}
        last, written = self._last_input, set(self.graph.nodes)

        def back() -> None:
            for node in reversed(self.graph.nodes):
                if node not in written:
                    self.graph.erase_node(node)
            vars(self).update(then, _last_input=last)

        return back

    def _is_for_host(self, func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> bool:
        """Whether an op has step counts of the optimizer only: the host runs it before the graph.

        torch's optimizers read the counts as numbers there, unless they are fused or capturable.
        """
        if self._update is None or _counts_on_device(self._update.optimizer):
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors or any(each.dim() or each.device.type != "cpu" for each in tensors):
            return False
        if func is aten.lift_fresh.default:
            return True
        return not any(map(self.knows, tensors)) and any(map(self._is_count, tensors))

    def _is_count(self, value: Tensor) -> bool:
        assert self._update is not None
        return value.untyped_storage()._cdata in self._counts or self._update.has_count(value)

    def _run_on_host(self, func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> object:
        assert self._update is not None
        results = func(*args, **kwargs)
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                self._counts[storage._cdata] = StorageWeakRef(storage)
        self._update.ops.append(Op(func, None))
        return results

    # -- compiled graphs -----------------------------------------------------------------------

    def call(
        self, gm: GraphModule | None, run: BoxedGraph, groups: Sequence[str], inputs: list[Any]
    ) -> Any:
        """Run a compiled graph, and write its nodes; for None, write one call of `run`."""
        names = dict(progress.next_names)
        if self._paused or self.reason:
            return run(inputs)
        with self._quietly():
            try:
                self._random.check()
                given = [self.node_of(x) if isinstance(x, Tensor) else x for x in inputs]
            except NotRecorded as error:
                self.reason = str(error)
                return run(inputs)
            results: Any = run(inputs)
            self._random.note()
            if gm is not None:
                self._write(gm, given, results, names)
            else:
                self._write_call(BoxedCall(run, names, tuple(groups)), given, results)
        return results

    def _write_call(self, call: BoxedCall, given: list[Any], results: Sequence[Any]) -> None:
        node = self.graph.call_function(call, (given,))
        for index, result in enumerate(results):
            if isinstance(result, Tensor):
                self._know(result, self.graph.call_function(operator.getitem, (node, index)))

    def _write(
        self, gm: GraphModule, given: Sequence[Any], results: Sequence[Any], names: dict[str, str]
    ) -> None:
        inputs = gm.graph.find_nodes(op="placeholder")
        values: dict[Node, Any] = dict(zip(inputs, given, strict=True))
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                values[node] = self.node_of(getattr(gm, str(node.target)))
            elif node.op == "call_function":
                values[node] = copied = self.graph.node_copy(node, values.__getitem__)
                if (label := label_of(node)) is not None:
                    set_label(copied, label.renamed(names))
        outputs: Any = gm.graph.output_node().args[0]
        for output, result in zip(outputs, results, strict=True):
            if isinstance(result, Tensor):
                self._know(result, values[output])

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Inside, ops run and are not written."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


_SCALING = ("grad_scale", "found_inf")

recorders: list[Recorder] = []
"""The recorder of the step that is recorded now; none at other times."""


def recorded(gm: GraphModule | None, run: BoxedGraph, groups: Sequence[str] = ()) -> BoxedGraph:
    """Wrap a compiled graph: a recorded step has its nodes, or for None one call of it, with
    collectives over `groups`."""

    def call(inputs: list[object]) -> object:
        return recorders[-1].call(gm, run, groups, inputs) if recorders else run(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class _RandomNumbers:
    """The states of the default generators, as the last random op of the step left them."""

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            self._generators += torch.cuda.default_generators
        self.note()

    def note(self) -> None:
        """Note the states after an op."""
        self._states = [generator.get_state() for generator in self._generators]

    def check(self) -> None:
        """Refuse a state that no op left: the graph would draw other numbers.

        Raises:
            NotRecorded: somebody has set the state.
        """
        now = (generator.get_state() for generator in self._generators)
        if not all(map(torch.equal, now, self._states)):
            raise NotRecorded(
                "it sets the state of random numbers, as manual_seed does, and a checkpoint around "
                "dropout in an uncompiled model: compile the model, and set seeds outside"
            )


def _check(func: compat.Op, args: compat.Args, leaves: Sequence[object]) -> None:
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        raise NotRecorded(
            f"{func} draws from a torch.Generator, whose state no graph has: draw outside of the "
            "step, and give the tensor as an argument"
        )
    others = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)]
    if others:
        raise NotRecorded(
            f"it calls {func} with an object of torch.distributed: communicate outside of the "
            "step, or by torch.distributed._functional_collectives"
        )
    if torch.Tag.dynamic_output_shape in func.tags:
        by_number = func is aten.index.Tensor and not any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        if not by_number:
            raise NotRecorded(
                f"the shape of a result of {func} depends on values: keep the shape, as "
                "torch.where does"
            )


def part_of(value: Tensor, shape: list[int], stride: list[int], offset: int) -> Tensor:
    """A view of the memory of `value`, from `offset` elements behind its first on."""
    return value.as_strided(shape, stride, value.storage_offset() + offset)


part_of.is_view = True  # type: ignore[attr-defined]


def without_memory(value: Tensor) -> Tensor:
    """A tensor of the same shape, dtype and device, over the memory of one element."""
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)


def _without_memory_if_tensor(value: object) -> object:
    return without_memory(value) if isinstance(value, Tensor) else value


def _shard_without_memory(grad: Tensor) -> Tensor:
    return _over(grad, without_memory(_memory(grad)))


def _memory(value: Any) -> Any:
    """The plain tensor under a gradient."""
    return value._local if isinstance(value, ShardTensor) else value


def _over(like: Tensor, value: Tensor) -> Tensor:
    """A gradient over other memory."""
    if isinstance(like, ShardTensor):
        return ShardTensor(value, tuple(like.shape), like._shard_spec)
    return value


def _counts_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer reads its step counts in kernels, and not on the host."""
    return all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _place(value: Tensor) -> tuple[object, ...]:
    """The elements of memory that a tensor has."""
    where = value.untyped_storage()._cdata, value.storage_offset()
    return (*where, value.dtype, value.shape, value.stride())


def _shown(result: object, leaves: Sequence[object]) -> object:
    if not isinstance(result, Tensor):
        return result
    same = (place for place, leaf in enumerate(leaves) if leaf is result)
    place = next(same, None)
    return without_memory(result) if place is None else Given(place)


def _label(node: Node) -> None:
    """Give a collective outside of compiled graphs the label under which it ran."""
    label, history = progress.inside, progress.history
    if label is not None and history is not None:
        set_label(node, InGroup(label, history.name, waits=is_wait(node)))
