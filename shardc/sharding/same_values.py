"""`check_same_values`: compare the values of all ranks by hash, before they are sharded."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.runtime import compat
from shardc.runtime.checks.arguments import checked
from shardc.runtime.groups.communicators import group_over
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.watch.entering import told
from shardc.sharding.sync import local_parts


@checked
def check_same_values(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Compare the parameters and buffers of a model that is not sharded yet over all ranks.

    `fully_shard` takes from each rank the part that this rank will hold: ranks with different
    seeds would train a patchwork of values. One tensor at a time is copied to the host and
    hashed; only the hashes travel.

    Args:
        model: the model before `fully_shard`.
        mesh: the ranks that compare (default: all); each of them calls this.

    Raises:
        RuntimeError: no process group; or a tensor differs: the error names the first, and ranks.
        ValueError: `model` is sharded already.
    """
    if not dist.is_initialized():
        raise RuntimeError("check_same_values needs a process group: call init_process_group()")
    mine = _digests(model)
    group = compat.default_group()
    if mesh is not None:
        ranks = mesh.mesh.flatten().tolist()
        group = compat.resolve_group(group_over(ranks, mesh.get_group(0)))
    _compare(mine, group)


def _digests(model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, named in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in named:
            if isinstance(tensor, ShardTensor):
                return {"error": f"parameter '{name}' is sharded already"}
            found[f"{kind} '{name}'"] = _digest(tensor)
    return found


def _digest(tensor: Tensor) -> str:
    about = f"{list(tensor.shape)} {tensor.dtype}"
    if tensor.is_meta:
        return f"{about} on meta"
    digest = hashlib.sha256()
    for part in local_parts(tensor):
        data = part.cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return f"{about}, sha256 {digest.hexdigest()[:8]}"


def _compare(mine: dict[str, str], group: dist.ProcessGroup) -> None:
    everyone = told(mine, "a comparison of values", group)
    ranks = dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, everyone, strict=True):
        if "error" in theirs:
            raise ValueError(
                f"check_same_values compares models before fully_shard: on rank {rank} "
                f"{theirs['error']}"
            )
    differing: dict[str, str] = {}
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        by_value: dict[str, list[int]] = {}
        for rank, theirs in zip(ranks, everyone, strict=True):
            by_value.setdefault(theirs.get(name, "absent"), []).append(rank)
        if len(by_value) > 1:
            differing[name] = "; ".join(f"rank(s) {r}: {value}" for value, r in by_value.items())
    if differing:
        name, held = next(iter(differing.items()))
        more = f" ({len(differing) - 1} more do)" if len(differing) > 1 else ""
        raise RuntimeError(
            f"{name} differs between ranks{more}: {held}. Seed all ranks alike before building the "
            "model, or shard it with sync_module_states=True"
        )
