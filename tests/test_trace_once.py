"""Calls of modules that repeat, traced once: the joint graph is what it is when each is traced."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from models import Gated, Stack, batch_of, check_parity, compiled, full, seeded, shard_all
from ranks import on_ranks
from torch import nn
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from shardc import explain
from shardc.backend import compile as backend
from shardc.backend.graph_plan import joint_listeners
from shardc.passes.nodes import module_of, moved_by
from shardc.passes.repeat.repeated_calls import FEWEST_CALLS, SMALLEST, read_call
from shardc.passes.repeat.trace_once import Calls
from shardc.planning import plan_step
from shardc.runtime import compat
from shardc.sharding import unit_plan


@contextlib.contextmanager
def _looking():
    """Gives, by compile: how many calls were replaced, and the joint graph, node by node."""
    calls, joints = [], []
    replace, trace = backend.call_once, Calls.trace

    def found(*args, **kwargs):
        made = replace(*args, **kwargs)
        calls.append(len(made))
        return made

    def count(self, gm):
        trace(self, gm)
        calls[-1] = len(self)

    def look(gm, ctx, plan):
        joints.append(_rows(gm))

    joint_listeners.append(look)
    backend.call_once, Calls.trace = found, count
    try:
        yield calls, joints
    finally:
        backend.call_once, Calls.trace = replace, trace
        joint_listeners.remove(look)


def _rows(gm):
    """What passes can see of each node, names left out."""
    numbers, storages, rows = {}, {}, []
    for node in gm.graph.nodes:
        numbers[node] = len(numbers)
        value = node.meta.get("val")
        tensors = [
            (v.shape, v.stride(), v.dtype, v.storage_offset(), v.device, _number(storages, v))
            for v in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(v, torch.Tensor)
        ]
        target = "" if node.op == "placeholder" else str(node.target)
        args = str(torch.fx.node.map_arg((node.args, node.kwargs), lambda n: numbers[n]))
        phase = [node.meta.get(key) for key in ("autograd_backward", "partitioner_tag")]
        rows.append((target, args, tensors, moved_by(node), module_of(node), phase))
    return rows


def _number(storages, tensor):
    return storages.setdefault(tensor.untyped_storage()._cdata, len(storages))


def _explained(build, args, executor, fold, regions=False, **sharding):
    """With `regions`, Dynamo traces units that repeat once, too; inputs have another order then."""
    options = {"executor": executor, "fold": fold}
    known = regions and compat.traces_regions_once()
    with mock.patch.object(compat, "traces_regions_once", lambda: known):
        return explain(build(), *args, world_size=4, options=options, **sharding).to_dict()


def _compare(build, args, calls, executor="eager", **sharding):
    with _looking() as (made, joints):
        once, each = (_explained(build, args, executor, f, **sharding) for f in (True, False))
    assert made == [calls]  # without `fold` nothing is looked for
    assert len(joints) == 2
    _check_equal(*joints)
    if executor == "inductor":  # what a folded call is given it does not write over
        once, each = ({**report, "memory": None} for report in (once, each))
    assert once == each
    return joints[0]


def _check_equal(once, each):
    for got, want in zip(once, each, strict=True):
        assert got == want


traces_regions = pytest.mark.skipif(
    not compat.traces_regions_once(), reason="before 2.13 Dynamo traces each call of a region"
)
TOKENS = (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
X32 = torch.zeros(2, 8, 32)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_joint_graph_is_as_if_each_was_traced(executor):
    rows = _compare(lambda: Stack(blocks=5), TOKENS, 5, executor)
    modules = {row[4] for row in rows}
    assert {f"layers.{i}.up" for i in range(5)} <= modules  # every node says its own module
    labels = [moved.label for row in rows if "all_gather_into" in row[0] for moved in row[3]]
    assert sorted(labels)[-5:] == [f"layers.{i}" for i in range(5)]


def test_attention_and_dropout_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = _compare(lambda: Gated(4, dropout=0.1), (X32,), 3)  # x needs no gradient
    assert sum(row[0] == "aten.native_dropout.default" for row in rows) == 8
    assert any(tensors and tensors[0][2] == torch.bfloat16 for _, _, tensors, *_ in rows)


def test_seeds_are_drawn_for_the_whole_graph():
    """Inductor's passes see the nodes of bodies that draw random numbers in the joint graph."""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    rows = _compare(lambda: Gated(4, dropout=0.1), (X32,), 3, "inductor", mp_policy=policy)
    assert sum("inductor_seeds" in row[0] for row in rows) == 1
    assert sum("inductor_lookup_seed" in row[0] for row in rows) == 8


def test_passes_of_the_user_see_each_call():
    seen = []

    def look(graph):
        seen.append([str(node.target) for node in graph.nodes if node.op == "call_function"])
        assert "aten" in torch.fx.GraphModule({}, copy.deepcopy(graph)).code

    for fold in (True, False):
        options = {"inductor": {"joint_custom_pre_pass": look}, "fold": fold}
        explain(Stack(blocks=FEWEST_CALLS), *TOKENS, world_size=4, options=options)
    assert len(seen) == 2 and seen[0] == seen[1] != []


