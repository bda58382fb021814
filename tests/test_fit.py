"""The largest size that fits, and the fewest ranks: the search, and both on a model."""

import json

import pytest
import torch
from command_line import ended
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Gated, Stack, tokens

import shardc
from shardc.passes.budget.choose import BudgetTooSmall
from shardc.planning import fit as fitting
from shardc.planning.fit import fewest_ranks, fit, largest

X = torch.empty(1, 64, 32, device="meta")


@given(st.integers(1, 10**6), st.integers(0, 10**9), st.integers(1, 10**9), st.floats(0.5, 1.2))
@settings(max_examples=300, deadline=None)
def test_the_search_finds_the_border_in_few_plans(each, fixed, memory, power):
    def need(size):
        return fixed + int(each * size**power)

    def plan(size):
        if need(size) > memory:
            raise BudgetTooSmall("too small", need(size))
        return size

    found = largest(plan, memory)
    if found.size == 0:
        assert need(1) > memory and found.report is None and found.planned == 1
        return
    assert need(found.size) <= memory and found.report == found.size
    assert found.planned <= 45
    if found.size < fitting.LARGEST:
        above = found.size + max(1, int(fitting.CLOSE * found.size) + 1)
        assert need(above) > memory and found.least > memory


def test_a_need_that_grows_evenly_is_found_in_few_plans():
    def plan(size):
        if (need := 10**6 + 12345 * size) > 10**9:
            raise BudgetTooSmall("too small", need)
        return size

    found = largest(plan, 10**9)
    assert found.size == 80923 and found.planned <= 14


def test_the_largest_batch_fits():
    memory, model, more = 3_000_000, Gated(1), {"world_size": 4, "profile": "cpu"}
    found = fit(model, X, memory=memory, **more)
    assert found.size > 2 and found.report.peak.total <= memory < found.least
    assert found.report.tokens == 64 * found.size
    longer = fit(Stack(1), tokens(0), tokens(1), memory=100_000, dim=1, **more)
    assert longer.size > 1 and longer.report.tokens == 14 * longer.size
    with pytest.raises(ValueError, match="no example input has a dim 3 to grow"):
        fit(model, X, memory=memory, dim=3, **more)


def test_the_fewest_ranks_hold_the_model():
    memory = 400_000
    found = fewest_ranks(Gated(1), X, memory=memory, profile="cpu")
    assert found.size > 1 and found.report.world_size == found.size
    assert found.report.peak.total <= memory < found.least
    with pytest.raises(Exception, match="too small"):
        shardc.explain(Gated(1), X, world_size=found.size // 2, memory_budget=memory, profile="cpu")
    nothing = fewest_ranks(Gated(1), X, memory=1000, profile="cpu")
    assert nothing.size == 0 and nothing.report is None and nothing.least > 1000


def gated():
    """What the command is told to look at."""
    with torch.device("meta"):
        return Gated(1), (X,)


def test_the_command(capsys):
    call = ["fit", f"{__name__}:gated", "--world-size", "4", "--profile", "cpu"]
    code, out, _ = ended(capsys, *call, "--memory", "800KB")
    assert code == 0 and "largest batch on 4 ranks" in out and "fewest ranks" in out, out
    code, out, _ = ended(capsys, *call, "--memory", "1KB", "--json")
    assert code == 1 and json.loads(out)["batch"]["size"] == 0
    code, _, err = ended(capsys, *call, "--memory", "much")
    assert code == 2 and "--memory: must be bytes" in err
