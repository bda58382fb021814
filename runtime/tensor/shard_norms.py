"""Norms of tensors and of lists of tensors, for clipping: a local norm, then one all-reduce.

Norms are accumulated in fp32 at least. Ranks combine them in fp64, because p-th powers fit in fp64.
The norms of a list take one all-reduce for each process group, for any number of tensors.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.comm.collectives import all_reduce
from shardc.runtime.tensor.shard_gathers import refuse
from shardc.runtime.tensor.sharded import Sharded
from shardc.runtime.tensor.whole_value import as_whole

aten = torch.ops.aten


def norm(tensor: Sharded, order: float, dtype: torch.dtype | None) -> Tensor:
    """The norm over all elements of a tensor."""
    trained = torch.is_grad_enabled() and tensor.requires_grad
    return as_whole(_norms([tensor], order, dtype)[0], tensor._shard_spec, trained)


def foreach_norm(func: compat.Op, args: compat.Args, kwargs: compat.Kwargs) -> list[Tensor]:
    """The norms of the tensors of a list; a plain tensor is already whole."""
    if "out" in kwargs:
        refuse(func)
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    norms = _norms(tensors, order, args[2] if len(args) > 2 else kwargs.get("dtype"))
    return _as_whole(norms, tensors)


def _as_whole(norms: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make norms `WholeValue`s, and so their total; without gradients the first one is enough."""
    grads = torch.is_grad_enabled()
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Sharded):
            trained = grads and tensor.requires_grad
            norms[index] = as_whole(norms[index], tensor._shard_spec, trained)
            if not grads:
                break
    return norms


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The p-norms of full tensors, 0-dim each."""
    order = float(order)
    wide = [torch.promote_types(dtype or t.dtype, torch.float32) for t in tensors]
    parts = [t._local if isinstance(t, Sharded) else t for t in tensors]
    values = _shares(parts, order, wide)
    groups_of = [t._shard_spec.groups if isinstance(t, Sharded) else () for t in tensors]
    for group in dict.fromkeys(group for groups in groups_of for group in groups):
        combined = _combine(values, order, group)
        mine = [group in groups for groups in groups_of]
        if not all(mine):
            combined = torch.where(torch.tensor(mine, device=values.device), combined, values)
        values = combined
    values = _over_other_meshes(tensors, values, order)
    if not math.isinf(order) and order != 0:
        values = values ** (1 / order)
    rounded = {dtype: values.to(dtype.to_real()).unbind() for dtype in dict.fromkeys(wide)}
    return [rounded[dtype][index] for index, dtype in enumerate(wide)]


def _over_other_meshes(tensors: Sequence[Tensor], values: Tensor, order: float) -> Tensor:
    """Combine the norms on smaller meshes over all ranks, for a total norm over several meshes.

    Some parameters are on all ranks, others (experts) on some ranks. The other ranks have other
    parameters in their place. Each parameter counts once, so that all ranks get one norm. A DTensor
    is already whole: its norm is reduced over its own mesh.

    Raises:
        ValueError: two meshes have different ranks, and neither has all ranks of the other.
    """
    meshes = [_mesh_of(tensor) for tensor in compat.tensors_of_total_norm() or ()]
    ranks = {name: frozenset(compat.ranks_of(name)) for name in dict.fromkeys(meshes) if name}
    if len(set(ranks.values())) < 2:
        return values
    widest = max(ranks, key=lambda name: len(ranks[name]))
    for name in ranks:
        if not ranks[name] <= ranks[widest]:
            raise ValueError(
                f"a total norm of parameters that are sharded over ranks {sorted(ranks[name])} and "
                f"over ranks {sorted(ranks[widest])}: neither holds the other, so ranks would get "
                "different norms. Take the norm of each set of parameters by itself"
            )
    counts = [len(ranks.get(_mesh_of(tensor), ranks[widest])) for tensor in tensors]
    smaller = [count < len(ranks[widest]) for count in counts]
    if not any(smaller):
        return values
    # All ranks of a smaller mesh have the same value.
    same = 1 if math.isinf(order) else torch.tensor(counts, device=values.device)
    combined = _combine(values / same, order, widest)
    return torch.where(torch.tensor(smaller, device=values.device), combined, values)


def _mesh_of(tensor: Tensor) -> str:
    """The group of all ranks that have a tensor; "" for a plain tensor or a former DTensor."""
    if not isinstance(tensor, Sharded) or tensor._shard_spec.tp is not None:
        return ""
    return tensor._shard_spec.everyone or tensor._shard_spec.group


def _shares(parts: Sequence[Tensor], order: float, wide: Sequence[torch.dtype]) -> Tensor:
    """The share of each part in the norm, in fp64: an extremum, a count or a sum of p-th powers."""
    empty = torch.full(
        (), math.inf if order < 0 else 0.0, dtype=torch.float64, device=parts[0].device
    )
    norms = [empty] * len(parts)
    for dtype in dict.fromkeys(wide):
        chosen = [i for i, part in enumerate(parts) if part.numel() and wide[i] == dtype]
        if chosen:
            own = aten._foreach_norm.Scalar([parts[i] for i in chosen], order, dtype)
            for index, norm in zip(chosen, torch.stack(own).double().unbind(), strict=True):
                norms[index] = norm
    values = torch.stack(norms)
    return values if math.isinf(order) or order == 0 else values**order


def _combine(values: Tensor, order: float, group: str) -> Tensor:
    """Combine values over the ranks of a group: a sum, or an extremum for infinite orders."""
    if not math.isinf(order):
        return all_reduce(values, "sum", group)
    return extremum(values, 1.0 if order > 0 else -1.0, group)


def extremum(values: Tensor, sign: float, group: str) -> Tensor:
    """The maximum over ranks (sign -1: the minimum) of each of `values: (n,)`; NaN is kept.

    A backend's maximum may drop NaN on some ranks only. The ranks would then have different values.
    So a flag for NaN travels with each value.
    """
    flags = values.isnan()
    sent = torch.cat([(sign * values).masked_fill(flags, -math.inf), flags.double()])
    greatest, flagged = all_reduce(sent, "max", group).chunk(2)
    return (sign * greatest).masked_fill(flagged > 0, math.nan)
