"""Repeated compute as calls of one body: what is found, what it gives, what it costs."""

import functools
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from models import Stack, batch_of, check_parity, full, seeded, shard_all
from ranks import on_ranks
from torch._dynamo.utils import counters
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM

from shardc.backend.executor import eager_executor
from shardc.passes import pipeline
from shardc.passes.context import PassContext, ScheduleOptions
from shardc.passes.estimate.hardware import PROFILES
from shardc.passes.nodes import is_collective, is_view, is_wait, kind_of
from shardc.passes.repeat.fold_repeats import INVOKE, calls_of, fold_repeats
from shardc.passes.repeat.near_readers import move_near_readers
from shardc.runtime import compat

WRITE = torch.ops.shardc.write_matmul.default
c10d, aten = torch.ops._c10d_functional, torch.ops.aten


# -- graphs --------------------------------------------------------------------------------------


def _block(x, w, scale=2.0):
    return x + scale * (F.gelu(x @ w) @ w.t())


def _trace(fn, *args, mode="fake"):
    return make_fx(fn, tracing_mode=mode)(*args)


def _blocks(count, block=_block):
    def run(x, *weights):
        for index, w in enumerate(weights):
            x = block(x, c10d.wait_tensor(w), index)
        return x

    torch.manual_seed(0)
    args = [torch.randn(4, 8), *(torch.randn(8, 8) / 4 for _ in range(count))]
    return run, args


def _fold(gm):
    folded = fold_repeats(gm, PassContext("forward"))
    folded.graph.lint()
    folded.recompile()
    return folded


def _calls(gm):
    return [str(node.args[1]) for node in gm.graph.find_nodes(op="call_function", target=INVOKE)]


def _check_values(gm, folded, args):
    want, got = (eager_executor(graph)(list(args)) for graph in (gm, folded))
    assert len(want) == len(got) and all(map(torch.equal, want, got))


def test_equal_blocks_are_one_body():
    run, args = _blocks(4, lambda x, w, index: _block(x, w))
    gm = _trace(lambda *a: [run(*a)], *args)
    folded = _fold(gm)
    assert _calls(folded) == ["repeated_0"] * 4
    assert len(list(folded.children())) == 1
    assert not _calls(gm)  # it stays what it was
    _check_values(gm, folded, args)


def test_nodes_are_known_by_their_call():
    """Before the graph is folded."""
    run, args = _blocks(3, lambda x, w, _: _block(x, w))
    gm = _trace(run, *args)

    def calls(folds):
        options = ScheduleOptions(PROFILES["h100-nvlink"], folds=folds)
        return calls_of(gm, PassContext("forward", options=options))

    assert calls(False) == {}
    left = {node.name for node in _fold(gm).graph.nodes}
    folded = [n.name for n in gm.graph.nodes if not is_view(n) and n.name not in left]
    found = [calls(True).get(name) for name in folded]
    assert found == sorted(found) and set(found) == {0, 1, 2}
    views = {node.name for node in gm.graph.nodes if is_view(node)}
    assert calls(True).keys() - views == set(folded)


@pytest.mark.parametrize(
    ("count", "scale", "mode"),
    [(4, float, "fake"), (2, lambda index: 2.0, "fake"), (4, lambda index: 2.0, "symbolic")],
    ids=["other constants", "too few", "symbolic sizes"],
)
def test_what_is_not_folded_stays_as_it_is(count, scale, mode):
    run, args = _blocks(count, lambda x, w, index: _block(x, w, scale(index)))
    gm = _trace(lambda *a: [run(*a)], *args, mode=mode)
    assert _fold(gm) is gm


def test_views_are_taken_outside():
    """A result of a call is memory of its own: views, of operands too, are no results."""

    def run(x, *weights):
        kept = []
        for w in map(c10d.wait_tensor, weights):
            hidden = F.gelu(x @ w)
            x = x + hidden @ w.t()
            kept += [hidden.t(), w.t(), hidden.view(2, 16)[0], x.relu()]
        return [x, *kept]

    _, args = _blocks(4)
    gm = _trace(run, *args)
    folded = _fold(gm)
    assert _calls(folded) == ["repeated_0"] * 4
    (body,) = folded.children()
    results = [node.target for node in body.graph.output_node().args[0]]
    assert results == [aten.gelu.default, aten.add.Tensor, aten.relu.default]
    _check_values(gm, folded, args)


