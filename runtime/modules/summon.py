"""Full parameters on demand: inside `summon_full_params` a model holds ordinary parameters.

A bucket is gathered in the parameters' own dtype, without regard to the precision policy. In every
module that holds a parameter of the bucket, an ordinary parameter, a view of the gathered bucket,
takes the place of the sharded one. Such a module reads the parameter that is registered in it, also
in a forward. Compiled functions run uncompiled meanwhile, because their code gathers for itself. At
the end every rank keeps its part of the parameters that are then registered, without communication.

Semantics and refusals follow FSDP1's `summon_full_params`
(torch/distributed/fsdp/_unshard_param_utils.py).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.checks.arguments import checked
from shardc.runtime.checks.meta import units_in
from shardc.runtime.checks.telling import warn
from shardc.runtime.comm import collectives
from shardc.runtime.modules.ties import slots_below
from shardc.runtime.tensor.extension import inner_value, shape_and_dtype
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import wrapped
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.params import cut, parameter_like, view
from shardc.runtime.unit.unit import Unit


@checked
@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Give the sharded units in `module` their full parameters, as ordinary ones, inside a context.

    Every rank must enter the context. Forwards inside use the full parameters. An exception ends
    the context as usual: the model is sharded again, and `writeback` holds.

    Args:
        module: a sharded module, or a module that contains sharded ones.
        recurse: also summon units inside; else only the unit of `module` itself, if it has one.
        writeback: keep values written to the parameters, and parameters assigned to the modules
            (each rank its part); False drops both.
        rank0_only: only the first rank of the mesh gets full parameters, the others keep segments.
        offload_to_cpu: put the full parameters on the CPU.
        with_grads: gather the gradients too; `writeback` also keeps values written to them.

    Raises:
        NotImplementedError: `writeback` with `rank0_only`, `with_grads` with `offload_to_cpu`,
            `offload_to_cpu` of replicated parameters.
        RuntimeError: inside a forward, a backward, or another `summon_full_params`.
        ValueError: parameters are on meta; at the end, an assigned parameter has another shape.
    """
    units = units_in(module, recurse)
    _check_arguments(units, writeback, rank0_only, offload_to_cpu, with_grads)
    for unit in units:
        check_idle(unit)
    with contextlib.ExitStack() as stack:
        for unit in units:
            if rank0_only and not _is_first(unit):
                for bucket in unit.buckets:
                    _take_part(bucket, with_grads)
            else:
                unit.summoned = True
                stack.callback(setattr, unit, "summoned", False)
                for bucket in unit.buckets:
                    device = torch.device("cpu") if offload_to_cpu else unit.device
                    stack.enter_context(
                        _summoned_bucket(bucket, module, device, writeback, with_grads)
                    )
        if units:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def check_idle(unit: Unit) -> None:
    """Raise RuntimeError if the parameters of `unit` are in use, ValueError if they are on meta."""
    name = type(unit.modules[0]).__name__
    if torch.compiler.is_compiling() or any(bucket.gathered.depth for bucket in unit.buckets):
        raise RuntimeError(f"full parameters of {name} cannot be summoned inside its forward")
    if compat.in_backward():
        raise RuntimeError(f"full parameters of {name} cannot be summoned inside a backward")
    for bucket in unit.buckets:
        if unit.summoned:
            raise RuntimeError(f"full parameters of {name} are summoned already")
        if bucket.segment.is_meta:
            raise ValueError(
                f"{bucket} is on the meta device: call to_empty(device=...) and initialise it first"
            )


