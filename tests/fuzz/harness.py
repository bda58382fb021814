"""What every script of the fuzzer begins with: batches, and the comparison with the plain model.

This file's text is copied into the scripts, so it imports nothing of the fuzzer.
"""
# ruff: noqa: F401

import contextlib
import copy
import io
import itertools
import math
import os
import shutil
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_states
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardc
from shardc import CPUOffloadPolicy, MixedPrecisionPolicy, ShardTensor, fully_shard, units_of

differences = []  # what differed from the plain model, in order


def save_matmuls():
    ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return create_selective_checkpoint_contexts(ops)


def batch(seed, rows, width, dtype, ragged=False):
    """This rank's batch, `(rows, width)`; with `ragged`, a rank's number of rows more."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(rows + rank * ragged, width, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def roots(model):
    """The outermost units; none of a plain model."""
    return units_of(model, root_only=True).values()


def loss_of(out):
    target = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return (out - target).square().mean()


def full(tensor):
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().double()


def share_buffers(*models):
    """Have all ranks hold rank 0's, as after the load of a checkpoint."""
    for model in models:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), shardc.get_state_dict(model, optimizer), strict=True))


def save(model, optimizer):
    """A new folder, the same on every rank, with the model and its optimizer."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    dcp.save(state_of(model, optimizer), checkpoint_id=path[0])
    return path[0]


def load(model, optimizer, path):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    shardc.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)


def save_and_load_full(model):
    """Gather the parameters on rank 0, spoil them, and send them out again."""
    options = shardc.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = shardc.get_model_state_dict(model, options=options)
    spoil(model)
    options = shardc.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    shardc.set_model_state_dict(model, state, options=options)


def spoil(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def average(model):
    """Average over ranks what sharding did not: the gradients of plain parameters."""
    for parameter in model.parameters():
        if parameter.grad is not None and not isinstance(parameter, ShardTensor):
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


DIVERGED = 1e3
"""A gradient that is so large multiplies rounding: what follows its step is not compared."""
diverged = []
CANCELLED = 0.01
"""A gradient is a sum of terms of about 1. Where they cancel, its rounding stays that of the terms,
so smaller gradients are compared as if the largest element were this."""


def compare(what, want, got, tolerance, floor=0.0):
    """Note a difference of more than `tolerance` times the largest element, or `floor`."""
    if diverged:
        return
    if want is None or got is None:
        if want is not got:
            differences.append(f"{what}: {got is not None}, unlike unsharded")
    elif want.shape != got.shape:
        differences.append(f"{what}: shape {tuple(got.shape)}, should be {tuple(want.shape)}")
    elif want.numel():
        off = (full(want) - full(got)).abs().max().item()
        scale = max(full(want).abs().max().item(), floor)
        if not off <= tolerance * scale:
            differences.append(f"{what}: off by {off:.3g} of {scale:.3g}")


def compare_outputs(number, want, got, tolerance):
    """What a step gave, or what was done around it: losses, gradients and more, on this rank."""
    for index, (a, b) in enumerate(zip(want, got, strict=True)):
        compare(f"step {number}, output {index}", a, b, tolerance, 1.0)


def compare_gradients(number, plain, ours, tolerance):
    grads = [p.grad for p in plain.parameters() if p.grad is not None and p.numel()]
    largest = max((full(grad).abs().max().item() for grad in grads), default=0.0)
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        what = f"step {number}, gradient of {name}"
        if (p.grad is None) != (q.grad is None):
            differences.append(f"{what}: {'none' if q.grad is None else 'one'}, unlike unsharded")
        elif p.grad is not None:
            compare(what, p.grad, full(q.grad), tolerance, max(largest, CANCELLED))
    if largest > DIVERGED:
        diverged.append(number)


def compare_states(number, plain, ours, tolerance):
    """Parameters and buffers."""
    mine = dict(ours.named_parameters()) | dict(ours.named_buffers())
    theirs = dict(plain.named_parameters()) | dict(plain.named_buffers())
    if list(mine) != list(theirs):
        differences.append(f"step {number}: names {list(mine)}, should be {list(theirs)}")
        return
    for name, value in theirs.items():
        compare(f"step {number}, {name}", value, full(mine[name]), tolerance, 1.0)


def take_over(plain, ours):
    """Have the plain model go on from the other's values: rounding of one step is compared."""
    with torch.no_grad():
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            p.copy_(full(q))


def check_that_they_differ(plain, ours, replicas):
    """The plain model holds everything; of the sharded one the ranks hold each a part."""
    assert not any(isinstance(p, ShardTensor) for p in plain.parameters())
    sharded = [p for p in ours.parameters() if isinstance(p, ShardTensor)]
    assert sharded, "nothing is sharded"
    held = torch.tensor(sum(p.to_local().numel() for p in sharded))
    dist.all_reduce(held)
    assert held == replicas * sum(p.numel() for p in sharded), "not each element is held once"


def values_of(model, losses):
    """Losses, and this rank's part of parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    held = [(name, getattr(value, "_local", value).detach().clone()) for name, value in named]
    return [*((f"loss {number}", loss) for number, loss in enumerate(losses)), *held]


def compare_bits(separate, whole):
    """Note each value of the separate step that the whole step has not to the bit."""
    for (name, one), (_, other) in zip(separate, whole, strict=True):
        if not ((one == other) | (one.isnan() & other.isnan())).all():
            differences.append(f"rank {dist.get_rank()}: {name}, whole step against separate")


def check():
    """Raise if anything differed, on every rank at once."""
    count = torch.tensor(len(differences))
    dist.all_reduce(count)
    if count:
        raise AssertionError("differs from the unsharded model:\n" + "\n".join(differences[:8]))