def test_a_gradient_is_written_into_a_buffer_of_another_stretch():
    def run(x, *weights):
        flats = []
        for w in map(c10d.wait_tensor, weights):
            flat = torch.empty(128)
            h = F.gelu(x @ w)
            torch.ops.shardc.write_matmul(flat, h.t(), x, 0)
            x = c10d.wait_tensor(h.sin())
            x = x.relu() + 1
            torch.ops.shardc.write_matmul(flat, x.t(), h, 64)
            flats.append(c10d.wait_tensor(flat))
        return [x, *flats]

    _, args = _blocks(4)
    gm = _trace(run, *args)
    folded = _fold(gm)
    assert _calls(folded) == ["repeated_0", "repeated_1"] * 4
    written = folded.repeated_1.graph.find_nodes(op="call_function", target=WRITE)
    assert [node.args[0].op for node in written] == ["placeholder"]
    _check_values(gm, folded, args)


# -- what would be one kernel --------------------------------------------------------------------


def _together(run, *args, anew=False):
    """The names of ops between the waits of a graph, after they have moved."""
    gm = _trace(run, *args)
    flat = eager_executor(gm)([arg.clone() for arg in args])
    move_near_readers(gm, anew)
    gm.recompile()
    moved = eager_executor(gm)([arg.clone() for arg in args])
    assert all(map(torch.equal, flat, moved))
    runs = [[]]
    for node in gm.graph.nodes:
        if is_wait(node):
            runs.append([])
        elif node.op == "call_function" and not is_view(node):
            runs[-1].append(node.target._opname)
    return [run for run in runs if run]


def _of_8(count):
    torch.manual_seed(0)
    return [torch.randn(8, 8) for _ in range(count)]


def test_a_gate_goes_to_what_it_is_multiplied_with():
    def run(x, gate, up, down):
        gated = F.silu(x @ c10d.wait_tensor(gate))
        return [(gated * (x @ c10d.wait_tensor(up))) @ c10d.wait_tensor(down)]

    assert _together(run, *_of_8(4)) == [["mm"], ["silu", "mm", "mul"], ["mm"]]


def test_a_sum_and_its_norm_go_to_the_weight():
    """Here a difference: on a CPU a sum is one op with the matmul that it alone reads."""

    def run(x, w, scale, v):
        x = x - x @ c10d.wait_tensor(w)
        norm = x * x.pow(2).mean(-1, keepdim=True).rsqrt()
        return [x + (norm * c10d.wait_tensor(scale)) @ c10d.wait_tensor(v)]

    moved = ["sub", "pow", "mean", "rsqrt", "mul", "mul"]
    assert _together(run, *_of_8(4)) == [["mm"], moved, ["mm", "add"]]


def test_what_reads_the_same_goes_up():
    """As the gradient of a gate, and the value that its weight's gradient is made of."""

    def run(grad, gate, v, w):
        down = (grad * gate.sigmoid()) @ v
        w = c10d.wait_tensor(w)
        return [down + w, (grad * (1 - gate.sigmoid())) @ w]

    up = ["sigmoid", "mul", "sigmoid", "rsub", "mul", "mm"]
    assert [sorted(ops) for ops in _together(run, *_of_8(4))] == [sorted(up), ["add", "mm"]]


def test_what_reads_weights_last_goes_up_past_two_borders():
    """As the gradient of a norm's input; other ops that read the same stay."""

    def run(grad, weight, v, w, u):
        weight = c10d.wait_tensor(weight)
        norm = (grad * weight).sigmoid() @ v
        other = (grad.cos() @ v) @ c10d.wait_tensor(w)
        u = c10d.wait_tensor(u)
        return [norm, other, (grad * weight.exp()) @ u, grad.sin() @ u]

    above, between, below = (sorted(ops) for ops in _together(run, *_of_8(5)))
    assert above == sorted(["mul", "sigmoid", "mm", "cos", "mm", "exp", "mul"])
    assert between == ["mm"] and below == ["mm", "mm", "sin"]


def test_what_no_kernel_would_take_in_stays():
    """A sum that a matmul reads first, and a reduction of what is stored anyway."""

    def run(x, y, v, w):
        total = x + y
        w = c10d.wait_tensor(w)
        hidden = (total + total @ w).relu()
        loss, out = hidden.sum(), hidden @ v
        return [c10d.wait_tensor(out) * loss]

    stay = ["mm", "add", "relu", "sum", "mm"]
    assert _together(run, *_of_8(4)) == [["add"], stay, ["mul"]]


def test_what_stays_in_registers_is_computed_wherever_it_is_read():
    """As the parts of an activation that is computed again for its gradient."""

    def run(x, w, v, u):
        hidden = x @ c10d.wait_tensor(w)
        inner = (hidden * 2).view(64).cos()
        used = (inner + 1).view(8, 8) @ v
        return [(used @ c10d.wait_tensor(u)) * inner.view(8, 8)]

    parts = ["mul", "cos"]
    assert _together(run, *_of_8(4), anew=True) == [
        ["mm", *parts, "add", "mm"],
        ["mm", *parts, "mul"],
    ]


