"""The planner: every element has one place, starts and segments are aligned, padding is bounded."""

import cProfile
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.runtime.layout.layout import (
    MAX_ROW_PADDING,
    BucketLayout,
    Param,
    interval,
    plan_bucket,
    plan_buckets,
)

settings.register_profile("shardc", deadline=None)  # rank processes may keep all cores busy
settings.load_profile("shardc")

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int64, torch.int8, torch.bool,
]  # fmt: skip
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
params_of_one_dtype = st.tuples(
    st.lists(shapes, min_size=1, max_size=8), st.sampled_from(DTYPES)
).map(lambda drawn: [Param(f"p{i}", shape, drawn[1]) for i, shape in enumerate(drawn[0])])
worlds = st.integers(1, 40)


def held_part(layout: BucketLayout, index: int, rank: int) -> tuple[int, int]:
    """The interval of a flattened parameter that a rank holds."""
    slot = layout.slots[index]
    return interval(slot.start, slot.numel, layout.segment, rank)


def cut_rows(layout: BucketLayout) -> list[str]:
    """Names of the parameters of which some rank holds a part of a row."""
    return [
        slot.name
        for index, slot in enumerate(layout.slots)
        for row in [max(1, math.prod(slot.shape[1:]))]
        if any(
            edge % row
            for rank in range(layout.world_size)
            for edge in held_part(layout, index, rank)
            if edge not in (0, slot.numel)
        )
    ]


@given(params_of_one_dtype, worlds)
def test_every_element_is_in_one_place(params, world):
    layout = plan_bucket(params, world)
    assert [(slot.name, slot.shape) for slot in layout.slots] == [(p.name, p.shape) for p in params]
    owner = [None] * layout.numel
    for slot in layout.slots:
        for element in range(slot.numel):
            assert owner[slot.start + element] is None
            owner[slot.start + element] = (slot.name, element)
    assert layout.used == sum(p.numel for p in params) == layout.numel - owner.count(None)
    assert layout.padding == owner.count(None)
    held = []
    for rank in range(world):
        segment = owner[rank * layout.segment : (rank + 1) * layout.segment]
        expected = []
        for index, slot in enumerate(layout.slots):
            start, stop = held_part(layout, index, rank)
            assert 0 <= start <= stop <= slot.numel
            expected += [(slot.name, element) for element in range(start, stop)]
        assert [place for place in segment if place is not None] == expected
        held += expected
    assert held == [(p.name, element) for p in params for element in range(p.numel)]


@given(params_of_one_dtype, worlds)
def test_segments_reassemble_to_the_parameters(params, world):
    layout = plan_bucket(params, world)
    full = [torch.randint(1, 100, p.shape) for p in params]
    segments = [torch.zeros(layout.segment, dtype=torch.int64) for _ in range(world)]
    for rank, segment in enumerate(segments):
        for index, (slot, value) in enumerate(zip(layout.slots, full, strict=True)):
            start, stop = held_part(layout, index, rank)
            first = slot.start + start - rank * layout.segment
            if stop > start:
                segment[first : first + stop - start] = value.reshape(-1)[start:stop]
    pieces = list(layout.split_sizes())
    gathered = torch.cat(segments).split([size for size, _ in pieces])
    assert [slot for _, slot in pieces if slot is not None] == list(range(len(params)))
    for piece, (_, slot) in zip(gathered, pieces, strict=True):
        if slot is None:
            assert not piece.any()
        else:
            assert torch.equal(piece.view(params[slot].shape), full[slot])


@given(params_of_one_dtype, worlds)
def test_starts_and_segments_are_aligned(params, world):
    dtype = params[0].dtype
    narrowest = min(dtype.itemsize, 2) if dtype.is_floating_point else dtype.itemsize
    layout = plan_bucket(params, world)
    for place in [layout.segment, *(slot.start for slot in layout.slots)]:
        assert place * narrowest % 16 == 0
        assert place * dtype.itemsize % 16 == 0


