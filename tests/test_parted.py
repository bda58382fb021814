"""Ranks that part: named with their places on all of them, by an error, long before the timeout.

Two of three processes train over a group of their own, which such a test leaves broken.
"""

import os
import re
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Choosing, Stack, compiled, seeded, shard_all, tokens
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardc import StateDictOptions, WholeTensorOptimizer, get_model_state_dict, summon_full_params
from shardc.runtime import compat
from shardc.runtime.groups.backends import end_waits
from shardc.runtime.watch import history, long_waits, program_collectives
from shardc.runtime.watch.entering import naming
from shardc.runtime.watch.entry_board import RING, Board, word_of
from shardc.runtime.watch.history import history_of


def _of_two(mesh, build):
    """A model that the first two ranks train, and the rank; none on the third."""
    rank, group = mesh.get_local_rank(), _group_of_two()
    if rank == 2:
        return None, rank
    return shard_all(seeded(build), DeviceMesh.from_group(group, "cpu")), rank


def _group_of_two():
    """Under a name that none had before it in the store, as all ranks call this."""
    return dist.new_group([0, 1], timeout=timedelta(seconds=900))


def _group_of(model):
    return next(iter(model.parameters()))._shard_spec.group


def _step(call):
    call(tokens(1), tokens(2)).backward()


def _told(act):
    """What is said where `act` fails, without the compiler's words around it."""
    with pytest.raises(Exception, match="ranks have parted") as caught:
        act()
    return str(caught.value)


def _turn(model):
    model.order = (1, 0)


def _skip(model):
    model.order = (0,)


def _sync_no_more(model):
    model.set_requires_gradient_sync(False)


def _widen(model):
    model.to(torch.float64)


_IN_A_GRAPH = "rank 1 entered the comparison of the buckets that a graph reads"
_IN_AN_ORDER = "rank 1 entered the comparison of the order in which an uncompiled forward gathers"
WAYS = [
    (_turn, None, "rank 0 entered the all-gather of layers.1 in the forward",
     rf"{_IN_AN_ORDER} \(gather 1: bucket 1 \(layers.1\)"),
    (_turn, "eager", "rank 0 entered the all-gather of Choosing in the forward", _IN_A_GRAPH),
    (_skip, None, "rank 0 entered the all-gather of layers.1 in the backward",
     "rank 1 entered the comparison of the order in which an uncompiled backward gathers"),
    (_sync_no_more, None, "rank 0 entered the reduce-scatter of layers.1 in the backward",
     "rank 1 entered the all-gather of Choosing in the forward"),
    (_widen, None, r"rank 0 entered the all-gather of Choosing in the forward \(float32\)",
     r"rank 1 entered the all-gather of Choosing in the forward \(float64\)"),
    (_sync_no_more, "eager", "rank 0 entered the ", "rank 1 entered the comparison of "),
]  # fmt: skip


@pytest.mark.parametrize("way", range(len(WAYS)))
@on_ranks(3)
def test_a_rank_that_goes_another_way(mesh, way):
    part, executor, first, second = WAYS[way]
    model, rank = _of_two(mesh, Choosing)
    if model is None:
        return
    call = compiled(model, executor) if executor else model
    for _ in range(2):
        _step(call)
    if rank == 1:
        part(model)
    text = _told(lambda: [_step(call) for _ in range(2)])
    assert re.search(first, text) and re.search(second, text), text
    assert f"rank {rank} of 3" in text, text


def _gather_one(model):
    model.head.weight.full_tensor()


def _clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _take_state(model):
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def _summon(model):
    with summon_full_params(model):
        pass


def _mean(model):
    model.head.weight.mean()


def _multiply(model):
    with torch.no_grad():
        model.head.weight.t() @ model.head.weight


def _update(model):
    WholeTensorOptimizer(torch.optim.Adafactor, model.parameters()).step()


CALLS = [
    (_update, "an all-reduce of .* for step at test_parted.py:"),
    (_mean, "an all-reduce of 1 float64 for mean at test_parted.py:"),
    (_multiply, "an all-gather of .* for t at test_parted.py:"),
    (_gather_one, "an all-gather of .* for full_tensor at test_parted.py:"),
    (_clip, "an all-reduce of .* for clip_grad_norm_ at test_parted.py:"),
    (_take_state, "for get_model_state_dict at test_parted.py:"),
    (_summon, "for summon_full_params at test_parted.py:"),
]


