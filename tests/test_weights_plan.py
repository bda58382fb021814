"""Plans of weights without ranks: bitwise, each byte once, within the memory of a round."""

import pytest
import torch
from weight_cases import expected, least, planned, random_case, run_alone

from shardc.weights import rank_plan


@pytest.mark.parametrize("seed", range(0, 460, 20))
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
