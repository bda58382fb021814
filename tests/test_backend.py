"""What the backend makes of a graph: collectives, saved tensors, recompiles, caches, fallbacks."""

import copy
import inspect
import subprocess
import sys
import textwrap
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    Block,
    Checkpointed,
    Stack,
    batch_of,
    check_parity,
    compiled,
    full,
    mean_over_ranks,
    seeded,
    shard_all,
    tokens,
)
from ranks import on_ranks
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils.parametrizations import weight_norm

import shardc
from shardc import fully_shard
from shardc.backend.graph_plan import graph_plans
from shardc.backend.options import Options
from shardc.passes import pipeline
from shardc.passes.contract import contract
from shardc.passes.nodes import is_all_gather, is_collective, is_wait, moved_by
from shardc.passes.rewrite.reshard import tag_reshard
from shardc.passes.rewrite.used_slots import SEGMENT
from shardc.runtime import compat
from shardc.runtime.checks import telling
from shardc.runtime.unit import regather


class Graphs:
    """Collects what the pipeline lowers, by phase."""

    def __enter__(self):
        self.seen = []
        self.original = list(pipeline.GRAPH_PASSES)
        pipeline.GRAPH_PASSES.append(self._collect)
        return self

    def _collect(self, gm, ctx):
        if ctx.number is not None:  # not for a trial of the budget
            self.seen.append((ctx.phase, gm))
        return gm

    def __exit__(self, *error):
        pipeline.GRAPH_PASSES[:] = self.original

    def collectives(self, phase):
        return [
            node.target._opname
            for kind, gm in self.seen
            if kind == phase
            for node in gm.graph.nodes
            if is_collective(node)
        ]

    def saved(self):
        return [
            node
            for kind, gm in self.seen
            if kind == "forward"
            for node in gm.graph.output_node().all_input_nodes
        ]


GATHER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor"


@pytest.mark.parametrize(("reshard", "again"), [(True, 3), (False, 0), (None, 2)])
@on_ranks(2)
def test_collectives_reshard(mesh, reshard, again):
    """None reshards all but the outermost unit. Dynamo traces a read in few functions: each costs
    a start about a millisecond."""
    model = shard_all(seeded(Stack), mesh, reshard_after_forward=reshard)
    traced, inline = [], InliningInstructionTranslator.inline_call_

    def counted(*args):
        traced.extend(arg.f_code.co_filename for arg in args if hasattr(arg, "f_code"))
        return inline(*args)

    inlined = mock.patch.object(InliningInstructionTranslator, "inline_call_", counted)
    with Graphs() as graphs, inlined:
        compiled(model, fullgraph=True)(**batch_of(0)).backward()
    assert graphs.collectives("forward") == [GATHER] * 3
    # last block, first block, root; a bucket is gathered again where the backward needs its values
    assert sorted(graphs.collectives("backward")) == [GATHER] * again + [REDUCE] * 3
    nodes = [(phase, node) for phase, gm in graphs.seen for node in gm.graph.nodes]
    units = shardc.units_of(model).values()
    if reshard:
        placeholders = {node for _, node in nodes if node.op == "placeholder"}
        largest = max(unit._shardc_unit.buckets[0].layout.numel for unit in units)
        for node in graphs.saved():
            assert node in placeholders or node.meta["val"].numel() < largest // 2, node
    elif reshard is False:
        waits = {node for phase, node in nodes if phase == "forward" and is_wait(node)}
        assert waits and waits <= set(graphs.saved()), (waits, graphs.saved())
    ours = sum("runtime" in file for file in traced)
    reads = len(list(model.parameters()))
    assert 2 * reads <= ours <= 2 * reads + 4 * len(units)


@on_ranks(2)
def test_inference_graph(mesh):
    plain, model = seeded(Stack).eval(), shard_all(seeded(Stack), mesh).eval()
    step = compiled(model, fullgraph=True)
    with Graphs() as graphs, torch.no_grad():
        torch.testing.assert_close(step(**batch_of(0)), plain(**batch_of(0)))
    assert [phase for phase, _ in graphs.seen] == ["forward"]
    with torch.inference_mode():
        torch.testing.assert_close(step(**batch_of(1)), plain(**batch_of(1)))


class Nested(Block):
    """All blocks of a model run one traced body."""

    forward = torch.compiler.nested_compile_region(Block.forward)


