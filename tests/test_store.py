"""Counting ranks in a store with few operations, and looking into it without waiting."""

import itertools

import pytest
import torch.distributed as dist

from shardc.runtime.groups.store import Attendance, look, pauses


@pytest.mark.parametrize("world", [1, 2, 61, 62, 63, 124, 200])
def test_the_last_rank_knows_that_all_have_come(world):
    store = dist.HashStore()
    ranks = [rank * 37 % world for rank in range(world)] if world % 37 else list(range(world))
    come = [Attendance(store, "a text", world).come(rank) for rank in ranks]
    assert [is_last for _, is_last in come] == [False] * (world - 1) + [True]
    assert sum(is_first for is_first, _ in come) == -(-world // 62)  # one a block
    assert Attendance(store, "a text", world).missing() == []


def test_who_has_not_come():
    store, world = dist.HashStore(), 130
    here = range(0, world, 3)
    for rank in here:
        text = "b" if rank == 66 else "a"
        is_first, is_last = Attendance(store, text, world).come(rank)
        assert not is_last
        assert is_first == (rank in (0, 63, 66, 126))
    silent = [rank for rank in range(world) if rank not in here]
    assert Attendance(store, "a", world).missing() == silent
    assert Attendance(store, "b", world).missing() == silent


def test_other_texts_are_counted_apart():
    store, world = dist.HashStore(), 124
    come = [Attendance(store, "ab"[rank // 62], world).come(rank) for rank in range(world)]
    assert not any(is_last for _, is_last in come)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_a_look_does_not_wait_and_sets_nothing(kind, tmp_path):
    store = {
        "hash": lambda: dist.HashStore(),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True),
    }[kind]()
    store = dist.PrefixStore("somewhere", store)
    assert look(store, "key") is None
    assert not store.check(["key"])
    store.set("key", "a value")
    assert look(store, "key") == "a value"


def test_looks_at_the_store_are_bounded_in_a_large_job():
    small, large = (list(itertools.islice(pauses(world), 40)) for world in (2, 16_384))
    assert small[0] < 0.001 and small[-1] == 0.2
    assert 16_384 / large[0] <= 50_000 and 16_384 / large[-1] <= 10_000
    assert small == sorted(small) and large == sorted(large)
