"""A rank that differs: every rank says in what, naming the unit."""

import copy
import os
import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from models import (
    Choosing,
    Stack,
    batch_of,
    check_gradients,
    check_parity,
    compiled,
    seeded,
    shard_all,
    tokens,
)
from ranks import FORKS, free_port, on_ranks
from torch.distributed.device_mesh import DeviceMesh

from shardc import fully_shard
from shardc.backend.agreements import Agreements
from shardc.backend.graph_plan import graph_plans
from shardc.runtime import compat
from shardc.runtime.groups.communicators import kept_with
from shardc.runtime.watch import agreement
from shardc.runtime.watch.agreement import Statement, agree


def _refusal(step):
    with pytest.raises(Exception, match="ranks disagree on") as caught:
        step(tokens(1), tokens(2)).backward()
    return str(caught.value)


@on_ranks(3)
def test_a_bucket_of_another_shape(mesh):
    model = seeded(Stack)
    if mesh.get_local_rank() == 1:
        model.layers[1].down = torch.nn.Linear(37, 20, bias=False)
    with pytest.raises(RuntimeError, match="ranks disagree on the parameters given to") as caught:
        shard_all(model, mesh)
    text = str(caught.value)
    assert "entry 2: rank 0 has «layers.1: torch.float32 bucket of 1440" in text, text
    assert "rank 1 has «layers.1: torch.float32 bucket of 1512, " in text, text
    shapes = "down.weight[18x37] against down.weight[20x37]"
    assert text.endswith(f"They differ in 1440 against 1512; {shapes}"), text


@on_ranks(3)
def test_another_bucket_in_a_graph(mesh):
    model = shard_all(seeded(Choosing), mesh)
    if mesh.get_local_rank() == 1:
        model.order = (1, 0)
    text = _refusal(compiled(model))
    first = r"the buckets that a graph reads, entry 1: rank 0 has «bucket \d+ \(layers.0\) of "
    assert re.search(first, text), text
    assert re.search(r"rank 1 has «bucket \d+ \(layers.1\) of ", text), text


@pytest.mark.parametrize("schedule", [True, False])  # which compares before it plans
@on_ranks(3)
def test_another_collective_in_a_graph(mesh, schedule):
    model = shard_all(seeded(Stack), mesh, reshard_after_forward=False)
    if mesh.get_local_rank() == 2:
        model.layers[1].set_reshard_after_forward(True, recurse=False)
    options = {"executor": "eager", "schedule": schedule}
    text = _refusal(torch.compile(model, backend="shardc", options=options))
    assert ("before they are scheduled" in text) == schedule, text
    assert "rank 0 has «layers.1: reduce_scatter_tensor of " in text, text
    assert "rank 2 has «layers.1: all_gather_into_tensor of 1440 float32 over 3 ranks (" in text, (
        text
    )


@on_ranks(2)
def test_a_rank_that_made_another_model_before(mesh):
    if mesh.get_local_rank() == 1:
        alone = dist.new_group([1], use_local_synchronization=True)
        shard_all(seeded(Stack), DeviceMesh.from_group(alone, "cpu"))
    plain, sharded = seeded(Stack), shard_all(seeded(Stack), mesh)
    first, second = sharded.layers
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    check_parity(plain, sharded, compiled(sharded), batch_of, mesh)


def _compile_blocks(model):
    for block in model:
        block.compile(backend="shardc", options={"executor": "eager"})
    return model


def _copied(model):
    model = copy.deepcopy(model)
    model.zero_grad()
    return _compile_blocks(model)


def _kept(model):
    model.zero_grad()
    return model


@pytest.mark.parametrize(
    ("then", "place"),
    [(_copied, 0), (_kept, 1)],  # of the block where rank 1 has more rows than before
)
@on_ranks(2)
def test_a_rank_may_compile_alone_what_equal_buckets_run(mesh, then, place):
    plain = seeded(lambda: torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(2))))
    model = _compile_blocks(shard_all(copy.deepcopy(plain), mesh))
    for block in model:
        block(torch.ones(4, 6)).sum().backward()
    model = then(model)
    graph_plans.clear()
    inputs = [torch.ones(4, 6), torch.ones(4, 6)]
    inputs[place] = torch.ones(4 + mesh.get_rank(), 6)
    for block, of_plain, x in zip(model, plain, inputs, strict=True):
        block(x).square().sum().backward()
        of_plain(x).square().sum().backward()
    counts = [None, None]
    dist.all_gather_object(counts, len(graph_plans))
    assert counts[1] > counts[0], counts  # rank 1 compiled where rank 0 did not
    check_gradients(plain, model, mesh)


class Either(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, left):
        return (self.left if left else self.right)(x)


class Always(Either):
    def forward(self, x):
        return self.left(x)


@on_ranks(2)
def test_what_one_block_reads_says_nothing_of_another_class_of_blocks(mesh):
    blocks = [Either(), Always()]
    for block in blocks:
        fully_shard(block, mesh=mesh)
        block.compile(backend="shardc", options={"executor": "eager"})
    first, second = blocks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters that only some ranks use
        first(torch.ones(2, 4), mesh.get_rank() == 0).sum().backward()
    assert first.right.weight.grad is not None
    second(torch.ones(2, 4)).sum().backward()
    assert second.right.weight.grad is None  # zeros would let AdamW decay it


