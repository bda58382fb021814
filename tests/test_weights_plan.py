"""Plans of weights without ranks: bitwise, each byte once, within the memory of a round."""

import time

import pytest
import torch
from weight_cases import deepseek_case, expected, least, planned, random_case, run_alone

from shardc.weights import (
    Destination,
    Layout,
    LayoutBuilder,
    Piece,
    plan_rank,
    rank_plan,
    seconds,
)


@pytest.mark.parametrize("seed", range(0, 480, 20))
def test_random_layouts_are_filled_bit_by_bit_and_each_byte_travels_once(seed, monkeypatch):
    for each in range(seed, seed + 20):
        monkeypatch.setattr(rank_plan, "RELAY_BYTES", 64 if each % 3 else 2**18)
        case = random_case(each)
        plans = planned(case)
        most = 2048 if each % 2 else 2**20
        tensors = run_alone(case, plans, most)
        for rank, layout in case.layouts.items():
            for name, want in expected(layout, case.values).items():
                assert torch.equal(tensors[rank][name], want), (each, rank, name)
        sent = sum(sent for plan in plans for sent, _, _ in plan.traffic())
        got = sum(got for plan in plans for _, got, _ in plan.traffic())
        assert sent == got == least(case), each


def test_671_billion_parameters_are_planned_in_seconds():
    """256 trainers, 128 receivers: each rank plans alone; all ranks' traffic is near the mean."""
    sources, layouts = deepseek_case(256, 128)
    assert 670e9 < sum(torch.Size(source.shape).numel() for source in sources.values()) < 672e9
    traffic = []
    for rank in (0, 4, 100, 255, 256, 383):
        begun = time.process_time()
        traffic.append(plan_rank(rank, sources, layouts).traffic())
        assert time.process_time() - begun < 5.0
    assert seconds(traffic, "h100-ib") < 1.3


def test_what_does_not_fit_is_refused_in_words():
    sources = {"w": rank_plan.Source("w", (4, 6), torch.float32, ())}
    for piece, dtype, match in (
        (("x", (0, 0), (4, 6), (0, 0)), torch.float32, "no trainer has"),
        (("w", (0, 0), (5, 6), (0, 0)), torch.float32, "must lie in the source"),
        (("w", (0, 0), (4, 6), (1, 0)), torch.float32, "must lie in the source"),
        (("w", (0, 0), (4, 6), (0, 0)), torch.int32, "only dtypes of one kind"),
    ):
        layout = Layout({"d": Destination((4, 6), dtype, (Piece(*piece),))})
        with pytest.raises(ValueError, match=match):
            plan_rank(1, sources, {1: layout})
    builder = LayoutBuilder({"w": ((4, 6), torch.float32)}, tp=4)
    with pytest.raises(ValueError, match="6 of dim 1 of 'w' do not divide by 4"):
        builder.row("w")
    with pytest.raises(ValueError, match="takes 'v', which the trainers do not have"):
        builder.column("v")
