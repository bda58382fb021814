"""The end of a step's graph: updates run while the last reductions are under way.

Random programs over shared memory keep their results when the pass moves their nodes. The steps of
real models have the nodes in the planned order; `test_compile_step.py` compares their bits.
"""

import operator
import random

import pytest
import torch
import torch.distributed as dist
from models import compiled, seeded
from ranks import mesh_of, on_ranks
from test_compile_cache import folder, in_folder  # noqa: F401 (a fixture)
from torch import nn
from torch.fx import Graph, GraphModule

from shardc import compile_step, fully_shard
from shardc.backend.executor import BoxedCall, eager_executor
from shardc.passes.context import PassContext
from shardc.passes.nodes import is_collective, is_wait
from shardc.passes.runner import copy_graph
from shardc.passes.schedule.update_when_reduced import update_when_reduced
from shardc.runtime import compat
from shardc.runtime.watch.history import history_of
from shardc.runtime.watch.progress import label_of
from shardc.step.updates import UpdateCall

aten, wait = torch.ops.aten, torch.ops._c10d_functional.wait_tensor.default
gather = torch.ops._c10d_functional.all_gather_into_tensor.default


def _random_program(seed):
    """A graph over three tensors, with views, ops in place, over lists, and waits.

    A wait outside of a collective computes nothing, but the pass has to take it for a write.
    """
    draw, graph = random.Random(seed), Graph()
    inputs = [graph.placeholder(f"x{number}") for number in range(4)]
    values = list(inputs)

    def add(target, *args):
        values.append(graph.call_function(target, args))
        return values[-1]

    for _ in range(30):
        kind, one, other = draw.randrange(7), draw.choice(values), draw.choice(values)
        if kind == 0:
            add(wait, draw.choice(inputs))
        elif kind == 1:
            add(aten.mul.Tensor, one, other)
        elif kind == 2:
            add(aten.view.default, one, [4])
        elif kind == 3:
            add(aten.add_.Tensor, one, other)
        elif kind == 4:
            graph.call_function(aten._foreach_lerp_.Scalar, (inputs[:2], inputs[2:], 0.25))
        elif kind == 5:
            few = draw.sample(values, 3)
            results = graph.call_function(aten._foreach_add.List, (few, draw.sample(values, 3)))
            values += [graph.call_function(operator.getitem, (results, i)) for i in range(3)]
        else:
            add(aten.rand_like.default, one)
    for _ in range(draw.randrange(3)):  # for the next step
        values.append(graph.call_function(gather, (draw.choice(inputs), 1, "0")))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(draw.choice([1, 4, 9]))  # the pass asks for sizes
    graph.output(tuple(values))
    return GraphModule(nn.Module(), graph)


def _run(gm):
    gm = copy_graph(gm)
    for node in gm.graph.find_nodes(op="call_function", target=gather):
        node.target, node.args = aten.clone.default, node.args[:1]
    torch.manual_seed(0)
    return eager_executor(gm)([torch.arange(4.0) + number for number in range(4)])


def _order(gm):
    return [node.name for node in gm.graph.nodes]


def test_random_programs_keep_their_results():
    moved = 0
    for seed in range(120):
        program = _random_program(seed)
        expected = _run(program)
        changed = update_when_reduced(copy_graph(program), PassContext("step"))
        changed.graph.lint()
        moved += _order(changed) != _order(program)
        for value, right in zip(_run(changed), expected, strict=True):
            assert torch.equal(value, right), seed
    assert moved > 90


