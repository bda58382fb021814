"""The cost model: formulas by hand, and one formula for a number and for a symbol."""

import functools
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardc.passes.estimate.cost import (
    PEER,
    READ_BY_HOST,
    WORLD,
    among_copies,
    bucket_grain,
    collective_seconds,
    evaluate,
    exchange_seconds,
    node_bytes,
    node_flops,
    node_seconds,
    rows_bytes,
    rows_seconds,
    stays_in_registers,
    symbol_hints,
    transfer_seconds,
)
from shardc.passes.estimate.hardware import PROFILES, Link, Profile, current_profile, set_profile

aten = torch.ops.aten
FLAT = Profile(
    "flat", "made up", (("float32", 100.0),), 10.0, 1e9, 8, Link(1.0, 50.0), Link(4.0, 20.0),
    overhead=0.5, message=2.0, matmul_efficiency=1.0, memory_efficiency=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "world, seconds",
    [(1, 0), (2, 2 + 1 + 400 / 50), (8, 2 + 7 + 700 / 50), (16, 2 + 14 + 2 * 4 + 750 / 20)],
)
def test_collective(world, seconds):
    assert collective_seconds(800, world, FLAT) == pytest.approx(seconds)
    both = collective_seconds(800, world, FLAT, rounds=2)
    assert both == pytest.approx(2 * seconds - (FLAT.message if world > 1 else 0))
    table = collective_seconds(800, WORLD, FLAT)
    assert float(table.subs(WORLD, world)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "world, seconds",
    [
        (1, 0),
        (2, 2 + PEER + 1 + 400 / 50),
        (8, 2 + 7 * PEER + 1 + 700 / 50),
        # 8 of 16 ranks are beyond the network, of which a rank has an eighth
        (16, 2 + 15 * PEER + 4 + 400 / (20 / 8)),
    ],
)
def test_exchange(world, seconds):
    assert exchange_seconds(800, world, FLAT) == pytest.approx(seconds)
    table = exchange_seconds(800, WORLD, FLAT)
    assert float(table.subs(WORLD, world)) == pytest.approx(seconds)


@pytest.mark.parametrize("shards, node_size, bandwidth", [(16, 1, 2.5), (8, 1, 2.5), (2, 4, 10.0)])
def test_copies_share_the_network_of_a_node(shards, node_size, bandwidth):
    profile = among_copies(FLAT, shards)
    assert (profile.node_size, profile.across.bandwidth) == (node_size, bandwidth)


def test_rows_take_as_long_as_what_is_sent_for_them():
    """A row for every number that is looked up, and this rank's part of the table."""
    fetched = rows_bytes(100, 1000, 64, 8, torch.bfloat16, back=False)
    assert fetched == (100 + 125) * 64 * 2 + 1000
    returned = rows_bytes(5000, 1000, 64, 8, torch.float32, back=True)
    assert returned == (1000 + 125) * 64 * 4  # no row twice
    three = rows_seconds(0, 8, FLAT, back=False) - READ_BY_HOST
    assert three == pytest.approx(3 * exchange_seconds(0, 8, FLAT))
    assert rows_seconds(0, 8, FLAT, back=True) == pytest.approx(2 * three / 3)


def test_an_all_reduce_goes_around_twice():
    graph = Graph()
    x = graph.placeholder("x")
    sent = {}
    for name, given in (("all_reduce", ("sum",)), ("reduce_scatter_tensor", ("sum", 2))):
        op = getattr(torch.ops._c10d_functional, name).default
        node = sent[name] = graph.call_function(op, (x, *given, "0"))
        x.meta["val"] = node.meta["val"] = torch.empty(200, device="meta")
    once, twice = 1 + 400 / 50, 2 * (1 + 400 / 50)
    assert transfer_seconds(sent["reduce_scatter_tensor"], 2, FLAT) == 2 + once
    assert transfer_seconds(sent["all_reduce"], 2, FLAT) == 2 + twice


def _calls(fn, *args):
    gm = make_fx(fn, tracing_mode="fake")(*args)
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def _node(fn, *shapes, target, dynamic=False):
    mode = "symbolic" if dynamic else "fake"
    gm = make_fx(fn, tracing_mode=mode)(*(torch.empty(shape) for shape in shapes))
    return gm, next(n for n in gm.graph.nodes if n.target is target)


def test_matmul_is_a_roofline():
    _, node = _node(torch.mm, (6, 4), (4, 10), target=torch.ops.aten.mm.default)
    assert node_flops(node) == 2 * 6 * 4 * 10 and node_bytes(node) == 4 * (24 + 40 + 60)
    assert node_seconds(node, FLAT) == pytest.approx(max(480 / 100, 496 / 10) + 0.5)


def test_elementwise_moves_what_it_reads_and_writes_and_views_are_free():
    _, node = _node(torch.add, (5, 5), (5, 5), target=torch.ops.aten.add.Tensor)
    assert node_flops(node) == 0 and node_bytes(node) == 300
    _, view = _node(lambda x: x.view(-1) + 1, (5, 5), target=torch.ops.aten.view.default)
    assert node_seconds(view, FLAT) == 0