@on_ranks(2)
def test_sizes_are_dynamic_on_some_ranks_only(mesh):
    """A batch as large as the width of a layer is of one size, compiled for any size elsewhere."""
    plain = seeded(lambda: torch.nn.Linear(3, 3))
    model = shard_all(copy.deepcopy(plain), mesh)
    check_parity(
        plain,
        model,
        compiled(model, dynamic=True),
        lambda seed: {"input": torch.ones(2 + mesh.get_rank(), 3) * seed},
        mesh,
        loss_of=lambda out: out.square().mean(),
    )


@on_ranks(3)
def test_what_differs_is_said_the_same_way_on_all_ranks(mesh):
    group, rank = mesh.get_group(), mesh.get_local_rank()
    long = [" ".join(f"slot{n}[{n}x{n + (rank == 2 and n == 12)}]," for n in range(20))]
    cases = [
        (["a", "b"] if rank == 1 else ["a", "c"], "entry 1: rank 0 has «c», rank 1 has «b»"),
        (["a"] if rank == 1 else ["a", "c"],
         "rank 0 has 2 entries, rank 1 has 1. The entries that both have are the same; "
         "rank 0 goes on with «c»"),
        (["a", "c"] if rank == 1 else ["a"], "rank 1 goes on with «c»"),
        (long, "They differ in slot12[12x12] against slot12[12x13]"),
    ]  # fmt: skip
    for facts, expected in cases:
        with pytest.raises(RuntimeError, match="ranks disagree on a test") as caught:
            agree(group, Statement("a test", facts), every_time=True)
        assert expected in str(caught.value), caught.value
    with pytest.raises(RuntimeError, match="rank 0 compares a test, rank 2 compares another"):
        agree(group, Statement("another" if rank == 2 else "a test", ["a"]), every_time=True)


@on_ranks(2)
def test_what_was_agreed_on_is_forgotten_in_the_order_of_rounds(mesh):
    group = mesh.get_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "_KEPT", 3)
        for number in range(5):
            fact = [str(number)]
            agree(group, Statement("a test of what is kept", fact))
            agree(group, Statement("a test of what is compared every time", fact), every_time=True)
        history = kept_with(group, agreement._History, agreement._History)
        rounds = history.rounds
        assert len(history.notes) == 3
        agree(group, Statement("a test of what is kept", ["4"]))
        agree(group, Statement("a test of what is kept", ["2"]))
        assert history.rounds == rounds
        agree(group, Statement("a test of what is kept", ["0"]))
        assert history.rounds == rounds + 1 and len(history.notes) == 3


@on_ranks(3)
def test_ranks_plan_with_the_slowest_and_know_what_any_would_choose(mesh):
    group, rank = mesh.get_group().group_name, mesh.get_local_rank()
    seconds = [[1.0, 5.0], [3.0, 2.0], [2.0, 4.0]][rank]
    choice = ["4", "2", "3"][rank]
    agreements = Agreements()

    def facts(by_number):
        return ["a test"]

    assert agreements.seconds(group, "forward", facts, seconds) == [3.0, 5.0]
    assert agreements.choices(group, "what fits", facts, choice) == {"4", "2", "3"}
    if rank == 0:  # which compiles again, alone: the others would not answer
        assert agreements.seconds(group, "forward", facts, [9.0, 9.0]) == [3.0, 5.0]
        assert agreements.choices(group, "what fits", facts, "1") == {"4", "2", "3"}


@on_ranks(2)
def test_a_destroyed_group_has_no_store(mesh):
    group = dist.new_group()
    dist.barrier()  # gloo's connections are made by all ranks, before one ends them
    compat.group_store(group)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="destroyed"):
        compat.group_store(group)


def _train_in_groups(rank, port, executor, results):
    """Train in three process groups, one after the other, that meet at one store."""
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    store, inputs = dist.TCPStore("127.0.0.1", port, 2, rank == 0), torch.eye(4, 8)
    for number, layers in enumerate((1, 3, 1)):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        torch.manual_seed(number)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers)))
        plain = copy.deepcopy(model)
        step = fully_shard(model, units="auto")
        if executor:
            step = torch.compile(model, backend="shardc", options={"executor": executor})
        step(inputs + rank).pow(2).sum().backward()
        ((plain(inputs).pow(2).sum() + plain(inputs + 1).pow(2).sum()) / 2).backward()
        got = [p.grad.full_tensor() for p in model.parameters()]
        same = [torch.allclose(g, p.grad) for g, p in zip(got, plain.parameters(), strict=True)]
        results.put((number, all(same), all(bool(g.abs().max() > 0) for g in got)))
        dist.destroy_process_group()
        _forget_addresses(store, rank, number)
    results.put("done")
    store.wait(["never"])


def _forget_addresses(store, rank, number):
    """Gloo would connect to where the ranks of the last group were."""
    store.add(f"shardc test, ended {number}", 1)
    while rank == 0 and store.add(f"shardc test, ended {number}", 0) < 2:
        time.sleep(0.05)
    if rank == 0:
        for key in store.list_keys():
            if "shardc" not in key:
                store.delete_key(key)
        store.set(f"shardc test, next {number}", "")
    store.wait([f"shardc test, next {number}"])


@pytest.mark.parametrize("executor", ["eager", None])
def test_groups_one_after_the_other_on_one_store(executor):
    """As under torchrun: what ranks told each other in the first group is not read in the next."""
    results, port = FORKS.Queue(), free_port()
    arguments = (port, executor, results)
    ranks = [FORKS.Process(target=_train_in_groups, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        found = [results.get(timeout=120) for _ in range(8)]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    steps = [each for each in found if each != "done"]
    assert sorted(steps) == [(n, True, True) for n in range(3) for _ in range(2)]
