"""Conversions of a ShardTensor to its part, the whole tensor and DTensors, and back.

Conversions are differentiable. A rank computes with its own batch. So the gradient of a full tensor
is averaged over the ranks, like the gradient of a parameter in a forward. torch's constructors of
DTensors call this module where they get a ShardTensor's placements (`compat.let_torch_make`).
"""

import math
from collections.abc import Sequence
from typing import NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardc.runtime import compat
from shardc.runtime.checks.words import plural
from shardc.runtime.tensor.shard_spec import (
    FlatShard,
    Over,
    ShardSpec,
    flat_shard_in,
    mesh_of,
    part_of,
    placements_of,
    whole_gradient,
)
from shardc.runtime.tensor.sharded import Sharded
from shardc.runtime.watch.entering import entering


def to_local(tensor: Sharded, grad_placements: Sequence[Placement] | None) -> Tensor:
    """Implement `ShardTensor.to_local`."""
    if grad_placements is not None and tuple(grad_placements) != tensor.placements:
        raise NotImplementedError(
            f"to_local(grad_placements={tuple(grad_placements)}): the gradient of a part of a "
            "ShardTensor is placed as the part is. Leave grad_placements out"
        )
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _ToLocal.apply(tensor)
    return tensor._local_tensor


def full_tensor(tensor: Sharded, grad_placements: Sequence[Placement] | None) -> Tensor:
    """Implement `ShardTensor.full_tensor`."""
    over = _over(grad_placements)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _FullTensor.apply(tensor, over)
    return tensor._gathered()