@on_ranks(2)
def test_nested_compile_regions(mesh):
    plain, model = seeded(Stack), seeded(Stack)
    for block in model.layers:
        block.__class__ = Nested
    step = compiled(shard_all(model, mesh), fullgraph=True)
    check_parity(plain, model, step, batch_of, mesh)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_activation_checkpointing(mesh, reshard):
    plain = seeded(Checkpointed)
    model = shard_all(seeded(Checkpointed), mesh, reshard_after_forward=reshard)
    with Graphs() as graphs:
        check_parity(plain, model, compiled(model, fullgraph=True), batch_of, mesh)
    assert graphs.collectives("forward") == [GATHER] * 3
    again = [GATHER] * 3 if reshard else []
    assert sorted(graphs.collectives("backward")) == again + [REDUCE] * 3
    for _, gm in graphs.seen:
        sent = [moved_by(node) for node in gm.graph.nodes if is_collective(node)]
        moved = {(each.position, each.label, each.unit) for facts in sent for each in facts}
        assert sorted(label for _, label, _ in moved) == ["Checkpointed", "layers.0", "layers.1"]
        assert len({place for place, _, _ in moved}) == len({unit for *_, unit in moved}) == 3


@on_ranks(2)
def test_sequence_length_changes_without_recompiling(mesh):
    plain, model = seeded(Stack), shard_all(seeded(Stack), mesh)
    step = compiled(model, dynamic=True, fullgraph=True)
    counters.clear()
    for length in (5, 8, 6):
        x = tokens(length, (2, length))
        loss = step(x, x)
        torch.testing.assert_close(loss, plain(x, x))
        loss.backward()
    assert counters["stats"]["unique_graphs"] == 1


class Jagged(nn.Module):
    """Embedding, attention and blocks over rows of different lengths."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 18)
        self.mixed = nn.ModuleList(nn.Linear(18, 18) for _ in range(3))
        self.layers = nn.ModuleList(Block(18) for _ in range(2))

    def forward(self, rows):
        x = self.embed(rows)
        heads = (linear(x).unflatten(-1, [2, 9]).transpose(1, 2) for linear in self.mixed)
        x = x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)
        for layer in self.layers:
            x = layer(x)
        return x.values().square().mean()


def _rows(seed):
    """Three rows of tokens whose lengths depend on the seed."""
    lengths = torch.randint(1, 9, (3,), generator=torch.Generator().manual_seed(seed))
    rows = [tokens(seed, (int(n),)) for n in lengths]
    return {"rows": torch.nested.nested_tensor(rows, layout=torch.jagged)}


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "eager"},
        {"executor": "inductor", "memory_budget": 60_000, "embedding_rows": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@on_ranks(2)
def test_jagged_tensors(mesh, options):
    plain, model = seeded(Jagged), shard_all(seeded(Jagged), mesh)
    plain.compile(backend="aot_eager")
    step = torch.compile(model, backend="shardc", options=options)
    check_parity(plain, model, step, _rows, mesh, steps=3)


class Doubling(nn.Linear):
    """Reads its input before its parameters."""

    def forward(self, x):
        return super().forward(x * 2).values().sum()


@on_ranks(2)
def test_segments_behind_a_jagged_input_are_marked(mesh):
    model = fully_shard(seeded(lambda: Doubling(3, 5)), mesh=mesh)
    marked = []

    def look(gm, ctx):
        inputs = gm.graph.find_nodes(op="placeholder")
        marked.extend(list(node.meta["val"].shape) for node in inputs if SEGMENT in node.meta)
        return gm

    with mock.patch.object(pipeline, "JOINT_PASSES", [*pipeline.JOINT_PASSES, look]):
        rows = [torch.ones(n, 3) for n in (2, 4)]
        compiled(model)(torch.nested.nested_tensor(rows, layout=torch.jagged)).backward()
    assert marked == [[model._shardc_unit.buckets[0].layout.segment]]


class Broken(Stack):
    """Breaks the graph between blocks."""

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return self.head(x).logsumexp(-1).mean() + 0 * targets.sum()


def test_dynamo_neither_inlines_nor_compiles_an_untraced_function():
    @compat.untraced
    def twice(x):
        return x + x

    def step(x):
        return twice(x + 1) * 3

    counters.clear()
    assert torch.compile(step, backend="eager")(torch.ones(2)).tolist() == [12.0, 12.0]
    assert counters["stats"]["unique_graphs"] == 2  # before and behind the call
    (reason,) = counters["graph_break"]
    assert "torch.compiler.disable" in reason


@on_ranks(1)
def test_dynamo_does_not_see_the_flag_of_fsdp(mesh):
    """Dynamo would break the graph there: up to torch 2.13 it asks the module, then its class."""
    model = fully_shard(seeded(lambda: nn.Linear(3, 2)), mesh=mesh)
    assert model._is_fsdp_managed_module
    assert not inspect.getattr_static(model, "_is_fsdp_managed_module")
    model._is_fsdp_managed_module = True  # as transformers does
    assert "_is_fsdp_managed_module" not in vars(model)
    step = compiled(lambda x: model(x) * model._is_fsdp_managed_module, fullgraph=True)
    assert step(torch.ones(4, 3)).any()


@on_ranks(2)
def test_graph_breaks(mesh):
    """Dynamo looks at every frame between graphs, also at those of hooks that autograd calls."""
    plain, model = seeded(Broken), shard_all(seeded(Broken), mesh)
    for layer in model.layers:  # the rest of the block runs uncompiled
        layer.up.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    check_parity(plain, model, compiled(model), batch_of, mesh)
    buckets = [b for u in shardc.units_of(model).values() for b in u._shardc_unit.buckets]
    assert all(b.gathered.depth == 0 and b.gathered.current is None for b in buckets)
    for function in (regather._handle, regather._pack, regather._unpack):
        assert not _debug_get_cache_entry_list(inspect.unwrap(function).__code__)


class _Doubled(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


@on_ranks(2)
def test_calls_of_the_user_and_hooks_are_traced(mesh):
    """Dynamo passes over `nn.Module.__call__` where it does no more than call `forward`."""

    def build():
        model = Stack()
        for layer in model.layers:
            layer.up = _Doubled(layer.up.in_features, layer.up.out_features)
            layer.down.register_forward_hook(lambda _, given, result: result * 3)
            layer.down.register_forward_pre_hook(lambda _, given: given[0] * 5)
        return model

    plain = seeded(build)
    without = seeded(Stack)(**batch_of(0))
    assert not torch.allclose(plain(**batch_of(0)), without)
    for step in (compiled, lambda model: model):
        model = shard_all(copy.deepcopy(plain), mesh)
        check_parity(copy.deepcopy(plain), model, step(model), batch_of, mesh)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum((0, 1))


class Scaled(nn.Module):
    """An `autograd.Function` behind a graph break."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return _Scale.apply(x, self.scale).square().mean()


