"""What the parts share: a model, a step of it, ranks on one GPU, and a comparison of gradients."""

import faulthandler
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from shardc import fully_shard

WITHOUT_VALUES = "libstandin" in os.environ.get("LD_PRELOAD", "")
"""Whether kernels do nothing (`make test-cuda`), so that there are no values to compare."""

FOLDER = Path(os.environ.get("SHARDC_KIT_FOLDER", "."))
"""Where a case leaves what is too long for a table."""

if WITHOUT_VALUES:
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN has no stand-in

SMALL = peers.Shape(blocks=4, dim=256, heads=4, vocab=1024, batch=2, length=128)
STEPS = 3
"""Gradients are compared in the third step: the first compiles, CUDA graphs record the second."""
TINY = peers.Shape(blocks=2, dim=128, heads=2, vocab=256, batch=2, length=64)


@dataclass(frozen=True)
class Training:
    """How a model is sharded and run.

    Attributes:
        way: "compiled", "graphs" (CUDA's), "rows" (of tables are fetched), "executor" (eager),
            "blocks" or "uncompiled".
        mesh: its shape; one dim, or (replicate, shard).
        sharding: more arguments of `fully_shard`.
        accumulate: micro-batches without a reduction before the one with it.
        tensor_parallel: ranks that share a shard's layers, the last dim of the mesh.
        controls: methods of the sharded model that are called with True.
    """

    way: str = "compiled"
    mesh: tuple[int, ...] = (1,)
    sharding: Mapping[str, Any] = field(default_factory=dict)
    accumulate: int = 0
    tensor_parallel: int = 1
    controls: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.sees * self.tensor_parallel

    @property
    def sees(self) -> int:
        """How many ranks have batches of their own."""
        return torch.Size(self.mesh).numel()


def gradients(training: Training, rank: int, shape: peers.Shape) -> dict[str, float]:
    """Train sharded and unsharded on the same data; the largest differences, on this rank."""
    torch.manual_seed(0)
    model = peers.Model(shape).cuda()
    start = time.perf_counter()
    names = ("replicate", "shard")[-len(training.mesh) :]
    if training.tensor_parallel == 1:
        mesh = init_device_mesh("cuda", training.mesh, mesh_dim_names=names)
    else:
        sizes = (*training.mesh, training.tensor_parallel)
        whole = init_device_mesh("cuda", sizes, mesh_dim_names=(*names, "tensor"))
        _parallelize(model, whole["tensor"])
        rank, mesh = rank // training.tensor_parallel, whole[names]
    expected, loss = _unsharded(training, shape)
    fully_shard(model, mesh=mesh, units="auto", **training.sharding)
    for name in training.controls:
        getattr(model, name)(True, recurse=True)
    call = prepare(model, training.way)
    batches = _batches(training, shape, rank)
    times = []
    for _ in range(STEPS):
        model.zero_grad()
        for tokens in batches[:-1]:
            with model.no_sync():
                call(tokens).backward()
        ours = call(batches[-1])
        ours.backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    total = ours.detach().float().clone()
    dist.all_reduce(total)
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    result = {"loss": relative(total / dist.get_world_size(), loss), "first s": times[0]}
    worst = max(relative(found[name].cuda(), value) for name, value in expected.items())
    return {**result, "gradient": worst}


def prepare(model: Any, way: str) -> Callable[..., Tensor]:
    """The model's forward, compiled as asked for."""
    if way == "compiled":
        model.compile(backend="shardc", options={"fallback": False})
    elif way == "graphs":
        model.compile(backend="shardc", mode="reduce-overhead")
    elif way == "rows":
        model.compile(backend="shardc", options={"fallback": False, "embedding_rows": True})
    elif way == "executor":
        model.compile(backend="shardc", options={"executor": "eager"})
    elif way == "blocks":
        for block in model.blocks:
            block.compile(backend="shardc", options={"fallback": False})
    return model


def _parallelize(model: Any, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def _batches(training: Training, shape: peers.Shape, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    size = (1 + training.accumulate, shape.batch, shape.length)
    return list(torch.randint(shape.vocab, size, generator=generator).cuda())


def _unsharded(training: Training, shape: peers.Shape) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of the model on the data of all ranks; the mean loss of the last batches."""
    torch.manual_seed(0)
    model: nn.Module = peers.Model(shape).cuda()
    policy = training.sharding.get("mp_policy", fsdp.MixedPrecisionPolicy())
    low = policy.param_dtype or torch.float32
    losses = []
    for rank in range(training.sees):
        for tokens in _batches(training, shape, rank):
            copies = {n: p.to(low) for n, p in model.named_parameters()}
            loss = torch.func.functional_call(model, copies, (tokens,))
            (loss / training.sees).backward()
        losses.append(loss.detach().float())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return grads, torch.stack(losses).mean()


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm; 0 where there are no values."""
    if WITHOUT_VALUES:
        assert found.shape == expected.shape
        return 0.0
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


# -- ranks on one GPU ----------------------------------------------------------------------------


def on_ranks(count: int, backend: str, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, *args)` gives on every one of `count` ranks, which share one GPU.

    NCCL takes ranks for those of other hosts if each has its own `NCCL_HOSTID`; they meet over
    loopback sockets.
    """
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/store"
        spawned = mp.spawn(
            _serve, (count, backend, meeting, answers, work, args), nprocs=count, join=False
        )
        while len(found) < count:
            while answers.empty():
                spawned.join(timeout=0.1)  # raises what a rank raised
            rank, answer = answers.get()
            found[rank] = answer
        spawned.join()
    return [found[rank] for rank in range(count)]


def _serve(
    rank: int, count: int, backend: str, meeting: str, answers: Any, work: Any, args: Any
) -> None:
    os.environ |= {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic algorithms want it
    }
    faulthandler.dump_traceback_later(100)  # a case that hangs shows in its log where
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=count)
    answers.put((rank, work(rank, *args)))
    torch.cuda.synchronize()
    if WITHOUT_VALUES:  # NCCL waits for nobody there, and the first rank has the store
        dist.barrier(dist.new_group(backend="gloo"))
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


def mesh_of(ranks: int) -> DeviceMesh:
    """All ranks in one dim."""
    return init_device_mesh("cuda", (ranks,))