@given(params_of_one_dtype, worlds)
def test_padding_is_bounded(params, world):
    layout = plan_bucket(params, world)
    assert layout.numel == world * layout.segment == layout.used + layout.padding
    align = 16 // (min(layout.dtype.itemsize, 2) if layout.dtype.is_floating_point else
                   layout.dtype.itemsize)  # fmt: skip
    tight = (align - 1) * len(params) + align * world
    assert layout.padding <= tight + MAX_ROW_PADDING * layout.used


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), max_size=8), worlds)
def test_one_bucket_for_each_dtype_and_requires_grad(described, world):
    params = [Param(f"p{i}", *rest) for i, rest in enumerate(described)]
    layouts = plan_buckets(params, world)
    kinds = [(layout.dtype, layout.requires_grad) for layout in layouts]
    assert kinds == list(dict.fromkeys((p.dtype, p.requires_grad) for p in params))
    for layout in layouts:
        assert [slot.name for slot in layout.slots] == [
            p.name
            for p in params
            if (p.dtype, p.requires_grad) == (layout.dtype, layout.requires_grad)
        ]
    assert layouts == plan_buckets(list(params), world)


def test_exact_plan():
    params = [Param("weight", (5, 3)), Param("bias", (5,)), Param("scale", ()), Param("no", (0, 4))]
    layout = plan_bucket(params, 2)
    assert [slot.start for slot in layout.slots] == [0, 16, 24, 32]
    assert (layout.segment, layout.numel, layout.used, layout.padding) == (16, 32, 21, 11)
    assert layout.padding_fraction == 11 / 32
    pieces = [(15, 0), (1, None), (5, 1), (3, None), (1, 2), (7, None), (0, 3)]
    assert list(layout.split_sizes()) == pieces
    assert [held_part(layout, i, 0) for i in range(4)] == [(0, 15), (0, 0), (0, 0), (0, 0)]
    assert [held_part(layout, i, 1) for i in range(4)] == [(15, 15), (0, 5), (0, 1), (0, 0)]


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(0, 30))
def test_matrices_are_dealt_to_many_buckets_of_like_sizes(sizes, least):
    params = [Param(f"m{i}", (size, 4), torch.float32) for i, size in enumerate(sizes)]
    layouts = plan_buckets(params, 2, grain=16 * least)
    assert [slot.name for each in layouts for slot in each.slots] == [p.name for p in params]
    found = [sum(slot.shape[0] for slot in layout.slots) for layout in layouts]
    cuts = [
        [sum(sizes[start:stop]) for start, stop in itertools.pairwise((0, *inner, len(sizes)))]
        for count in range(len(sizes) if least else 1)
        for inner in itertools.combinations(range(1, len(sizes)), count)
    ]
    allowed = [cut for cut in cuts if min(cut) >= least] or [[sum(sizes)]]
    best = min(allowed, key=lambda cut: (-len(cut), sum(size**2 for size in cut)))
    assert not sizes or len(found) == len(best)
    assert sum(size**2 for size in found) == sum(size**2 for size in best)


def test_a_block_has_buckets_of_one_size():
    shapes = {"norm": (64,), "qkv": (192, 64), "out": (64, 64)}
    shapes |= {"gate": (256, 64), "up": (256, 64), "down": (64, 256)}
    params = [Param(name, shape) for name, shape in shapes.items()]
    layouts = plan_buckets(params, 4, grain=4 * 192 * 64)
    names = [[slot.name for slot in layout.slots] for layout in layouts]
    assert names == [["norm", "qkv", "out"], ["gate"], ["up"], ["down"]]
    apart = [Param(name, shape, apart=name == "norm") for name, shape in shapes.items()]
    layouts = plan_buckets(apart, 4, grain=4 * 192 * 64)
    assert [layout.numel for layout in layouts] == [64] + 4 * [256 * 64]


def test_only_empty_parameters():
    layout = plan_bucket([Param("a", (0,)), Param("b", (3, 0))], 4)
    assert (layout.segment, layout.numel, layout.padding_fraction) == (0, 0, 0.0)
    assert list(layout.split_sizes()) == [(0, 0), (0, 1)]