@on_ranks(2)
def test_an_autograd_function_behind_a_graph_break(mesh):
    plain, model = seeded(Scaled), fully_shard(seeded(Scaled), mesh=mesh)
    check_parity(plain, model, compiled(model), lambda seed: {"x": _noise(seed)}, mesh)


def _noise(seed):
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reshard", [False, True])
@on_ranks(2)
def test_a_weight_that_is_computed_by_an_op_with_several_results(mesh, reshard):
    """From parameters alone."""
    plain, model = (seeded(lambda: nn.Sequential(weight_norm(nn.Linear(4, 4)))) for _ in range(2))
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    loss = {"loss_of": lambda out: out.square().mean()}
    check_parity(plain, model, compiled(model), lambda seed: {"input": _noise(seed)}, mesh, **loss)


class Added(nn.Module):
    """Two embeddings whose gradients are equal."""

    def __init__(self):
        super().__init__()
        self.tokens, self.segments = nn.Embedding(5, 4), nn.Embedding(5, 4)

    def forward(self, ids):
        return (self.tokens(ids) + self.segments(ids)).square().mean()


@on_ranks(1, 2)
def test_equal_gradients_are_not_one(mesh):
    plain, model = seeded(Added), seeded(Added)
    for unit in (model.tokens, model.segments, model):
        fully_shard(unit, mesh=mesh)
    call = compiled(model, "inductor" if mesh.size() == 2 else "eager")
    check_parity(plain, model, call, lambda seed: {"ids": tokens(seed, vocab=5)}, mesh)
    call(tokens(9, vocab=5)).backward()
    model.tokens.weight.grad.mul_(0)
    assert full(model.segments.weight.grad).any()


@on_ranks(2)
def test_compiled_blocks(mesh):
    plain, model = seeded(Stack), shard_all(seeded(Stack), mesh)
    for layer in model.layers:
        layer.compile(backend="shardc", options={"executor": "eager"})
    counters.clear()
    with Graphs() as graphs:
        check_parity(plain, model, model, batch_of, mesh)
    assert counters["stats"]["unique_graphs"] == 1  # both blocks run one compiled graph
    values = [node.meta.get("val") for _, gm in graphs.seen for node in gm.graph.nodes]
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    assert len(graphs.seen) == 2 and {type(size) for size in sizes} == {int}


