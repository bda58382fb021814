"""The recorder of a training step: it runs the step as usual, and writes the ops into one graph.

The recorder sees each op on plain tensors, below autograd and below ShardTensors. A compiled graph
runs as usual, and the recorder writes the nodes of the graph in place of the call
(`backend/recorded.py`). So the graph of the step has forward, backward and update, in the order in
which they ran.

A value is known by its memory: two tensors over the same elements of one storage are one value. A
tensor that no op of the step made is an input of the graph.
"""

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from shardc.runtime.watch.entering import BoxedGraph, InGroup
from shardc.runtime.watch.progress import label_of, progress, set_label
from shardc.step.refusals import READS_A_VALUE, NotRecorded, RandomNumbers, check_op
from shardc.step.updates import (
    SCALING,
    Given,
    Op,
    Settings,
    Update,
    UpdateCall,
    changed_settings,
    counts_on_device,
    group_settings,
)
from shardc.step.values import local_of, part_of, place_of, without_memory

aten = torch.ops.aten
GIVEN, HELD, NUMBER = "given", "held", "number"
"""The sources of inputs: an argument of the step, a tensor that somebody holds, a number of an
update."""


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
        self.settings: dict[Optimizer, Settings] = {}
        self._nodes: dict[tuple[object, ...], Node] = {}
        self._bases: dict[int, tuple[StorageWeakRef, Node, int]] = {}
        self._last_input: Node | None = None
        self._update: Update | None = None
        self._counts: dict[int, StorageWeakRef] = {}
        self._paused = False
        self._inner = 0
        self._random = RandomNumbers()
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
        self._nodes.setdefault(place_of(value), node)
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
        node = self._nodes.get(place_of(value))
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
        if place_of(value) != place_of(whole):
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
            check_op(func, args, leaves)
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
            node.meta["val"] = tree_map(without_memory, results)
            for index, result in enumerate(results):
                if isinstance(result, Tensor) and place_of(result) not in self._nodes:
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
        self._update = update = Update(optimizer)
        self.updates.append(update)
        with self._quietly():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        update.grads.append((param, without_memory(param.grad)))
            given = {name: value for name, value in vars(optimizer).items() if name in SCALING}
            update.scaling = tree_map(without_memory, given)
            try:
                grads = [self._argument(local_of(param.grad)) for param, _ in update.grads]
                self._call = grads, tree_map(self._argument, given)
            except NotRecorded as error:
                self.reason = str(error)
        self._before_update = self._going_back()
        if getattr(optimizer, "calls_optimizers", False):
            self._take_call()

    def _check_rates(self, optimizer: Optimizer) -> None:
        """Refuse a step that writes a setting of an optimizer before the update."""
        before = self.settings.setdefault(optimizer, group_settings(optimizer))
        names = changed_settings(before, optimizer)
        if names and not self.reason and optimizer not in {u.optimizer for u in self.updates}:
            self.reason = (
                f"it sets {names} of an optimizer, and its Python would not run "
                "again: do so outside of it"
            )

    def _end(self) -> None:
        if self._inner:
            self._inner -= 1
            return
        update, self._update, self._paused = self._update, None, False
        self._random.note()
        if update is None:
            return
        now = group_settings(update.optimizer)
        if now == self.settings[update.optimizer]:  # the optimizer itself may write equal ones
            self.settings[update.optimizer] = now
        if update.is_call and not self.reason:
            self.graph.call_function(UpdateCall(update), self._call)

    def groups_of(self, optimizer: Optimizer) -> dict[Node, int]:
        """The number of the parameter group for the node of each parameter that the step read."""
        params = [
            (place_of(local_of(param)), number)
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
        if self._update is None or counts_on_device(self._update.optimizer):
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
