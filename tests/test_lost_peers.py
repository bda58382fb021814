"""A peer that dies, stalls or goes another way: what is missing is named, and nothing hangs."""

import io
import logging
import os
import pickle
import queue
import re
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from ranks import FORKS, free_port

from shardc.runtime.watch.lost_peers import compare_lines

TIMEOUT = 12  # seconds, of the group, where it is what must end the wait
WAITED_FOR = ("sleeps", "stops")
ANSWER = 400  # seconds after which a rank hangs, however busy the machine is


def _train(rank, world, port, executor, lost, behaviour, results, environment):
    """Three steps, of which rank `lost` takes part in one only; what the others raise."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **environment)
    import torch
    import torch.distributed as dist
    from models import Stack, seeded, shard_all, tokens
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    timeout = timedelta(seconds=ANSWER)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timeout)
    reshard = behaviour != "skips"  # else the backward only reduces, which gloo tells from gathers
    mesh = init_device_mesh("cpu", (world,))
    model = step = shard_all(seeded(Stack), mesh, reshard_after_forward=reshard)
    if executor:
        options = {"executor": executor, "agreement_timeout": 120}
        step = torch.compile(model, backend="shardc", options=options)
    x, log = tokens(0), io.StringIO()
    logging.getLogger("shardc").addHandler(logging.StreamHandler(log))
    try:
        for number in range(3):
            if number == 1 and behaviour in WAITED_FOR:  # all have compiled, however long it took
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
            if rank == lost and number == 1 and behaviour == "dies":
                os._exit(3)
            if rank == lost and number == 1 and behaviour in WAITED_FOR:
                threading.Event().wait()  # busy, or done
            loss = step(x, x)
            if rank == lost and number == 1 and behaviour == "skips":
                continue  # a forward without its backward: the other ranks do both
            loss.backward()
            if not executor:
                torch.optim.SGD(model.parameters()).zero_grad()
        results.put((rank, "no error"))
    except RuntimeError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", []), log.getvalue()])
        results.put((rank, text))
    threading.Event().wait()  # others may still ask the store that it holds, until it is killed


def _errors(world, executor, lost, behaviour, answers=None, **environment):
    """By rank, the error of so many ranks."""
    port = free_port()
    results = FORKS.Queue()
    arguments = (world, port, executor, lost, behaviour, results, environment)
    ranks = [FORKS.Process(target=_train, args=(rank, *arguments)) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        return dict(results.get(timeout=ANSWER) for _ in range(answers or world - 1))
    except queue.Empty:
        raise AssertionError("a rank hangs") from None
    finally:
        for process in ranks:
            process.kill()
            process.join()


FORWARD = "the wait for the all-gather of Stack in the forward"


@pytest.mark.parametrize(
    ("behaviour", "executor"),
    [("sleeps", "inductor"), ("dies", "eager"), ("stops", None)],
)
def test_a_rank_that_does_not_come_is_named_on_all_others(behaviour, executor):
    found = _errors(3, executor, 1, behaviour)
    assert set(found) == {0, 2}
    for rank, text in found.items():
        assert f"a collective of shardc failed on rank {rank} of 3, at {FORWARD}" in text
        through = "" if executor else r", through models\.py:\d+"  # the model's own forward
        called = rf"\(called from test_lost_peers\.py:\d+{through}\)"
        assert re.search(re.escape(FORWARD) + f" {called}", text), text
        assert not re.search(r"GLHF|\.(cc|cpp|h):|torch\.|<.* at 0x", text), text
        assert re.search(r"same collective\.(\n|$)", text), text  # the error ends with our words
        if behaviour == "dies":
            assert "Rank 1 is silent and never came to it" in text, text
        else:
            where = (
                r"at the work after the [-a-z]+ of \S+ in the backward \(called from test_lost_peer"
            )
            assert re.search(rf"Rank 1 is elsewhere: {where}", text), text
        assert f"Rank {2 - rank} is at the same collective" in text, text
        if behaviour in WAITED_FOR:
            assert "the group's timeout is 0:00:12" in text, text
        if behaviour == "sleeps":
            wait = FORWARD.removeprefix("the wait for ")
            warning = rf"rank {rank} has waited \d+ s for {wait} {called}; the timeout is 0:00:12"
            assert re.search(warning, text), text


def test_the_rank_that_holds_the_store_dies():
    found = _errors(3, "eager", 0, "dies")
    for rank, text in found.items():
        assert f"a collective of shardc failed on rank {rank} of 3, at {FORWARD}" in text
        assert "the group's store does not answer. Rank 0, which holds it, died" in text, text
        assert text.split("\n")[0].endswith("died or ended."), text


def test_a_rank_that_goes_another_way_is_named_with_its_place():
    mine, theirs = _errors(2, "eager", 1, "skips", answers=2).values()
    if "on rank 1 of 2" in mine:
        mine, theirs = theirs, mine
    parted = (
        "rank 0 entered the reduce-scatter of layers.1 in the backward; "
        "rank 1 entered the all-gather of Stack in the forward"
    )
    assert parted in mine and "on rank 0 of 2" in mine, mine
    assert parted in theirs and "on rank 1 of 2" in theirs, theirs


def test_what_others_do_in_words():
    mine = {"rank": 0, "at": "the wait for a", "started": 7}
    same = [{**mine, "rank": rank} for rank in range(20)]
    assert compare_lines(mine, same[:2], [0, 1]) == (
        "Rank 1 is at the same collective. So no rank is missing: look at the network between them."
    )
    ahead = {**mine, "rank": 2, "started": 9}
    assert compare_lines(mine, [mine, same[1], ahead], [0, 1, 2, 5]) == (
        "Rank 5 is silent and never came to it: died, or cannot answer. "
        "Rank 2 is elsewhere: at the wait for a, having started 9 collectives (7 here). "
        "Rank 1 is at the same collective."
    )
    text = compare_lines(mine, [mine], list(range(20)))
    assert text.startswith("Ranks 1, 2, 3, ") and "16 and 3 more are silent" in text


def test_gloos_flight_record_is_written_where_the_user_said():
    with tempfile.TemporaryDirectory() as folder:
        text = _errors(2, "eager", 1, "dies", TORCH_FR_DUMP_TEMP_FILE=f"{folder}/trace_")[0]
        assert f"Its collectives under way are in {folder}/trace_0" in text, text
        entries = pickle.loads(Path(folder, "trace_0").read_bytes())["entries"]
    assert "gloo:all_gather" in entries[-1]["profiling_name"], entries[-1]