def test_more_ranks_than_elements():
    layout = plan_bucket([Param("a", (3, 2))], 64)
    assert (layout.segment, layout.numel) == (8, 512)
    assert [held_part(layout, 0, rank) for rank in range(64)] == [(0, 6)] + [(6, 6)] * 63


def test_refuses_world_size_zero():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        plan_buckets([Param("a", (3,))], 0)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 30), st.integers(1, 12))
def test_intervals_of_all_ranks_join(start, numel, segment, more):
    world = -(-(start + numel) // segment) + more
    cuts = [interval(start, numel, segment, rank) for rank in range(world)]
    assert cuts[0][0] == 0 and cuts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    assert all(stop - start <= segment for start, stop in cuts)


# -- real models ----------------------------------------------------------------------------------


def llama_block(dim: int, kv: int, hidden: int, prefix: str = "") -> list[Param]:
    """A Llama 3 block's parameters in registration order."""
    shapes = {
        "q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim), "gate": (hidden, dim),
        "up": (hidden, dim), "down": (dim, hidden), "attn_norm": (dim,), "mlp_norm": (dim,),
    }  # fmt: skip
    return [Param(prefix + name, shape, torch.bfloat16) for name, shape in shapes.items()]


def test_llama_8b_block_at_every_world_size():
    block = llama_block(4096, 1024, 14336)
    layouts = [plan_bucket(block, world) for world in range(1, 1025)]
    worst = max(layouts, key=lambda layout: layout.padding_fraction)
    assert worst.padding_fraction < 0.005, worst.world_size
    assert [layout.world_size for layout in layouts[:37] if cut_rows(layout)] == []
    assert cut_rows(layouts[127]) == ["down"]


def test_llama_405b_plans_in_few_calls():
    params = [Param("embed", (128256, 16384), torch.bfloat16)]
    for index in range(126):
        params += llama_block(16384, 1024, 53248, f"layers.{index}.")
    params += [
        Param("norm", (16384,), torch.bfloat16),
        Param("head", (128256, 16384), torch.bfloat16),
    ]
    calls = cProfile.Profile()
    calls.enable()
    layout = plan_bucket(params, 16384)
    blocks = [plan_bucket(params[1 + 9 * i : 10 + 9 * i], 16384) for i in range(126)]
    calls.disable()
    assert sum(entry.callcount for entry in calls.getstats()) < 200_000  # 107,498; half a second
    assert layout.used == 405_853_388_800 == sum(p.numel for p in params)
    assert layout.padding_fraction < 0.0001
    assert max(block.padding_fraction for block in blocks) < 0.0001


def test_rows_stay_whole_where_that_is_cheap():
    layout = plan_bucket([Param("a", (1201, 7)), Param("b", (1000, 6))], 2)
    assert layout.segment == 7224  # 43 * lcm(7, 6, 8); the tight one is 7208, within a row of `a`
    assert layout.padding == 2 * 7224 - 1201 * 7 - 1000 * 6 == 41
    assert cut_rows(layout) == []


def test_rows_are_cut_where_whole_ones_cost_too_much():
    layout = plan_bucket([Param("a", (3, 1000))], 2)  # whole rows: a third of the bucket unused
    assert (layout.segment, layout.padding) == (1504, 8)
    assert cut_rows(layout) == ["a"]


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([(64, 24), (30, 8), (9, 16), (7,), (40, 4, 4)]), max_size=6), worlds
)
def test_never_cuts_more_rows_than_the_tight_layout(shapes, world):
    params = [Param(f"p{i}", shape) for i, shape in enumerate(shapes)] or [Param("p", (4, 4))]
    layout = plan_bucket(params, world)
    starts, cursor = [], 0
    for p in params:
        starts.append(-(-cursor // 8) * 8)
        cursor = starts[-1] + p.numel
    segment = -(-cursor // (8 * world)) * 8
    cut = 0
    for p, start in zip(params, starts, strict=True):
        row = p.numel // p.shape[0]
        edges = [e for r in range(world) for e in interval(start, p.numel, segment, r)]
        cut += any(e % (row if len(p.shape) > 1 else 1) for e in edges if e not in (0, p.numel))
    assert len(cut_rows(layout)) <= cut