class Mixed(nn.Module):
    """Several dtypes, scalars, empty and integer parameters, one used twice."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(5, 7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(7) % 2 == 0, requires_grad=False)
        self.low = nn.Parameter(torch.randn(7, 7).bfloat16())
        self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))

    def forward(self, x):
        y = (x @ self.weight * self.scale)[:, self.table] @ self.wide.float() @ self.weight
        y = torch.where(self.mask, y, 2 * y) @ self.low.float() + self.empty.sum()
        return (y * self.phase).abs().pow(2).mean()


@on_ranks(2)
def test_several_dtypes_scalar_empty_and_integer_parameters(mesh):
    plain, model = seeded(Mixed), fully_shard(seeded(Mixed), mesh=mesh)
    assert len(model._shardc_unit.buckets) == 6
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(mesh.get_local_rank()))
    plain(x).backward()
    compiled(model, fullgraph=True)(x).backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(full(q), p.detach()), name
        if p.grad is None:
            assert q.grad is None, name
            continue
        loose = {"rtol": 1e-2, "atol": 1e-2} if p.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(full(q.grad), mean_over_ranks(p.grad, mesh), msg=name, **loose)


def _refuse_op(graph):
    raise NotImplementedError("no code for this op")


BROKEN = {
    "/no/compiler": {"cpp.cxx": (None, "/no/compiler")},
    "no code for this op": {"post_grad_custom_post_pass": _refuse_op},
}


def warned_on_all_ranks(run):
    """What `run` warns of on any rank, in a job that has been told nothing of fallbacks before."""
    telling._warned.clear()
    if dist.get_rank() == 0:
        compat.group_store(dist.group.WORLD).delete_key("shardc/told/fallback")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    told = [None] * dist.get_world_size()
    own = [str(w.message) for w in caught if "op by op" in str(w.message)]
    dist.all_gather_object(told, own)
    return [message for messages in told for message in messages]


@on_ranks(2)
def test_falls_back_to_the_eager_executor(mesh):
    plain, model = seeded(Block), fully_shard(seeded(Block), mesh=mesh)
    reason = "no code for this op"
    broken = {**BROKEN[reason], "force_disable_caches": True}
    step = torch.compile(model, backend="shardc", options={"inductor": broken})
    x = torch.randn(3, 18)
    messages = warned_on_all_ranks(lambda: [step(x).pow(2).mean().backward() for _ in range(2)])
    torch.testing.assert_close(step(x), plain(x))
    plain(x).pow(2).mean().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(q.grad), 2 * p.grad, msg=name)
    assert len(messages) == 1 and reason in messages[0], messages
    torch._dynamo.reset()
    options = {"inductor": broken, "fallback": False}
    with pytest.raises(Exception, match=reason):
        torch.compile(model, backend="shardc", options=options)(x)


def test_an_op_that_cannot_be_lowered_is_named_without_all_that_it_is_computed_from():
    library = torch.library.Library("shardc_test_lowering", "FRAGMENT")
    library.define("fails(Tensor x) -> Tensor")
    library.impl("fails", torch.clone, "CompositeExplicitAutograd")
    op = torch.ops.shardc_test_lowering.fails.default

    def step(x):
        for _ in range(12):  # each reads the one before twice
            x = x @ x
        return (op(x),)

    def lower(x):
        raise ValueError("no code for it")

    with FakeTensorMode():
        x = torch.empty(8, 8)
        gm = make_fx(step)(x)
    told = pytest.raises(compat.inductor_error(), match=f"no code for it\n *target: {op}$")
    with mock.patch.dict(lowerings, {op: lower}), told:
        compat.compile_fx_inner(gm, [x], lambda node: None)
    library._destroy()


class Pass(CustomGraphPass):
    """A pass of a user that counts its calls and may change the graph."""

    def __init__(self, change=lambda graph: None):
        self.calls, self.change = 0, change

    def __call__(self, graph):
        self.calls += 1
        self.change(graph)

    def uuid(self):
        return self.change.__name__


def _gathers(everywhere=None, **inductor):
    """How often a step gathers, by phase, under settings of Inductor given in one of two ways."""
    with torch._inductor.config.patch(everywhere or {}):
        report = shardc.explain(
            Stack(2), tokens(0), tokens(1), world_size=2, reshard_after_forward=True,
            options={"inductor": inductor},
        )  # fmt: skip
    phases = [row.phase for row in report.collectives if row.kind == "all_gather"]
    return phases.count("forward"), phases.count("backward")


def test_passes_of_the_user_on_joint_graphs_run_beside_ours():
    mine, other = Pass(), Pass()
    assert _gathers(joint_custom_post_pass=mine) == (3, 3)
    assert _gathers(everywhere={"joint_custom_post_pass": other}) == (3, 3)
    assert (mine.calls, other.calls) == (1, 1)


class Scored(nn.Module):
    """Ops with bodies: one returns no tuple, as `score_mod` must, the others a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        q = y.detach()  # on CPUs attention of this kind has no backward
        z = flex_attention(q, q, q, score_mod=lambda score, *place: score + place[-1])
        return torch.cond(z.sum() > 0, torch.sin, torch.cos, (y * z,)).sum()