def test_a_constant_is_made_wherever_it_is_read():
    def run(x, w, v):
        tens = torch.full([8, 8], 10.0)
        hidden = (x @ c10d.wait_tensor(w)) * tens
        return [(hidden @ c10d.wait_tensor(v)) * tens]

    assert _together(run, *_of_8(3)) == [["full", "mm", "mul"], ["mm", "full", "mul"]]


def test_what_would_have_more_held_is_stored_for_those_that_read_it_later():
    """It is made of two values that nothing else reads there."""

    def run(x, w, v, u):
        total = x @ w - x @ v
        return [((total.cos() @ w) @ c10d.wait_tensor(u)) * total]

    assert _together(run, *_of_8(4), anew=True) == [["mm", "mm", "sub", "cos", "mm"], ["mm", "mul"]]


def test_what_a_stored_sum_is_widened_to_is_computed_wherever_it_is_read():
    convert = torch.ops.prims.convert_element_type

    def run(x, w, v, u):
        wide = convert(x @ w - x @ v - x @ v, torch.float32)
        used = convert(wide.cos(), torch.bfloat16) @ w
        return [(used @ c10d.wait_tensor(u)) * wide]

    halves, widened = [each.bfloat16() for each in _of_8(4)], ["convert_element_type"]
    assert _together(run, *halves, anew=True) == [
        ["mm", "mm", "sub", "mm", "sub", *widened, "cos", *widened, "mm"],
        ["mm", *widened, "mul"],
    ]


def test_what_is_computed_in_many_steps_is_computed_anew_in_no_time():
    def run(x, w, v):
        value = x
        for _ in range(40):  # each step reads the one before twice
            value = value.sin() + value.cos()
        return [((value.cos() @ w) @ c10d.wait_tensor(v)) * value]

    first, anew = ["sin", "cos", "add"] * 40, ["cos", "sin", "add"] * 40
    assert _together(run, *_of_8(3), anew=True) == [[*first, "cos", "mm"], ["mm", *anew, "mul"]]


def test_what_is_read_far_below_is_computed_there():
    def run(x, *weights):
        sine = x.sin()
        out = functools.reduce(torch.mm, map(c10d.wait_tensor, weights), x)
        return [out * sine * x]

    assert _together(run, *_of_8(4)) == [["sin"], ["mm"], ["mm"], ["mm", "mul", "mul"]]
    assert _together(run, *_of_8(4), anew=True) == [["mm"], ["mm"], ["mm", "sin", "mul", "mul"]]


def test_what_is_made_of_much_is_stored_for_those_that_read_it_later():
    def run(x, w, u, *weights):
        parts = [x @ each for each in weights]
        total = functools.reduce(torch.add, parts)
        out = (total.cos() @ w) @ c10d.wait_tensor(u)
        return [functools.reduce(torch.mul, [out, total, *parts])]

    assert _together(run, *_of_8(7), anew=True)[1] == ["mm", *["add"] * 3, *["mul"] * 5]
    assert _together(run, *_of_8(8), anew=True)[1] == ["mm", *["mul"] * 6]


def test_nothing_crosses_what_writes():
    def run(x, w):
        y = x.sin()
        x.copy_(w)
        return [y * c10d.wait_tensor(w)]

    assert _together(run, *_of_8(2)) == [["sin", "copy_"], ["mul"]]


def test_ops_cross_what_brings_an_optimizers_state_back():
    def run(x, w, sent):
        y = x.sin()
        torch.ops.shardc.fetch_state(sent)
        return [y * c10d.wait_tensor(w)]

    none = torch.tensor(-1)  # nothing was sent under this number
    assert _together(run, *_of_8(2), none) == [["fetch_state"], ["sin", "mul"]]


# -- on ranks ------------------------------------------------------------------------------------


class Folds:
    """Collects the graphs before and after folding, by phase."""

    def __enter__(self):
        self.original, self.seen = list(pipeline.FOLD_PASSES), []
        pipeline.FOLD_PASSES[:] = [self._fold]
        return self

    def _fold(self, gm, ctx):
        folded = fold_repeats(gm, ctx)
        self.seen.append((ctx.phase, gm, folded))
        return folded

    _fold.__name__ = "fold_repeats"

    def __exit__(self, *error):
        pipeline.FOLD_PASSES[:] = self.original

    def calls(self, phase):
        return [name for kind, _, folded in self.seen if kind == phase for name in _calls(folded)]


def _compiled(model, **options):
    return torch.compile(model, backend="shardc", options=options, fullgraph=True)


def _codes(run, step):
    """Return the code that Inductor writes for a step, whose kernels are not compiled."""

    def backward():
        run(step).backward()

    nothing = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    with fresh_cache(), nothing:
        _, codes = run_and_get_code(backward)
    return codes


def _order(gm):
    return [kind_of(n) for n in gm.graph.nodes if is_collective(n) or is_wait(n)]


