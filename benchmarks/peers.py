"""The model that is measured, and every way of training it: shardc and its peers.

Each way takes a model and a mesh and returns what runs one forward of it.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


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


Step = Callable[..., Any]


FULL = MixedPrecisionPolicy()


def plain(
    model: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy = FULL, **options: Any
) -> Step:
    """`torch.compile`, unsharded: the floor."""
    return torch.compile(model.to(policy.param_dtype or torch.float32))


def ddp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Step:
    """Replicated parameters, compiled."""
    from torch.nn.parallel import DistributedDataParallel

    return torch.compile(DistributedDataParallel(model, process_group=mesh.get_group()))


def fsdp2(
    model: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy = FULL, **options: Any
) -> Step:
    """FSDP2, uncompiled."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def fsdp2_blocks(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Step:
    """FSDP2 with every block compiled, as its authors advise."""
    for block in blocks_of(model):
        block.compile()
    return fsdp2(model, mesh, **options)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The blocks that repeat."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def simple_fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Step:
    """SimpleFSDP's way: DTensor parameters that a property redistributes, one compiled graph.

    The idea of arXiv:2411.00284, with the weights gathered again in the backward. One message a
    parameter: Inductor's passes that bucket them or overlap them are off unless asked for, and the
    latter need Triton.
    """
    for module in list(model.modules()):
        names = [name for name, _ in module.named_parameters(recurse=False)]
        for name in names:
            local = module.get_parameter(name).data
            sharded = distribute_tensor(local, mesh, [Shard(0)], src_data_rank=None)
            module._parameters[name] = nn.Parameter(sharded)
        if names:
            body = {name: property(functools.partial(_read_gathered, name=name)) for name in names}
            module.__class__ = type(type(module).__name__, (type(module),), body)
    return torch.compile(model, fullgraph=True)


def _read_gathered(module: nn.Module, name: str) -> Tensor:
    """The whole parameter; the backward gathers it again (reshard after forward)."""
    param = module._parameters[name]
    return checkpoint(_replicate, param, use_reentrant=False, context_fn=_recompute_gathers)


def _replicate(param: DTensor) -> Tensor:
    whole = param.redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial("avg")])


def _recompute_gathers() -> Any:
    return create_selective_checkpoint_contexts(_gather_policy)


def _gather_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    c10d = torch.ops._c10d_functional
    gathers = op in (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default)
    return CheckpointPolicy.MUST_RECOMPUTE if gathers else CheckpointPolicy.MUST_SAVE


def shardc(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    calibrated: bool = True,
    laid_out_for: str | None = None,
    policy: MixedPrecisionPolicy = FULL,
    **options: Any,
) -> Step:
    """This project, planned for the device and the wire as measured now, or as profiles say.

    Args:
        laid_out_for: the profile of a device whose buckets the model gets, and nothing else of it.
            If calibrated, their sizes are those for the wire as measured.
    """
    from shardc import calibrate, fully_shard, get_profile, set_profile

    profile = calibrate(mesh, refresh=True) if calibrated else None
    if laid_out_for is not None:
        device = get_profile(laid_out_for)
        layout = profile and replace(profile, host_bandwidth=device.host_bandwidth)
        set_profile(layout or device)
    fully_shard(model, mesh=mesh, units="auto", mp_policy=policy)
    set_profile(profile)
    return torch.compile(model, backend="shardc", fullgraph=True, options=options)


def shardc_eager(
    model: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy = FULL, **options: Any
) -> Step:
    """This project, uncompiled."""
    from shardc import fully_shard

    return fully_shard(model, mesh=mesh, units="auto", mp_policy=policy)


def shardc_blocks(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Step:
    """This project with every block compiled by itself."""
    step = shardc_eager(model, mesh, **options)
    for block in blocks_of(model):
        block.compile(backend="shardc")
    return step


def shardc_graphs(
    model: nn.Module, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy = FULL, **options: Any
) -> Step:
    """This project, recorded as CUDA graphs."""
    from shardc import fully_shard

    fully_shard(model, mesh=mesh, units="auto", mp_policy=policy)
    return torch.compile(model, backend="shardc", fullgraph=True, mode="reduce-overhead")


def shardc_on_wire(
    model: nn.Module, mesh: DeviceMesh, *, computed: torch.dtype | None, sent: torch.dtype | None
) -> Step:
    """This project, computed in one dtype, gathered and reduced in another."""
    from shardc import MixedPrecisionPolicy

    reduced = None if sent is None else torch.int8
    policy = MixedPrecisionPolicy(computed, gather_wire_dtype=sent, reduce_wire_dtype=reduced)
    return shardc(model, mesh, policy=policy)


PEERS: dict[str, Callable[..., Step]] = {
    "plain": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2-blocks": fsdp2_blocks,
    "simple-fsdp": simple_fsdp,
    "shardc": shardc,
    "shardc-blocks": shardc_blocks,
    "shardc-eager": shardc_eager,
}
OTHERS: dict[str, Callable[..., Step]] = {
    "shardc-gpu-layout": functools.partial(shardc, laid_out_for="h100-nvlink"),
    "shardc-read-first": functools.partial(shardc, keep_read_first=True),
    "shardc-gpu-layout-read-first": functools.partial(
        shardc, laid_out_for="h100-nvlink", keep_read_first=True
    ),
    "shardc-graphs": shardc_graphs,
    "shardc-tables": functools.partial(shardc, embedding_rows=False),
    "shardc-int8": functools.partial(shardc_on_wire, computed=None, sent=torch.int8),
    "shardc-float8": functools.partial(shardc_on_wire, computed=None, sent=torch.float8_e4m3fn),
    "shardc-bf16": functools.partial(shardc_on_wire, computed=torch.bfloat16, sent=None),
    "shardc-bf16-int8": functools.partial(shardc_on_wire, computed=torch.bfloat16, sent=torch.int8),
}
"""Run when asked for."""
ALL = {**PEERS, **OTHERS}


def add_model_options(
    parser: argparse.ArgumentParser, default: Sequence[str] = (*PEERS,), more: Sequence[str] = ()
) -> None:
    """`--blocks`, `--dim`, `--vocab` and `--peers`, of which there are `more`."""
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the model (default 8)")
    parser.add_argument("--dim", type=int, default=512, help="model width (default 512)")
    parser.add_argument("--vocab", type=int, default=512, help="rows of the table (default 512)")
    parser.add_argument("--peers", nargs="+", choices=[*ALL, *more], default=list(default),
                        metavar="PEER", help=f"of {', '.join([*ALL, *more])} "
                        f"(default: {', '.join(default)})")  # fmt: skip
