"""Hooks on the steps of all optimizers: their order and arguments, and compiled steps."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardc.runtime.checks.optimizer_hooks import Steps, Turn


@pytest.fixture
def steps():
    """A side of a step, what torch would call on it, and a list for calls."""
    registered = []
    made = Steps(registered.append)
    return made, registered, []


def noting(calls, name, result=None):
    def call(optimizer, args, kwargs):
        calls.append((name, optimizer, args, kwargs))
        return result

    return call


def test_turns_decide_the_order_and_torch_has_one_hook(steps):
    side, registered, calls = steps
    assert registered == []
    for turn in (Turn.ON_HOST, Turn.REPLACED, Turn.UNREDUCED, Turn.REPLACED):
        side.call(turn, noting(calls, turn))
    (hook,) = registered
    hook("optimizer", (), {})
    assert [name for name, *_ in calls] == [Turn.REPLACED, Turn.UNREDUCED, Turn.ON_HOST]


def test_a_part_may_change_the_arguments(steps):
    side, registered, calls = steps
    side.call(Turn.UNREDUCED, noting(calls, "first", ((1,), {"closure": 2})))
    side.call(Turn.ON_HOST, noting(calls, "second"))
    assert registered[0]("optimizer", (0,), {}) == ((1,), {"closure": 2})
    assert [given for _, _, *given in calls] == [[(0,), {}], [(1,), {"closure": 2}]]


def test_once_is_until_an_optimizer_is_not_refused(steps):
    side, registered, calls = steps
    one, other = (torch.optim.SGD([torch.zeros(1)]) for _ in range(2))
    refused = [one]

    def call(optimizer, args, kwargs):
        calls.append(optimizer)
        if optimizer in refused:
            raise RuntimeError("refused")

    side.call(Turn.REPLACED, call, once=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            registered[0](one, (), {})
        registered[0](other, (), {})
    assert calls == [one, other, one]
    refused.clear()
    registered[0](one, (), {})
    registered[0](one, (), {})
    assert calls == [one, other, one, one]
    side.call_again(Turn.REPLACED)
    registered[0](other, (), {})
    assert calls == [one, other, one, one, other]


def test_a_compiled_step_leaves_parts_out():
    calls, handles, param = [], [], torch.nn.Parameter(torch.ones(1))
    side = Steps(lambda hook: handles.append(register_optimizer_step_pre_hook(hook)))
    side.call(Turn.LATE, lambda *_: calls.append("uncompiled"))
    side.call(Turn.UNREDUCED, lambda *_: calls.append("both"), compiled=True)
    optimizer = torch.optim.SGD([param], lr=0.5)
    param.grad = torch.ones(1)
    try:
        optimizer.step()
        assert calls == ["uncompiled", "both"]
        torch.compile(optimizer.step, backend="eager")()
        assert calls == ["uncompiled", "both", "both"] and param.item() == 0
    finally:
        handles[0].remove()
