"""FSDP2 as the peer of parity tests: the same model, the same steps, every gradient compared."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from models import full
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard

from shardc import ShardTensor, fully_shard


def fsdp2(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """`model` sharded by torch, every block of `model.layers` and the rest."""
    with mock.patch.object(_fully_shard, "_get_post_forward_mesh_info", _post_forward_mesh_info):
        for layer in model.layers:
            fsdp.fully_shard(layer, mesh=mesh, **kwargs)
        return fsdp.fully_shard(model, mesh=mesh, **kwargs)


def _post_forward_mesh_info(reshard_after_forward: Any, mesh_info: Any) -> Any:
    """What torch makes anew for each module, groups and their threads included (`mesh_of`)."""
    if isinstance(reshard_after_forward, bool):
        return _made(reshard_after_forward, mesh_info)
    key = reshard_after_forward, mesh_info.mesh
    if key not in _post_forward:
        _post_forward[key] = _made(reshard_after_forward, mesh_info)
    return _post_forward[key]


_made = _fully_shard._get_post_forward_mesh_info
_post_forward: dict[tuple[int, DeviceMesh], Any] = {}


def sharded(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """The same by shardc."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def whole(tensor: Tensor) -> Tensor:
    """The whole value of a parameter or gradient of either, on the CPU."""
    value = full(tensor) if isinstance(tensor, ShardTensor) else tensor.full_tensor().detach()
    return value.cpu()


Step = Callable[[nn.Module, Callable[..., Any], int], None]


def check_against_fsdp2(
    theirs: nn.Module,
    ours: nn.Module,
    compiled: Callable[..., Any],
    step: Step,
    steps: int = 5,
    tolerance: float = 1e-5,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = lambda params: torch.optim.SGD(
        params, lr=0.1, foreach=False
    ),
) -> None:
    """Train both; after every step compare each gradient, at the end each parameter.

    `step(model, call, number)` runs forwards and backwards through `call`. Tolerance 0 asks for
    equal bits; else a gradient may be off by that share of its largest element or a hundredth of
    the model's.
    """
    pairs = list(zip(theirs.named_parameters(), ours.parameters(), strict=True))
    assert all(isinstance(p, ShardTensor) for _, p in pairs)
    assert not any(isinstance(p, ShardTensor) for (_, p), _ in pairs)
    their_optimizer, our_optimizer = optimizer(theirs.parameters()), optimizer(ours.parameters())
    for number in range(steps):
        step(theirs, theirs, number)
        step(ours, compiled, number)
        largest = max(whole(p.grad).abs().max() for (_, p), _ in pairs if p.grad is not None)
        assert largest > 0, "nothing to compare: all gradients are zero"
        for (name, p), q in pairs:
            assert (p.grad is None) == (q.grad is None), f"step {number}, {name}: {p.grad} {q.grad}"
            if p.grad is not None:
                assert p.grad.dtype == q.grad.dtype, (name, p.grad.dtype, q.grad.dtype)
                _compare(
                    f"gradient of {name}, step {number}", p.grad, q.grad, tolerance, 0.01 * largest
                )
        for made in (their_optimizer, our_optimizer):
            made.step()
            made.zero_grad()
    for (name, p), q in pairs:
        _compare(name, p, q, tolerance, torch.tensor(0.1))


def _compare(what: str, want: Tensor, got: Tensor, tolerance: float, floor: Tensor) -> None:
    a, b = whole(want), whole(got)
    if tolerance == 0:
        assert torch.equal(a, b), f"{what}: differs by {(a - b).abs().max()}"
    else:
        scale = max(a.abs().max().item(), floor.item())
        off = (a - b).abs().max().item()
        assert off <= tolerance * scale, f"{what}: off by {off}, at most {tolerance * scale}"