class _Model(nn.Module):
    def __init__(self, kind, blocks=4):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(kind(i) for i in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Numbered(nn.Module):
    """Every other one has a factor of its own."""

    def __init__(self, number):
        super().__init__()
        self.linear, self.factor = nn.Linear(8, 8), 1.0 + number % 2

    def forward(self, x):
        return x + self.factor * torch.tanh(self.linear(x))


class _Counting(_Numbered):
    """Writes to a buffer."""

    def __init__(self, number):
        super().__init__(0)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(x.detach().mean((0, 1)))
        return super().forward(x)


class _Seeing(_Numbered):
    """Gives a view of what it computes."""

    def forward(self, x):
        return (x + torch.tanh(self.linear(x))).transpose(0, 1)


class _Partly(_Numbered):
    """Computes a part of it without gradients."""

    def forward(self, x):
        with torch.no_grad():
            scale = self.linear(x).abs().amax()
        return x / (1 + scale) + torch.tanh(self.linear(x))


class _Writing(_Numbered):
    """Writes to what it is given."""

    def __init__(self, number):
        super().__init__(0)

    def forward(self, x):
        return x.add_(torch.tanh(self.linear(x.detach().clone())))


X = (torch.zeros(8, 8, 8),)


def test_blocks_that_differ_in_a_constant_are_two_kinds():
    """Too few of a kind are traced each."""
    rows = _compare(lambda: _Model(_Numbered, 2 * FEWEST_CALLS), X, 2 * FEWEST_CALLS)
    factors = [row[1].split(",")[-2] for row in rows if row[0] == "aten.mul.Tensor"]
    assert {"2.0" in factor for factor in factors} == {True, False}
    _compare(lambda: _Model(_Numbered, 2 * FEWEST_CALLS - 2), X, 0)


@pytest.mark.parametrize("kind", [_Counting, _Seeing, _Partly, _Writing])
def test_what_is_no_function_of_its_operands_is_traced_each(kind):
    with _looking() as (made, joints):
        once, each = (_explained(lambda: _Model(kind), X, "eager", f) for f in (True, False))
    _check_equal(*joints)
    assert once == each
    assert made == [0]


@on_ranks(1)
def test_dynamic_sizes_are_traced_each(mesh):
    model = shard_all(Stack(blocks=FEWEST_CALLS), mesh)
    with _looking() as (made, _):
        step = torch.compile(model, backend="shardc", dynamic=True, options={"executor": "eager"})
        step(*TOKENS).backward()
    assert made and not any(made)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_training_equals_unsharded(mesh, executor):
    plain = seeded(lambda: Stack(blocks=4))
    sharded = shard_all(seeded(lambda: Stack(blocks=4)), mesh)
    with _looking() as (made, _):
        step = compiled(sharded, executor)
        check_parity(plain, sharded, step, batch_of, mesh)
        with torch.no_grad():
            torch.testing.assert_close(step(**batch_of(0)), plain(**batch_of(0)))
    assert made == [4, 4]


@on_ranks(1)
@pytest.mark.parametrize("kind", [Gated, _Counting])
def test_bodies_are_traced_where_a_graph_is_not_found_on_disk(mesh, kind):
    """And calls of what has none become nodes again there; what is found is as if they had not."""
    traced, results = [], []
    trace = compat.trace_body
    x = torch.randn(8, 8, 8)
    noted = mock.patch.object(
        compat, "trace_body", lambda *args: traced.append(trace(*args)) or traced[-1]
    )
    with fresh_cache(), noted:
        for _ in range(2):
            torch._dynamo.reset()
            model = seeded(lambda: Gated(4, 8) if kind is Gated else _Model(kind))
            loss = compiled(shard_all(model, mesh), "inductor")(x)
            loss.square().mean().backward()
            gradients = [p.grad.full_tensor() for p in model.parameters()]
            results.append([loss.detach(), *gradients, *model.buffers()])
    assert [body is not None for body in traced] == [kind is Gated]
    assert all(map(torch.equal, *results))


@on_ranks(2)
def test_gradients_are_bitwise_those_of_each_traced(mesh):
    gradients = []
    for fold in (True, False):
        torch._dynamo.reset()
        model = shard_all(seeded(lambda: Gated(4, dropout=0.2)), mesh)
        options = {"executor": "eager", "fold": fold}
        step = torch.compile(model, backend="shardc", options=options)
        torch.manual_seed(3)
        with _looking() as (made, _):
            step(torch.randn(2, 8, 32)).backward()
        assert made == ([3] if fold else [])
        gradients.append([full(p.grad) for p in model.parameters()])
    assert all(map(torch.equal, *gradients)) and float(gradients[0][0].abs().sum()) > 0


# -- by Dynamo, in `explain` ---------------------------------------------------------------------


class _Breaking(_Numbered):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class _Checkpointed(_Numbered):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class _Outside(_Numbered):
    """Reads a parameter of another unit, whose place is no part of its own."""

    def __init__(self, number):
        super().__init__(0)
        self.of = [_Numbered(0)]

    def forward(self, x):
        return super().forward(x) + self.of[0].linear.bias


class _Deeper(_Model):
    """Has a block in each block."""

    def __init__(self, kind):
        super().__init__(kind)
        for layer in self.layers:
            layer.inner = kind(0)
            layer.linear = nn.Sequential(layer.linear, layer.inner)


@traces_regions
@pytest.mark.parametrize(
    ("build", "args", "regions"),
    [
        (lambda: Stack(blocks=5), TOKENS, 5),
        (lambda: _Model(_Numbered, 6), X, 6),
        (lambda: _Model(_Partly), X, 4),
        (lambda: _Model(_Counting), X, 4),
        (lambda: _Model(_Outside), X, 4),
        (lambda: _Deeper(_Numbered), X, 4),
        (lambda: _Model(_Checkpointed), X, None),
        (lambda: _Model(_Breaking), X, None),
        (lambda: Stack(blocks=FEWEST_CALLS - 1), TOKENS, 0),
    ],
    ids=["stack", "kinds", "partly", "counting", "outside", "deeper", "checkpointed", "breaking",
         "few"],
)  # fmt: skip
def test_explain_has_dynamo_trace_units_once(build, args, regions, monkeypatch):
    calls, inline = [], compat.inline_regions

    def count(gm):
        found = len(gm.graph.find_nodes(op="call_function", target=_INVOKE))
        inline(gm)
        calls.append(found)
        assert not gm.graph.find_nodes(op="call_function", target=_INVOKE)

    monkeypatch.setattr(compat, "inline_regions", count)
    once = _explained(build, args, "eager", fold=True, regions=True)
    assert calls == ([] if not regions else [regions])
    assert once == _explained(build, args, "eager", fold=True)


_INVOKE = torch.ops.higher_order.invoke_subgraph


class _Normed(_Numbered):
    def __init__(self, number):
        super().__init__(0)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return super().forward(self.norm(x))


class _Ended(_Model):
    """Reads of the bucket with its blocks' vectors, too."""

    def __init__(self, kind):
        super().__init__(kind)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return super().forward(self.norm(x))


@traces_regions
@pytest.mark.parametrize("kind", [_Normed, _Counting])
def test_blocks_whose_vectors_the_model_holds_are_traced_once(kind, monkeypatch):
    """By AOT autograd and by Dynamo, as on devices with memory of their own."""
    monkeypatch.setattr(unit_plan, "_LARGE", 1)
    kinds, inline = [], compat.inline_regions

    def count(gm):
        calls = gm.graph.find_nodes(op="call_function", target=_INVOKE)
        kinds.append(len({node.args[0].target for node in calls}))
        inline(gm)

    monkeypatch.setattr(compat, "inline_regions", count)
    build, device = lambda: _Ended(kind), {"profile": "h100-nvlink"}
    _compare(build, X, 4 if kind is _Normed else 0, **device)
    once = _explained(build, X, "eager", True, regions=True, **device)
    assert once == _explained(build, X, "eager", True, **device) and kinds == [1]
    held = max(once["buckets"], key=lambda bucket: bucket["parameters"])
    assert "layers" not in held["unit"] and held["parameters"] >= 4 + 2


@traces_regions
def test_regions_leave_no_trace_on_classes(monkeypatch):
    classes, before = [], []
    find = plan_step._repeated

    def look(model):
        classes.extend(found := find(model))
        before.extend((cls.forward, dict(vars(cls.forward))) for cls in found)
        return found

    monkeypatch.setattr(plan_step, "_repeated", look)
    _explained(lambda: Stack(blocks=3), TOKENS, "eager", fold=True, regions=True)
    (cls,), ((forward, marks),) = classes, before
    assert "forward" not in vars(cls)
    assert cls.forward is forward and vars(forward) == marks


def test_a_closure_is_not_known_by_its_name():
    """Dynamo of torch 2.11 hides the mesh and the placements of a DTensor in one."""

    def scaled(by):
        def scale(x):
            return x * by

        scale.__module__ = "torch.nn"
        return scale

    def graph_of(target):
        with FakeTensorMode():
            value = torch.ones(3)
        graph = Graph()
        nodes = [graph.placeholder("x")]
        for _ in range(SMALLEST):
            nodes.append(graph.call_function(target, (nodes[-1],)))
        graph.output(nodes[-1])
        for node in nodes:
            node.meta["example_value"] = value
        return nodes[1:]

    assert read_call(graph_of(torch.relu)) is not None
    assert read_call(graph_of(scaled(2))) is None
