"""The model that is rehearsed: a small Llama-like one whose shapes Triton and cuBLAS accept."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

VOCAB = 1024
HEAD = 64


class Failure(Exception):
    """What a backward raises in the middle of a model that is `failing`."""


def fail(gradient: Tensor) -> None:
    """A hook of autograd that fails."""
    raise Failure


def causal(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A score of flex_attention: minus infinity for what comes later."""
    return torch.where(query >= key, score, -float("inf"))


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, dim: int, flex: bool) -> None:
        super().__init__()
        self.heads = dim // HEAD
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, 4 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * dim, dim, bias=False)
        self.attend = (
            partial(flex_attention, score_mod=causal)
            if flex
            else partial(F.scaled_dot_product_attention, is_causal=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(*qkv.unbind()).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    """Token ids `(B, T)` to the loss of the next token; with `checkpointing`, blocks run again."""

    failing = False

    def __init__(self, dim: int, blocks: int, flex: bool, checkpointing: bool) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, flex) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
            if self.failing and block is self.blocks[0]:
                x.register_hook(fail)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
