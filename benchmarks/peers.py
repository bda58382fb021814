"""The model that is measured, and every way of training it: shardc and its peers.

Each way takes a model and a mesh and returns the callable `(tokens) -> loss` of one forward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Shape:
    """The model and the batch: `blocks` of width `dim`, `batch` sequences of `length` tokens."""

    blocks: int = 8
    dim: int = 512
    heads: int = 8
    vocab: int = 512
    batch: int = 4
    length: int = 128


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """`x: (batch, length, dim)` -> the same shape."""
        batch, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    """Embedding, blocks, norm, head; the forward gives the loss of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape.dim, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens: (batch, length)` -> loss `()`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


Step = Callable[[Tensor], Tensor]


def plain(model: Model, mesh: DeviceMesh, **options: Any) -> Step:
    """`torch.compile`, unsharded: the floor."""
    return torch.compile(model)


def ddp(model: Model, mesh: DeviceMesh, **options: Any) -> Step:
    """Replicated parameters, compiled."""
    from torch.nn.parallel import DistributedDataParallel

    return torch.compile(DistributedDataParallel(model, process_group=mesh.get_group()))


def fsdp2(model: Model, mesh: DeviceMesh, **options: Any) -> Step:
    """FSDP2, uncompiled."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp2_blocks(model: Model, mesh: DeviceMesh, **options: Any) -> Step:
    """FSDP2 with every block compiled, as its authors advise."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def simple_fsdp(model: Model, mesh: DeviceMesh, **options: Any) -> Step:
    """SimpleFSDP's way: DTensor parameters that a property redistributes, one compiled graph.

    The idea of arXiv:2411.00284; the gathered weights are recomputed in the backward, as there.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        gathers = (
            torch.ops._c10d_functional.all_gather_into_tensor.default,
            torch.ops._c10d_functional.wait_tensor.default,
        )
        recompute = CheckpointPolicy.MUST_RECOMPUTE
        return recompute if op in gathers else CheckpointPolicy.MUST_SAVE

    def replicate(param: DTensor) -> Tensor:
        full = param.redistribute(placements=[Replicate()])
        return full.to_local(grad_placements=[Partial()])

    def gathered(name: str) -> property:
        def read(self: Any) -> Tensor:
            param = self._parameters[name]
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            return checkpoint(replicate, param, use_reentrant=False, context_fn=contexts)

        return property(read)

    for module in list(model.modules()):
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            param = module._parameters[name]
            sharded = distribute_tensor(param.data, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(sharded)
        if names:
            body = {name: gathered(name) for name in names}
            module.__class__ = type(type(module).__name__, (type(module),), body)
    return torch.compile(model, fullgraph=True)


def shardc(model: Model, mesh: DeviceMesh, **options: Any) -> Step:
    """This project."""
    from shardc import calibrate, fully_shard

    calibrate(mesh, refresh=True)
    fully_shard(model, mesh=mesh, units="auto")
    return torch.compile(model, backend="shardc", fullgraph=True, options=options)


PEERS: dict[str, Callable[..., Step]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-blocks": fsdp2_blocks,
    "simple-fsdp": simple_fsdp,
    "shardc": shardc,
}