@on_ranks(2)
def test_trains_as_unsharded(mesh):
    """Gathers start before the call that hides them. The next start finds what was compiled."""
    plain = seeded(lambda: Stack(blocks=7))
    model = shard_all(seeded(lambda: Stack(blocks=7)), mesh, reshard_after_forward=True)
    with Folds() as folds:
        check_parity(plain, model, _compiled(model), batch_of, mesh)
        counters.clear()
        torch._dynamo.reset()
        _compiled(model)(**batch_of(0)).backward()
    assert counters["inductor"]["fxgraph_cache_hit"] == 2
    assert [phase for phase, *_ in folds.seen] == ["forward", "backward"] * 2
    for _, gm, folded in folds.seen:
        assert _order(gm) == _order(folded)
        for body in folded.children():
            assert not [n for n in body.graph.nodes if is_collective(n) or is_wait(n)]
        nodes, ahead = list(folded.graph.nodes), 0
        calls = [n for n in nodes if n.target is INVOKE]
        for call in calls:
            place = nodes.index(call)
            started = {n for n in nodes[:place] if kind_of(n) == "all_gather"}
            awaited = {n.args[0] for n in nodes[:place] if is_wait(n)}
            ahead += bool(started - awaited)
        assert ahead >= len(calls) - 2 > 0, (ahead, len(calls))


@on_ranks(1)
def test_the_code_does_not_grow_with_blocks(mesh):
    lines = {}
    for fold in (True, False):
        for blocks in (7, 9):
            torch._dynamo.reset()
            model = shard_all(seeded(lambda blocks=blocks: Stack(blocks=blocks)), mesh)
            codes = _codes(lambda step: step(**batch_of(0)), _compiled(model, fold=fold))
            found = [re.findall(r"^ +cpp_fused_\w+\(|extern_kernels\.", c, re.M) for c in codes]
            lines[fold, blocks] = [len(kernels) for kernels in found]
    assert lines[True, 7] == lines[True, 9], lines
    assert all(a < b for a, b in zip(lines[False, 7], lines[False, 9], strict=True))


@on_ranks(1)
def test_what_calls_read_is_computed_by_one_kernel(mesh):
    """The sines of rotary embeddings."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = shard_all(seeded(lambda: LlamaForCausalLM(config)), mesh)
    ids = torch.randint(32, (2, 16))
    with Folds() as folds:
        codes = _codes(lambda step: step(ids, labels=ids).loss, _compiled(model))
    assert folds.calls("backward")
    for code in codes:
        kernels = re.findall(r"cpp_pybinding\(.*?'''\)", code, re.DOTALL)
        assert sum("sin()" in kernel or "std::sin(" in kernel for kernel in kernels) == 1


class Shared(Stack):
    """Every block drops values by Inductor's own generator, and is recomputed in the backward.

    Blocks share tensors: a mask, a sum of all, and a view of the first.
    """

    def forward(self, tokens, targets):
        first = x = self.embed(tokens)
        mask, total = (tokens > 9)[..., None], torch.zeros_like(x)
        for layer in self.layers:
            inner = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            x = torch.where(mask, F.dropout(inner, 0.5), x) + first[:, :1]
            total = total + x.transpose(0, 1).contiguous().transpose(0, 1)
        return F.cross_entropy(self.head(total).flatten(0, 1), targets.flatten())


@on_ranks(2)
def test_folded_is_what_it_was(mesh):
    """Loss and gradients with and without folding, random numbers included."""
    results = []
    for fold in (True, False):
        torch._dynamo.reset()
        model = shard_all(seeded(lambda: Shared(blocks=7)), mesh, reshard_after_forward=True)
        with Folds() as folds:
            step = _compiled(model, fold=fold)
            torch.manual_seed(7)
            loss = step(**batch_of(mesh.get_local_rank()))
            loss.backward()
        assert bool(folds.seen) == fold
        if fold:
            assert folds.calls("forward") and folds.calls("backward")
        results.append([loss.detach(), *(full(p.grad) for p in model.parameters())])
    for folded, flat in zip(*results, strict=True):
        torch.testing.assert_close(folded, flat, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_what_inductor_does_not_take_folded_it_takes_flat(mesh):
    plain, model = (seeded(lambda: Stack(blocks=7)) for _ in range(2))
    shard_all(model, mesh)
    inner, failed = compat.compile_fx_inner, []

    def refuse(gm, *args, **kwargs):
        if _calls(gm):
            failed.append(gm)
            raise compat.inductor_error()(RuntimeError("no calls"), None)
        return inner(gm, *args, **kwargs)

    no_cache = compat.functorch_config().patch(enable_autograd_cache=False)  # nothing is loaded
    with mock.patch.object(compat, "compile_fx_inner", refuse), no_cache:
        check_parity(plain, model, _compiled(model, fallback=False), batch_of, mesh, steps=1)
    assert len(failed) == 2