def _step(mesh, executor, *, clip=False, **settings):
    """The graph of a step of a model with little C++ to compile."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4))))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    call = compiled(model, executor)

    @compile_step
    def step(given):
        call(given).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step(torch.ones(2, 6))
    assert not step.reasons
    return step.graphs[0]


_LAST_OPS = ("_fused_adamw_", "_foreach_addcdiv_", "addcdiv_")
"""The ops that write to parameters, of each way to run AdamW."""


def _kinds(gm):
    """The last calls, starts, waits and updates of a graph, a letter each."""
    kinds = ""
    for node in gm.graph.nodes:
        if isinstance(node.target, (BoxedCall, UpdateCall)):
            kinds += "C"
        elif is_wait(node):
            kinds += "w"
        elif is_collective(node):
            kinds += "s"
        elif getattr(node.target, "_opname", "") in _LAST_OPS:
            kinds += "u"
    return kinds


SETTINGS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "op by op": {"foreach": False}}


@pytest.mark.parametrize("settings", SETTINGS)
@on_ranks(2)
def test_updates_come_before_the_last_waits(mesh, settings):
    kinds = _kinds(_step(mesh, "eager", **SETTINGS[settings]))
    assert kinds.rindex("s") < kinds.index("u") < kinds.rindex("w") < kinds.rindex("u")


@on_ranks(2)
def test_clipped_updates_come_behind_all_waits(mesh):
    kinds = _kinds(_step(mesh, "eager", clip=True, fused=True))
    assert kinds.count("u") == 1 and kinds.rindex("w") < kinds.index("u")


@on_ranks(2)
def test_the_waits_behind_inductors_code_are_kept_with_it(mesh, folder):  # noqa: F811
    with in_folder(folder):
        kinds, labels = [], []
        for _ in range(2):  # the second time, the graphs come from the folder
            torch._dynamo.reset()
            found = compat.cache_counts()[0]
            graph = _step(mesh, "inductor", fused=True)
            kinds.append(_kinds(graph))
            labels.append([str(label_of(node)) for node in filter(is_wait, graph.graph.nodes)])
    assert compat.cache_counts()[0] == found + 1
    behind = kinds[0][kinds[0].rindex("C") :]
    assert behind.index("u") < behind.rindex("w") < behind.rindex("u")
    assert kinds[0] == kinds[1] and labels[0] == labels[1] and "None" not in labels[0]


@on_ranks(4)
def test_copies_of_the_model_reduce_in_the_tail(mesh):
    mesh = mesh_of("cpu", (2, 2), ("replicate", "shard"))
    kinds = _kinds(_step(mesh, "inductor", fused=True))
    tail = kinds[kinds.rindex("C") :]
    assert "s" in tail and tail.index("u") < tail.rindex("w")
    # Three ranks have loaded the graph that one has compiled, and all enter the same collectives.
    entered: list[int] = [0] * 4
    dist.all_gather_object(entered, history_of(compat.group_name(dist.group.WORLD)).count)
    assert len(set(entered)) == 1, entered


@pytest.mark.parametrize("ahead", ["p1", "p0", "p1 p0", ""])
def test_updates_run_behind_gathers_for_the_next_step(ahead):
    """p3 and p2 are updated by one op, p1 and p0 behind a wait each; some are gathered ahead."""
    graph, names = Graph(), {}
    params = {name: graph.placeholder(name) for name in ("p0", "p1", "p2", "p3")}
    grads = {name: graph.placeholder(f"grad_{name}") for name in params}
    held = graph.placeholder("held")

    def add(name, target, *args):
        node = graph.call_function(target, args)
        names[node] = name
        return node

    both = [[given["p3"], given["p2"]] for given in (params, grads)]
    add("update", aten._foreach_add_.List, *both)
    for name in ("p1", "p0"):
        done = add(f"wait {name}", wait, grads[name])
        add(f"update {name}", aten.add_.Tensor, params[name], done)
    for name in ahead.split():
        started = add(f"gather {name}", gather, params[name], 2, "0")
        add("copy", aten.copy_.default, held, add("wait", wait, started))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4)
    graph.output(())
    gm = update_when_reduced(GraphModule({}, graph), PassContext("step"))
    order = [
        names.get(node) or f"update {node.args[0][0].name}"
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]
    p1, p0 = ["wait p1", "update p1"], ["wait p0", "update p0"]
    done = ["wait", "copy"]
    assert (
        order
        == {
            "p1": [*p1, "gather p1", "update", *p0, *done],
            "p0": ["update p3", *p1, *p0, "gather p0", "update p2", *done],
            "p1 p0": [*p1, "gather p1", "update p3", *p0, "gather p0", "update p2", *done, *done],
            "": ["update", *p1, *p0],
        }[ahead]
    )
