"""The rehearsal notices what is wrong: waits that are left out, and races written by hand."""

from pathlib import Path

import pytest
from rehearsal import Setup, rehearse
from step_trace import partings, read_trace


@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
def test_collectives_without_waits_race(way: str, tmp_path: Path) -> None:
    found = rehearse(Setup(way=way, faults=frozenset({"collectives"})), tmp_path)
    assert not found.error, found.error
    races = read_trace(found.trace).races
    assert any("all_gather" in race.first for race in races)
    assert any("reduce_scatter" in race.first for race in races)


def test_copies_without_waits_race(tmp_path: Path) -> None:
    setup = Setup(way="uncompiled", features=frozenset({"offload"}), faults=frozenset({"copies"}))
    found = rehearse(setup, tmp_path)
    assert not found.error, found.error
    assert any("copy" in str(race) for race in read_trace(found.trace).races)


WRITE, READ = "op 0x10 add w:100-200", "op 0x20 mul r:180-190"


@pytest.mark.parametrize(
    ("lines", "races"),
    [
        ([WRITE, READ], 1),
        ([WRITE, "op 0x10 mul r:180-190"], 0),  # the same stream
        (["op 0x10 add r:100-200", READ], 0),  # nobody writes
        ([WRITE, "op 0x20 mul r:200-210"], 0),  # other bytes
        ([WRITE, "record 0x10 0x1", "wait 0x20 0x1", READ], 0),
        (["record 0x10 0x1", WRITE, "wait 0x20 0x1", READ], 1),  # recorded too early
        ([WRITE, "record 0x10 0x1", READ, "wait 0x20 0x1"], 1),  # waited too late
        ([WRITE, "record 0x10 0x1", "wait 0x30 0x1", "record 0x30 0x2", "wait 0x20 0x2", READ], 0),
        ([WRITE, "record 0x10 0x1", "seen 0x1", READ], 0),
        ([WRITE, "sync stream 0x10", READ], 0),  # the host waited, then launched
        ([WRITE, "sync stream 0x30", READ], 1),
        ([WRITE, "op host add_ r:100-110"], 1),  # the host reads what may not be there
        ([WRITE, "record 0x10 0x1", "sync event 0x1", "op host add_ r:100-110"], 0),
        (["collective 0x30 all_gather 0x100 16 0x200 128 0x1 8 plain", "op 0x10 add r:220-240"], 1),
        (["copy 0x30 0x200 0x100 16 1", "op 0x10 add w:108-109"], 1),
        (["fill (nil) 0x100 16", "op 0x0 add w:108-109"], 0),  # two names of the default stream
    ],
)
def test_races(lines: list[str], races: int, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(lines))
    assert len(read_trace(path).races) == races


def test_order_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(
        "phase forward\n"
        "collective 0x30 all_gather 0x100 16 0x200 128 0x1 8 registered\nrecord 0x30 0x1\n"
        "triton 0x0 copy\nwait 0x0 0x1\nwait 0x20 0x1\ngemm 0x0 1x2x3\n"
        "phase backward\n"
        "sync stream 0x0\nkernel 0x0 fill\n"
    )
    trace = read_trace(path)
    assert trace.order[1:] == [["forward", ["all_gather", "wait"]], ["backward", []]]
    assert trace.launches == {
        ("forward", "collective"): 1,
        ("forward", "triton"): 1,
        ("forward", "gemm"): 1,
        ("backward", "kernel"): 1,
    }
    assert trace.moved == {("forward", "all_gather"): 128}
    assert trace.registered == {"all_gather": 1}
    assert trace.syncs == ["backward: stream 0x0, line 9"]


GATHER, REDUCE, OTHER = (
    "collective 0x30 all_gather 0x100 16 0x200 128 aa 2 plain",
    "collective 0x30 reduce_scatter 0x100 128 0x200 16 aa 2 plain",
    "collective 0x40 all_gather 0x100 16 0x200 128 bb 2 plain",
)


@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        ([GATHER, REDUCE], [GATHER, REDUCE], 0),
        ([GATHER, REDUCE], [REDUCE, GATHER], 1),
        ([GATHER, REDUCE], [GATHER], 1),  # one more on one rank
        ([GATHER], [GATHER.replace("128 aa", "256 aa")], 1),  # another size
        ([GATHER, OTHER], [GATHER, OTHER], 0),
        ([GATHER, OTHER], [OTHER, GATHER], 1),  # each in order, but not the two
        ([GATHER, OTHER], [GATHER], 1),  # nobody else is there
    ],
)
def test_partings(first: list[str], second: list[str], part: int, tmp_path: Path) -> None:
    traces = []
    for name, lines in (("first", first), ("second", second)):
        (tmp_path / name).write_text("\n".join(lines))
        traces.append(read_trace(tmp_path / name))
    assert len(partings(traces)) == part
