"""The eager executor: what it frees, its arguments and its errors."""

import gc
import linecache
import math
import operator
import traceback
import weakref

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves, tree_structure

from shardc.backend.executor import BoxedCall, eager_executor


def test_eager_executor_frees_what_it_no_longer_needs():
    freed = []

    class Watched(torch.Tensor):
        def __del__(self):
            freed.append(self.label)

    def step(label):
        def run(x):
            out = (x.as_subclass(torch.Tensor) + 1).as_subclass(Watched)
            out.label = label
            seen[label] = list(freed)
            return out

        return run

    seen, graph = {}, Graph()
    value = graph.placeholder("x")
    for label in "abc":
        value = graph.call_function(step(label), (value,))
    graph.call_function(step("unused"), (value,))
    graph.output((value,))
    run = eager_executor(GraphModule(torch.nn.Module(), graph))
    inputs = [torch.zeros(2)]
    (result,) = run(inputs)
    assert inputs == [] and torch.equal(result.as_subclass(torch.Tensor), torch.full((2,), 3.0))
    assert seen == {"a": [], "b": [], "c": ["a"], "unused": ["a", "b"]}
    assert freed == ["a", "b", "unused"]


def test_eager_executor_runs_nested_arguments_whatever_the_names_are():
    graph = Graph()
    names = ("inputs", "run", "boxed", "op_add_Tensor", "unread")
    inputs, run, boxed, op, _ = map(graph.placeholder, names)
    total = graph.call_function(torch.ops.aten.add.Tensor, (inputs, run), {"alpha": 2})
    joined = graph.call_function(torch.ops.aten.cat.default, ([total, boxed, op],))
    part = graph.call_function(operator.getitem, (joined, (slice(None, 3), slice(0, None, 2))))
    large = graph.call_function(torch.ops.aten.mul.Scalar, (part, math.inf))
    moved = graph.call_function(torch.ops.aten.to.dtype, (large, torch.float64))
    held = graph.call_function(torch.ops.aten.add.Tensor, (moved, graph.get_attr("held")))
    given = {"a": [held, None, True]}
    picked = graph.call_function(lambda given, more: given["a"][0] + more, (given, -1.5))
    graph.output(((picked, total), [None, joined], 3))
    module = torch.nn.Module()
    module.held = torch.ones(2)
    values = [torch.full((2, 4), float(number)) for number in range(4)]
    want = GraphModule(module, graph)(*values, None)
    got = eager_executor(GraphModule(module, graph))([*values, None])
    torch.testing.assert_close(tree_leaves(got), tree_leaves(want), rtol=0, atol=0)
    assert tree_structure(got) == tree_structure(want)


def test_eager_executor_leaves_a_compiled_graph_to_free_its_inputs():
    freed = []

    def call(inputs):
        inputs.clear()
        freed.append([ref() is None for ref in made])
        return [torch.zeros(2)]

    def make(x):
        out = x + 1
        made.append(weakref.ref(out))
        return out

    made, graph = [], Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(make, (x,)) for _ in range(2))
    for _ in range(2):  # nothing reads the result of the last
        result = graph.call_function(BoxedCall(call, {}, ()), ([first, second],))
        first = second
    graph.output((graph.call_function(operator.getitem, (result.prev, 0)),))
    inputs = [torch.zeros(2)]
    eager_executor(GraphModule(torch.nn.Module(), graph))(inputs)
    assert freed == [[True, False], [True, True]] and inputs == []


def test_errors_in_the_eager_executor_show_the_op():
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (x, x)),))
    gm = GraphModule(torch.nn.Module(), graph)
    before = set(linecache.cache)
    run = eager_executor(gm)
    source = linecache.cache.keys() - before
    with pytest.raises(RuntimeError) as error:
        run([torch.zeros(2, 3)])
    assert "mm_default = op_mm_default(x, x)" in "".join(traceback.format_exception(error.value))
    del run, error
    gc.collect()
    assert len(source) == 1 and not source & linecache.cache.keys(), "it goes with the function"