@pytest.mark.parametrize("budget", [None, 10**9])
def test_bodies_of_ops_are_no_joint_graphs(budget):
    report = shardc.explain(
        Scored(), torch.randn(1, 2, 8, 64), world_size=2, options={"memory_budget": budget}
    )
    assert [row.kind for row in report.collectives] == ["all_gather", "reduce_scatter"]


class Counting(nn.Module):
    """Uses a buffer right after it was changed in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x)
        self.count += 1
        self.seen += x.shape[0]
        return (y * (1 + 0.1 * self.count)).square().sum()


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_a_buffer_that_is_changed_before_it_is_used(mesh, executor):
    plain, sharded = seeded(Counting), fully_shard(seeded(Counting), mesh=mesh)

    call = compiled(sharded, executor)
    check_parity(plain, sharded, call, lambda seed: {"x": _noise(seed)}, mesh)


def test_verify_notices_that_tags_are_lost():
    @contract(gives="tags")
    def forget(gm, ctx):
        return gm

    without_tags = [forget if step is tag_reshard else step for step in pipeline.JOINT_PASSES]
    lost = pytest.raises(Exception, match="is resharded after the forward, which keeps")
    with mock.patch.object(pipeline, "JOINT_PASSES", without_tags), lost:
        _gathers()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_joint_graph_passes", False),
        ("reorder_for_peak_memory", True),
        ("reorder_for_compute_comm_overlap", True),
        ("bucket_all_gathers_fx", "all"),
        ("_post_fusion_custom_pass", print),
    ],
)
def test_what_would_undo_the_plan_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}.*leave it at (True|False|'none'|None)"):
        Options.parse({"inductor": {name: value}})
    default = compat.order_settings()[name]
    Options.parse({"inductor": {name: default}})


def _move_first_gather_behind_the_second(graph):
    first, second = list(filter(is_all_gather, graph.nodes))[:2]
    second.append(first)


@on_ranks(2)
def test_reads_are_ops_that_dynamo_may_trust(mesh):
    with torch._dynamo.config.patch(only_allow_pt2_compliant_ops=True):
        compiled(shard_all(Stack(), mesh), fullgraph=True)(**batch_of(1)).backward()


@on_ranks(2)
def test_late_passes_of_the_user_keep_the_collectives(mesh):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    fully_shard(model, mesh=mesh, units=nn.Linear)
    late, fusing = Pass(), []
    settings = {
        "post_grad_custom_post_pass": late,
        "_pre_fusion_custom_pass": lambda nodes: fusing.append(len(nodes)) or nodes,
    }
    options = {"fallback": False, "coalesce": False, "fold": False, "inductor": settings}
    step = torch.compile(model, backend="shardc", options=options)
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x))
        assert (late.calls, len(fusing)) == (1, 1)
        torch._dynamo.reset()
        late.change = _move_first_gather_behind_the_second
        with pytest.raises(Exception, match="moves or changes collectives on which all ranks"):
            step(x)


def test_a_graph_without_any_op():
    step = torch.compile(torch.detach, backend="shardc", options={"fallback": False})
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(step(x), x) and not step(x).requires_grad


def test_nothing_sharded_warns_once_and_compiles():
    script = """
        import torch, warnings
        fn = torch.compile(lambda x: x.sin() + 1, backend="shardc", options={"executor": "eager"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for size in (2, 3, 4):
                x = torch.randn(size)
                torch.testing.assert_close(fn(x), x.sin() + 1)
        print(len([w for w in caught if "nothing sharded" in str(w.message)]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("in_place", [True, False])
@on_ranks(2)
def test_a_container_of_torch_is_one_graph_however_it_is_compiled(mesh, in_place):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1))
    fully_shard(model, mesh=mesh, units="auto")
    graph_plans.clear()
    if in_place:
        model.compile(backend="shardc", options={"executor": "eager"})
    (model if in_place else compiled(model))(torch.randn(2, 8)).sum().backward()
    assert [plan.phase for plan in graph_plans] == ["forward", "backward"]
    assert len(graph_plans[0].collectives) == 4