def test_a_fused_chain_moves_its_ends_only():
    """sum(cos(x[0]) * y) reads a row of x and y once; cos and mul stay in registers."""
    gm, total = _node(
        lambda x, y: (x[0].cos() * y).sum(0), (3, 50, 10), (50, 10), target=aten.sum.dim_IntList
    )
    assert node_bytes(total, fused=True) == 4 * (10 + 500 + 500)
    assert node_bytes(total) == 4 * (10 + 500)
    inner = [n for n in gm.graph.nodes if n.target in (aten.cos.default, aten.mul.Tensor)]
    assert len(inner) == 2 and all(stays_in_registers(node) for node in inner)
    assert all(node_seconds(node, FLAT, fused=True) < 1e-9 for node in inner)
    assert all(node_seconds(node, FLAT) > 0 for node in inner)


def test_arithmetic_counts_in_registers_too():
    slow = replace(FLAT, transcendental=10.0)
    _, node = _node(lambda x: x.tanh() * 2, (5, 5), target=aten.tanh.default)
    assert node_seconds(node, slow, fused=True) == 25 / 10
    assert node_seconds(node, slow) == pytest.approx(25 / 10 + 200 / 10 + 0.5)


def test_a_matmul_needs_its_operands_stored():
    _, node = _node(lambda x, y: x.cos() @ y, (6, 4), (4, 10), target=aten.cos.default)
    assert not stays_in_registers(node)
    assert node_bytes(node, fused=True) == node_bytes(node) == 2 * 4 * 24


def test_an_embedding_reads_rows_only():
    table, rows = torch.empty(1000, 8), torch.zeros(3, dtype=torch.long)
    (node,) = _calls(aten.embedding, table, rows)
    assert node_bytes(node, fused=True) == 2 * 3 * 8 * 4


def test_one_formula_serves_a_symbol_and_its_hint():
    gm, node = _node(torch.mm, (6, 4), (4, 10), target=torch.ops.aten.mm.default, dynamic=True)
    flops = node_flops(node)
    assert isinstance(flops, sympy.Expr) and flops.free_symbols
    hints = symbol_hints(gm)
    assert evaluate(flops, hints) == 480
    assert evaluate(node_seconds(node, FLAT), hints) == pytest.approx(496 / 10 + 0.5)
    doubled = {symbol: 2 * value for symbol, value in hints.items()}
    assert evaluate(flops, doubled) == 8 * 480


def test_attention_of_every_device_has_a_formula():
    q = torch.empty(1, 2, 8, 16)
    assert sum(map(node_flops, _calls(F.scaled_dot_product_attention, q, q, q))) >= 8 * 8 * 8 * 16


def test_attention_that_skips_nothing_takes_twice_as_long():
    q = torch.empty(1, 2, 64, 16)

    def seconds(is_causal):
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=is_causal)
        profile = replace(FLAT, overhead=0.0, memory_bandwidth=1e30)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sum(node_seconds(node, profile) for node in _calls(attend, q, q, q))

    assert seconds(False) == 2 * seconds(True) > 0


def test_shared_keys_count_for_every_head_that_reads_them():
    q, few = torch.empty(1, 4, 8, 16, requires_grad=True), torch.empty(1, 2, 8, 16)

    def both(keys, **kwargs):
        def step(q, k):
            out = F.scaled_dot_product_attention(q, k, k, **kwargs)
            return torch.autograd.grad(out.sum(), q)

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return [node_flops(n) for n in _calls(step, q, keys) if "attention" in str(n.target)]

    forward, backward = both(few, enable_gqa=True)
    assert [forward, backward] == both(few.repeat_interleave(2, 1))
    assert forward == 4 * 4 * 8 * 8 * 16 < backward


def test_rows_of_experts_count_once():
    bf16 = torch.bfloat16
    rows, matrices = torch.empty(32, 16, dtype=bf16), torch.empty(4, 16, 24, dtype=bf16)
    offsets = torch.arange(8, 40, 8, dtype=torch.int32)
    assert sum(map(node_flops, _calls(aten._grouped_mm, rows, matrices, offsets))) == 64 * 16 * 24


def test_grain_grows_with_the_latency():
    assert bucket_grain(1, FLAT) == 0
    grains = [bucket_grain(world, PROFILES["h100-nvlink"]) for world in (2, 8, 64, 1024)]
    assert grains == sorted(grains) and 1e6 < grains[1] < 1e8


def test_float32_runs_as_tf32_only_where_the_program_allows_it():
    boards, before = PROFILES.values(), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")  # the default
        full = {board.name: board.rate("float32") for board in boards}
        torch.set_float32_matmul_precision("high")
        reduced = {board.name: board.rate("float32") for board in boards}
    finally:
        torch.set_float32_matmul_precision(before)
    assert (full["h100-nvlink"], reduced["h100-nvlink"]) == (67e12, 494e12)
    assert all(5 * full[name] < reduced[name] for name in full if name != "cpu")
    assert full["cpu"] == reduced["cpu"]


def test_every_profile_has_a_source_and_plausible_figures():
    for name, profile in PROFILES.items():
        assert profile.name == name and len(profile.source) > 20
        assert 1e10 < profile.peak(torch.float32) <= profile.peak(torch.bfloat16) < 1e16 or (
            name == "cpu"
        )
        assert profile.peak(torch.int64) == profile.peak(torch.float32)
    set_profile("a100-ib")
    assert current_profile("cpu").name == "a100-ib"
    set_profile(None)
    assert current_profile("cpu").name == "cpu"
    with pytest.raises(ValueError, match=r"unknown profile 'z'.*h100-nvlink"):
        set_profile("z")


def test_nodes_without_a_value_cost_nothing():
    graph = Graph()
    node = graph.call_function(torch.ops.aten.cos.default, (graph.placeholder("x"),))
    assert node_seconds(node, FLAT) == 0