@pytest.mark.parametrize(
    ("call", "in_memory"), [*((call, True) for call in range(len(CALLS))), (4, False)]
)
@on_ranks(3)
def test_a_call_that_one_rank_makes(mesh, call, in_memory):
    """Ranks compare in memory that they share, or through the store."""
    act, said = CALLS[call]
    model, rank = _of_two(mesh, Stack)
    if model is None:
        return
    if not in_memory:
        history_of(_group_of(model))._board = None
    _step(model)
    text = _told(lambda: act(model) if rank == 1 else _step(model))
    assert "rank 0 entered the all-gather of Stack in the forward" in text, text
    assert re.search(rf"rank 1 entered [^;]*{said}", text), text


def _until(tells):
    """What `tells` gives once it does."""
    for _ in range(1200):
        if found := tells():
            return found
        time.sleep(0.1)
    raise AssertionError("it does not come")


def _barrier(group, other):
    dist.barrier(group)


def _reduce(group, other):
    dist.all_reduce(torch.ones(2), group=group)


def _barrier_of_another_group(group, other):
    dist.barrier(other)


@pytest.mark.parametrize(
    ("own", "executor"),
    [(_barrier, None), (_reduce, "eager"), (_barrier_of_another_group, None)],
)
@on_ranks(3)
def test_a_collective_of_the_programs_own_on_one_rank(mesh, own, executor):
    other, (model, rank) = _group_of_two(), _of_two(mesh, Stack)
    if model is None:
        return
    call = compiled(model, executor) if executor else model
    _step(call)
    group = _group_of(model)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Cc]onnection|closure"):
            own(compat.resolve_group(group), other)
        text = _until(lambda: history_of(group).parted)
    else:
        text = _told(lambda: _step(call))
    assert "rank 1 entered the all-gather of " in text, text
    assert re.search(
        "rank 0 entered (barrier|all_reduce) at test_parted.py:[0-9]+, a collective of the "
        "program's own", text,
    ), text  # fmt: skip


def _shows(rank, count, own="", **records):
    entries = [history.Entry(place, place, f"gather {place}") for place in range(1, count + 1)]
    return program_collectives.Shown(rank, entries, own, own, records)


def _parted(monkeypatch, mine, theirs, waits_for_last=False, ranks=(0, 1)):
    known = {group: list(ranks) for group in "gh"}
    monkeypatch.setattr(compat, "recorded_collectives", lambda: mine.records)
    monkeypatch.setattr(compat, "ranks_of", known.get)
    monkeypatch.setattr(dist, "get_rank", lambda: mine.rank)
    here = object.__new__(history.History)
    here.rank, here.entries = mine.rank, mine.entries
    return program_collectives.parted_from(here, "g", theirs, waits_for_last)


@pytest.mark.parametrize("waits_for_last", [False, True])
def test_what_two_ranks_can_tell_of_each_other(monkeypatch, waits_for_last):
    def of(number, name, is_done=True):
        return compat.Recorded(number, name, is_done)

    def parted(mine, theirs, **kwargs):
        return _parted(monkeypatch, mine, theirs, waits_for_last, **kwargs)

    gather, barrier = of(7, "gloo:all_gather", False), of(4, "gloo:barrier", False)
    mine = _shows(1, 3, g=[of(6, "gloo:all_gather"), gather], h=[of(3, "gloo:barrier")])
    before = [of(6, "gloo:all_gather")]
    theirs = _shows(0, 2, "barrier at a.py:1", g=before, h=[barrier])
    said = (
        "rank 0 entered barrier at a.py:1, a collective of the program's own; rank 1 entered gath"
    )
    assert said in parted(mine, theirs)
    same = _shows(0, 2, "barrier at a.py:1", g=[*before, of(7, "gloo:barrier", False)])
    assert said in parted(mine, same)  # another one of the same group, at the same number
    assert parted(mine, theirs, ranks=(0, 2)) is None  # of ranks without this one
    for records in (
        {"g": before, "h": [of(4, "gloo:broadcast", False)]},  # may be left before all came
        {"g": before, "h": [of(4, "gloo:barrier")]},  # is left already
        {"g": before, "h": [of(3, "gloo:barrier", False)]},  # this rank has entered it too
        {},  # torch kept no record
    ):
        assert parted(mine, _shows(0, 2, "barrier at a.py:1", **records)) is None
    assert parted(mine, _shows(0, 2)) is None  # reads data, writes a file
    assert parted(mine, _shows(0, 3, "barrier at a.py:1", g=before, h=[barrier])) is None
    came = _shows(0, 2, "barrier at a.py:1", g=[*before, gather], h=[barrier])
    assert (parted(mine, came) is None) is not waits_for_last  # a third rank did not come


class Group:
    """Of two ranks, without a backend."""

    group_name = "a name"

    def rank(self):
        return 0

    def size(self):
        return 2


