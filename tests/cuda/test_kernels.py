"""How many kernels a step launches, beside the same model unsharded."""

from importlib.metadata import version
from pathlib import Path

from rehearsal import Setup, rehearse
from step_trace import Trace, read_trace

SHAPE = {"blocks": 4, "dim": 1024, "batch": 4, "length": 1024}


def test_only_casts_are_added(tmp_path: Path) -> None:
    """One Triton kernel a gathered bucket (the cast) and one a reduced bucket, no other."""
    plain, ours = (_trace(Setup(who=who, **SHAPE), tmp_path / who) for who in ("plain", "shardc"))
    sent = [name for _, order in ours.order for name in order]
    gathered, reduced = sent.count("all_gather"), sent.count("reduce_scatter")
    assert gathered > reduced > 0
    assert ours.count("gemm") == plain.count("gemm") > 0
    assert ours.count("triton") <= plain.count("triton") + gathered + reduced


def test_quantised_messages(tmp_path: Path) -> None:
    """A gather has two kernels to make a message and one to read it, a reduction three and one.

    Inductor of torch 2.11 makes one more for each gather, of what is sent as it is, and one scalar.
    """
    plain = _trace(Setup(who="plain", **SHAPE), tmp_path / "plain")
    ours = _trace(Setup(wire="int8", **SHAPE), tmp_path / "shardc")
    sent = [name for _, order in ours.order for name in order]
    gathered, reduced = sent.count("all_gather"), sent.count("all_to_all")
    assert gathered > reduced > 0 and sent.count("reduce_scatter") == 1  # of the vectors
    more = gathered + 1 if version("torch").startswith("2.11.") else 0
    assert ours.count("triton") <= plain.count("triton") + 3 * gathered + 4 * reduced + more


def _trace(setup: Setup, folder: Path) -> Trace:
    folder.mkdir()
    found = rehearse(setup, folder)
    assert not found.error, found.error
    return read_trace(found.trace)
