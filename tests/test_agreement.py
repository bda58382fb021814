"""What happens when a peer dies or stalls: an error that says so, never a hang."""

import multiprocessing as mp
import os
import socket
import time
from datetime import timedelta

import pytest


def _train(rank, port, behaviour, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist
    from models import Stack, compiled, seeded, shard_all, tokens
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=8))
    model = shard_all(seeded(Stack), init_device_mesh("cpu", (2,)))
    step, x = compiled(model), tokens(0)
    step(x, x).backward()
    start = time.monotonic()
    try:
        for _ in range(3):
            if rank == 1:
                if behaviour == "dies":
                    os._exit(3)
                time.sleep(30 if behaviour == "stalls" else 0)
            step(x, x).backward()
        queue.put((rank, "no error", time.monotonic() - start))
    except RuntimeError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        queue.put((rank, text, time.monotonic() - start))
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.mark.parametrize("behaviour", ["dies", "stalls"])
def test_peer_is_lost_between_steps(behaviour):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_train, args=(rank, port, behaviour, queue)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    rank, text, seconds = queue.get(timeout=90)
    for process in ranks:
        process.kill()
        process.join()
    assert rank == 0 and seconds < 25, (rank, text)
    assert "a collective of shardc failed on rank 0 of 2" in text
    assert "timeout is 0:00:08" in text
