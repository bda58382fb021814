"""What tests of `compile_step` compare and count: runs of a step, and the messages of a call.

A run has a `model`, its `optimizer`, the `losses` so far, and `train(numbers)`, which runs a step
for each number.
"""

import torch

from shardc.runtime.watch.progress import progress


def check_equal(one, other):
    """Losses (which change), parameters and states of two runs have the same bits."""
    assert one.losses == other.losses
    assert len(set(one.losses)) > len(one.losses) / 2
    for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(p._local, q._local)
        mine, others = one.optimizer.state[p], other.optimizer.state[q]
        assert mine.keys() == others.keys()
        for name in mine:
            assert torch.equal(_plain(mine[name]), _plain(others[name])), name


def _plain(value):
    return getattr(value, "_local", value)


def heard(run, number=99):
    """The labels of the messages of one call, in order."""
    progress.heard = labels = []
    try:
        run.train([number])
    finally:
        progress.heard = None
    return labels