def redistribute(
    tensor: Sharded,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Implement `ShardTensor.redistribute`."""
    if placements is None:
        raise RuntimeError("placements is needed for redistribute!")
    own, wanted = tensor.device_mesh, _normalised(placements, tensor.dim())
    if mesh is not None and mesh != own:
        raise NotImplementedError(
            f"a ShardTensor on {own} cannot be brought to {mesh}: gather it, "
            "distribute_tensor(param.full_tensor(), mesh, placements)"
        )
    value = tensor if dtype is None else cast(Sharded, tensor.to(dtype))
    if wanted == tensor.placements:
        return value
    partial = next((p for p in wanted if p.is_partial()), None)
    if partial is not None:
        raise RuntimeError(f"a ShardTensor cannot be redistributed to {partial}")
    full = full_tensor(value, None)
    if is_placed(wanted):
        return distribute(full.detach(), own, wanted, src_data_rank=None)
    return _cut_to(full, own, wanted)


def _normalised(placements: Sequence[Placement], dims: int) -> tuple[Placement, ...]:
    """Count the dims of `placements` from the front."""
    return tuple(
        Shard(p.dim + dims) if isinstance(p, Shard) and p.dim < 0 else p for p in placements
    )


def _cut_to(full: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """Cut a tensor that all ranks have into a DTensor.

    Without a gradient, a local value smaller than the tensor has a storage of its own.
    """
    whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placed = whole.redistribute(placements=placements)
    if placed.requires_grad:
        return placed
    parts = compat.dtensor_parts(placed)
    assert parts is not None
    local, spec = parts
    return compat.make_dtensor(local.clone() if local.numel() < full.numel() else local, spec)


# -- gradients -------------------------------------------------------------------------------------


def _over(grad_placements: Sequence[Placement] | None) -> Over:
    if grad_placements is None:
        return "mean"
    if all(p.is_replicate() for p in grad_placements):
        return "own"
    if all(p.is_partial("sum") for p in grad_placements):
        return "sum"
    raise NotImplementedError(
        f"full_tensor(grad_placements={tuple(grad_placements)}) of a ShardTensor: Replicate() on "
        "every dim (the gradients of the ranks are equal), Partial() on every dim (they are added "
        "up), or none (they are averaged)"
    )


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: compat.FunctionContext, tensor: Sharded) -> Tensor:
        ctx.shape, ctx.spec = tuple(tensor.shape), tensor._shard_spec
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, grad: Tensor) -> Tensor:
        return Sharded.make(grad.reshape(-1), ctx.shape, ctx.spec)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: compat.FunctionContext, tensor: Sharded, over: Over) -> Tensor:
        ctx.shape, ctx.spec, ctx.over = tuple(tensor.shape), tensor._shard_spec, over
        return tensor._gathered()

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, grad: Tensor) -> tuple[Tensor, None]:
        part = whole_gradient(grad, ctx.spec, ctx.over)
        return Sharded.make(part, ctx.shape, ctx.spec), None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: compat.FunctionContext, local: Tensor, shape: tuple[int, ...], spec: ShardSpec
    ) -> Tensor:
        return Sharded.make(local.view_as(local), shape, spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, grad: Sharded) -> tuple[Tensor, None, None]:
        return grad._local, None, None


# -- constructors of DTensors, with a FlatShard among the placements -------------------------------


def distribute(
    tensor: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    src_data_rank: int | None = 0,
) -> Tensor:
    """Implement `distribute_tensor`: cut a whole tensor like the parameter with these placements.

    The values come from rank `src_data_rank` of each mesh dim; None: each rank has its own values.

    Raises:
        ValueError: another mesh, other placements, or a tensor of another size.
        RuntimeError: the tensor is not a leaf.
    """
    spec = _spec_for(mesh, placements)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        if (tensor.device_mesh, tensor.placements) != (mesh, tuple(placements)):
            raise ValueError(
                f"cannot distribute a DTensor on {tensor.device_mesh} with placements "
                f"{tensor.placements} to {mesh} with {tuple(placements)}: give its full_tensor()"
            )
        return tensor
    if not tensor.is_leaf:
        raise RuntimeError("`distribute_tensor` distributes leaf tensors: give tensor.detach()")
    _check_size(shape, spec)
    full = tensor.detach()
    if full.device.type != mesh.device_type and not full.is_meta:
        full = full.to(mesh.device_type)
    if src_data_rank is not None and not full.is_meta:
        full = full.clone(memory_format=torch.contiguous_format)
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                group = mesh.get_group(dim)
                with entering(
                    f"a broadcast of {plural(full.nbytes, 'byte')}", compat.group_name(group)
                ):
                    dist.broadcast(full, group=group, group_src=src_data_rank)
    return _place(full, spec).requires_grad_(tensor.requires_grad)


def from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
) -> Tensor:
    """Implement `DTensor.from_local`: make a ShardTensor of `shape` from this rank's part.

    Without `shape`, the tensor has the shape of the tensor whose placements were given.

    A whole tensor is cut to the part: code that only knows `Shard` passes the whole tensor as the
    local value where no `Shard` cuts it.

    Raises:
        ValueError: another mesh, other placements, no shape, a shape of another size, a stride that
            is not contiguous, or a part that this rank does not hold.
    """
    spec = _spec_for(mesh, placements)
    flat_shard = flat_shard_in(placements)
    shape = flat_shard.shape if shape is None and flat_shard is not None else shape
    if shape is None:
        raise ValueError(
            f"DTensor.from_local with {flat_shard} needs shape= and stride= of the whole tensor, "
            "which a part does not tell"
        )
    shape = tuple(shape)
    _check_size(shape, spec)
    plain = torch.empty(shape, device="meta").stride()
    if stride is not None and tuple(stride) != plain:
        raise ValueError(f"a ShardTensor is contiguous: stride {plain}, got {tuple(stride)}")
    start, stop = spec.interval()
    flat = local.reshape(-1)
    if tuple(local.shape) == (shape if spec.tp is None else spec.tp.local_shape):
        flat = flat[start:stop].clone()
    elif local.numel() != stop - start:
        raise ValueError(
            f"this rank holds elements [{start}, {stop}) of a tensor of shape {shape}, got a part "
            f"of shape {tuple(local.shape)}. To cut a whole tensor: "
            "distribute_tensor(full, mesh, placements)"
        )
    if torch.is_grad_enabled() and local.requires_grad:
        return _FromLocal.apply(flat, shape, spec)
    return Sharded.make(flat.detach(), shape, spec)


def _spec_for(mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardSpec:
    flat = flat_shard_in(placements)
    assert flat is not None
    spec = flat.spec
    if mesh_of(spec) != mesh or placements_of(spec) != tuple(placements):
        raise ValueError(
            f"{flat} is a placement of {mesh_of(spec)}, in {placements_of(spec)}; got {mesh} with "
            f"{tuple(placements)}"
        )
    return spec


def _check_size(shape: tuple[int, ...], spec: ShardSpec) -> None:
    fits = torch.Size(shape).numel() == spec.numel if spec.tp is None else shape == spec.tp.shape
    if not fits:
        what = plural(spec.numel, "element") if spec.tp is None else f"shape {spec.tp.shape}"
        raise ValueError(f"{FlatShard(spec)} places a tensor of {what}, got one of shape {shape}")


def box(
    shape: compat.Ints, mesh: DeviceMesh, placements: Sequence[Placement], box_of: compat.BoxOf
) -> compat.Boxes:
    """Implement `compute_local_shape_and_global_offset`: the shape and the offsets of a part.

    A part that begins or ends inside a row is no box. Then the box is the whole tensor, from which
    `from_local` cuts the part.

    Raises:
        ValueError: another mesh, other placements, or a shape of another size.
    """
    spec = _spec_for(mesh, placements)
    _check_size(shape, spec)
    others = [Replicate() if isinstance(p, FlatShard) else p for p in placements]
    sizes, offsets = box_of(shape, mesh, others)
    start, stop = spec.interval()
    row = math.prod(sizes[1:])
    if not sizes or row == 0 or start % row or stop % row:
        return sizes, offsets
    return ((stop - start) // row, *sizes[1:]), (offsets[0] + start // row, *offsets[1:])


def place(full: Tensor, like: Sharded) -> Tensor:
    """Cut a tensor that all ranks have with the spec of `like`."""
    return _place(full, like._shard_spec)


def _place(full: Tensor, spec: ShardSpec) -> Sharded:
    return Sharded.make(part_of(full, spec).clone(), tuple(full.shape), spec)


def is_placed(placements: Sequence[Placement] | None) -> bool:
    """Whether `placements` are of a ShardTensor: one of `placements` is a FlatShard."""
    return flat_shard_in(placements) is not None


def is_kind(value: object) -> bool:
    """Whether `value` is a ShardTensor."""
    return isinstance(value, Sharded)


def refuse_swap(tensor: Sharded) -> NoReturn:
    """Refuse `torch.utils.swap_tensors` of a ShardTensor."""
    raise RuntimeError(
        f"torch.utils.swap_tensors of {tensor._label()}: its memory belongs to a bucket, and "
        "another tensor cannot take its place. Write values by param.copy_(full_tensor) under "
        "torch.no_grad(); convert the model by model.to(...)"
    )