def _check_arguments(
    units: list[Unit], writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> None:
    if writeback and rank0_only:
        raise NotImplementedError(
            "writeback=True with rank0_only=True: the other ranks have no full parameters to take "
            "their part of; give writeback=False"
        )
    if with_grads and offload_to_cpu:
        raise NotImplementedError(
            "with_grads=True with offload_to_cpu=True: a gradient must be where its parameter is "
            "trained; leave one of them out"
        )
    copies = [unit for unit in units if any(b.layout.world_size == 1 for b in unit.buckets)]
    if offload_to_cpu and copies:
        raise NotImplementedError(
            f"offload_to_cpu=True with replicated parameters ({type(copies[0].modules[0]).__name__}"
            "): they are whole on every rank as they are"
        )
    if offload_to_cpu and not rank0_only:
        warn(
            "summon_full_params(offload_to_cpu=True, rank0_only=False) has every rank of a machine "
            "hold all parameters in its memory; add rank0_only=True, writeback=False"
        )


def _is_first(unit: Unit) -> bool:
    return int(unit.mesh.mesh.flatten()[0]) == dist.get_rank()


# -- one bucket ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _summoned_bucket(
    bucket: Bucket, module: nn.Module, device: torch.device, writeback: bool, with_grads: bool
) -> Iterator[None]:
    with torch.no_grad():
        values = _gather(bucket, bucket.segment.detach(), device)
        if bucket.extension is not None:
            values = [bucket.extension.around(value) for value in values]
        grads = _gather_gradients(bucket) if with_grads else [None] * len(values)
    full = [parameter_like(*pair) for pair in zip(bucket.params, values, strict=True)]
    for param, grad in zip(full, grads, strict=True):
        param.grad = grad
    holders = _holders(bucket, module)
    for owner, name, index in holders:
        compat.put_parameter(owner, name, full[index])
    try:
        yield
    finally:
        found = [(index, owner._parameters.get(name)) for owner, name, index in reversed(holders)]
        for owner, name, index in holders:
            compat.put_parameter(owner, name, bucket.params[index])
        if writeback:
            _write_back(bucket, found, full, with_grads)


def _take_part(bucket: Bucket, with_grads: bool) -> None:
    """Take part in the gathers of the rank that gets full parameters."""
    with torch.no_grad():
        _gather(bucket, bucket.segment.detach(), bucket.device)
        if with_grads:
            _gather_gradients(bucket)


def _gather(bucket: Bucket, segment: Tensor, device: torch.device) -> list[Tensor]:
    """Gather `segment: (S,)`, of parameters or of gradients, into full tensors, one a slot."""
    layout, ranks = bucket.layout, bucket.ranks
    flat = collectives.all_gather(segment.to(bucket.device), ranks.world_size, ranks.shard)
    flat = flat.to(device)
    views = [flat[s.start : s.start + s.numel].view(s.shape) for s in layout.slots]
    return [wrapped(full, placed) for full, placed in zip(views, bucket.placed, strict=True)]


def _gather_gradients(bucket: Bucket) -> list[Tensor | None]:
    """Gather the full gradients; a rank without a gradient that others have counts as zero."""
    have = torch.tensor([param.grad is not None for param in bucket.params], dtype=torch.int32)
    have = have.to(bucket.device)
    group = bucket.ranks.shard
    some = collectives.all_reduce(have, "max", group).tolist()
    if not any(some):
        return [None] * len(some)
    flat = torch.zeros_like(bucket.segment)
    for index, param in enumerate(bucket.params):
        if isinstance(param.grad, ShardTensor):
            view(bucket, index, flat)._local.copy_(param.grad._local)
    grads = _gather(bucket, flat, bucket.device)
    return [grad if flag else None for grad, flag in zip(grads, some, strict=True)]


def _holders(bucket: Bucket, module: nn.Module) -> list[tuple[nn.Module, str, int]]:
    """The modules inside `module` that hold a parameter of the bucket, with its name and index."""
    below = slots_below([module])
    return [(owner, name, slot.index) for owner, name, slot in below if slot.bucket is bucket]


@torch.no_grad()
def _write_back(
    bucket: Bucket, found: list[tuple[int, Any]], full: list[nn.Parameter], with_grads: bool
) -> None:
    """Keep this rank's part of the parameters that are registered now (`found`, by index).

    Raises:
        ValueError: a registered parameter has another shape, or was removed.
    """
    now = dict(enumerate(full))
    now |= {index: value for index, value in found if value is not full[index]}
    for index, value in now.items():
        name, param = bucket.layout.slots[index].name, bucket.params[index]
        if not isinstance(value, Tensor) or shape_and_dtype(value)[0] != tuple(param.shape):
            what = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(
                f"parameter '{name}' of shape {tuple(param.shape)} was {what} when "
                "summon_full_params ended: its shape cannot change, and it cannot be removed"
            )
    for index, value in now.items():
        param = bucket.params[index]
        param.copy_(inner_value(value.detach()))
        if with_grads:
            grad = value.grad
            param.grad = None if grad is None else cut(bucket, index, grad)