def test_a_group_of_the_same_name_begins_anew(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(compat, "has_others", lambda group: True)
    monkeypatch.setattr(history, "board_of", lambda group: None)
    monkeypatch.setattr(history, "_histories", {})
    groups = [Group()]
    monkeypatch.setattr(compat, "resolve_group", lambda name: groups[-1])
    first = history_of("a name")
    first.enter(1, "a gather")
    assert history_of("a name") is first and first.count == 1
    groups[:] = [Group()]
    assert history_of("another of its names") is history_of("a name") is not first
    assert history_of("a name").count == 0 and history_of("a name").is_of(groups[0])
    assert len(history.histories()) == 1


def test_a_store_that_is_gone_is_asked_once(monkeypatch):
    asked = []

    def gone(group):
        asked.append(group)
        raise RuntimeError("Broken pipe")

    members = mock.Mock(rank=lambda: 0, size=lambda: 2)
    still = mock.Mock(count=3, is_over=False)
    monkeypatch.setattr(long_waits, "_STILL", 0.0)
    monkeypatch.setattr(long_waits, "_PACE", 0.0)
    monkeypatch.setattr(long_waits, "_watched", {"g": still})
    monkeypatch.setattr(compat, "resolve_group", lambda name: members)
    monkeypatch.setattr(compat, "group_store", gone)
    looks = {}
    for _ in range(3):
        long_waits._look_at_groups(looks, None, 0.0)
    assert asked == [members] and not looks and not long_waits._watched


@on_ranks(3)
def test_a_rank_that_is_busy_is_waited_for(mesh):
    model, rank = _of_two(mesh, Stack)
    if model is None:
        return
    _step(model)
    group = compat.resolve_group(_group_of(model))
    if rank == 0:
        _until(lambda: compat.group_store(group).check(["shardc/shown/0"]))
        shown = program_collectives.from_json(compat.group_store(group).get("shardc/shown/0"))
        assert shown.at.startswith("at test_parted.py:") and not shown.own
    _step(model)
    assert history_of(_group_of(model)).parted is None


@on_ranks(3)
def test_an_exception_of_another_rank_is_told(mesh):
    model, rank = _of_two(mesh, Stack)
    if model is None:
        return
    _step(model)
    if rank == 1:
        model.layers[0].register_forward_pre_hook(lambda *_: {}["my bug"])
        with pytest.raises(KeyError):
            _step(model)
        end_waits(compat.resolve_group(_group_of(model)))  # as its end would
    else:
        with pytest.raises(RuntimeError, match="Rank 1 left with KeyError: 'my bug'"):
            _step(model)


@on_ranks(2)
def test_a_step_asks_no_store(mesh):
    model = shard_all(seeded(Stack), mesh)
    calls = [model, compiled(model, "eager")]
    for call in calls:
        _step(call)
        _clip(model)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        store_of = compat.group_store

        def asks(group):
            if threading.current_thread() is threading.main_thread():
                asked.append(group)
            return store_of(group)

        patch.setattr(compat, "group_store", asks)
        before = history_of(mesh.get_group().group_name).count
        for call in calls:
            _step(call)
            _clip(model)
    entered = history_of(mesh.get_group().group_name).count - before
    assert not asked and entered == 2 * (3 + 2 + 3 + 1)  # gathers, again, reductions, norms


@on_ranks(1)
def test_a_failure_without_peers_is_the_backends_own(mesh):
    raised = pytest.raises(dist.DistBackendError, match=r"^out of order$")
    with raised, naming(mesh.get_group().group_name):
        raise dist.DistBackendError("out of order")


def test_a_board_finds_who_comes_second(tmp_path):
    path = str(tmp_path / "board")
    first, second = Board(path, 0, 3), Board(path, 2, 3)
    assert not first.post(1, word_of(1, 7), b"a") and not second.post(1, word_of(1, 7), b"a")
    for place in range(2, RING + 2):  # rank 0 is ahead by as much as a ring holds
        assert not first.post(place, word_of(place, place), b"b" * 300)
    assert not second.post(2, word_of(2, 2), b"b")
    assert second.post(3, word_of(3, 4), b"c")
    assert second.at(3) == {0: (word_of(3, 3), "b" * 247), 2: (word_of(3, 4), "c")}
    assert not second.left()
    first.leave(5, "tired")
    assert second.left() == {0: (5, "tired")}
    assert os.path.exists(path)
    Board(path, 1, 3)
    assert not os.path.exists(path)  # all have it open


def test_parting_in_words():
    text = history.say_parted(4, {2: "b", 0: "a", 1: "a"})
    assert text.startswith(
        "ranks have parted after 3 collectives in common: ranks 0, 1 entered a; rank 2 entered b. "
    )


def test_what_is_entered_has_the_same_digest_in_every_process():
    assert history.digest_of("all_gather", ("layers.0",), "forward") == 4179962614
