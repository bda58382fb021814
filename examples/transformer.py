"""The models that `pretrain.py` trains: one like Llama 3, one with experts like DeepSeek-V3's.

    Llama 3: https://arxiv.org/abs/2407.21783       DeepSeek-V3: https://arxiv.org/abs/2412.19437

Both know nothing of sharding but this: experts may lie on other ranks (`Experts.mesh`), and then
their rows go there and come back. Shapes: B sequences of T tokens, D wide, E experts.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Config:
    """Sizes of a model. `experts` of 0: every block has one MLP."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 256
    rope_base: float = 500_000.0
    experts: int = 0
    active: int = 0  # experts a token
    expert_hidden: int = 0
    dense_layers: int = 1  # the first blocks have one MLP, also in a model with experts
    capacity: float = 1.5  # rows an expert takes of a sequence, by what it gets on average


CONFIGS = {
    ("llama", "debug"): Config(64, 2, 4, 2, 176),
    ("llama", "8b"): Config(4096, 32, 32, 8, 14336),
    ("moe", "debug"): Config(64, 3, 4, 2, 176, experts=4, active=2, expert_hidden=64),
    ("moe", "16b"): Config(2048, 27, 16, 16, 10944, experts=64, active=6, expert_hidden=1408),
}


class Attention(nn.Module):
    """Causal attention with rotary embeddings, several heads to one key."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.dim // config.heads
        keys = config.kv_heads * self.size
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, keys, bias=False)
        self.value = nn.Linear(config.dim, keys, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (B, T, D); cos, sin: (T, size / 2). Returns (B, T, D)."""
        linears = (self.query, self.key, self.value)
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in linears)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x: (B, heads, T, size)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).type_as(x)


class MLP(nn.Module):
    """Gated by SiLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """E gated MLPs.

    With `mesh`, of dims (expert, tensor), the weights are DTensors on it: each rank of the first
    dim has some of the experts, each of the second a part of their hidden units.
    """

    mesh: DeviceMesh | None = None

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, dim, hidden))
        self.up = nn.Parameter(torch.empty(experts, dim, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        """x: (E, N, D), N rows for each expert. Returns the same shape."""
        if self.mesh is None:
            return gated(x, self.gate, self.up, self.down)
        weights = (local(w) for w in (self.gate, self.up, self.down))
        expert, tensor = self.mesh["expert"], self.mesh["tensor"]
        x = exchange(x, expert)  # (ranks * E/ranks, N, D): from each rank, rows of own experts
        x = x.unflatten(0, (expert.size(), -1)).transpose(0, 1).flatten(1, 2)
        whole = DTensor.from_local(x, tensor, [Replicate()])
        part = gated(whole.to_local(grad_placements=[Partial()]), *weights)
        total = DTensor.from_local(part, tensor, [Partial()]).redistribute(placements=[Replicate()])
        y = total.to_local().unflatten(1, (expert.size(), -1)).transpose(0, 1)
        return exchange(y.flatten(0, 1), expert)


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One gated MLP for each matrix of x."""
    return torch.bmm(F.silu(torch.bmm(x, gate)) * torch.bmm(x, up), down)


def local(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


def exchange(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """An equal part of x, by its first dim, to each rank of `mesh`, and one from each."""
    return all_to_all_single_autograd(x.contiguous(), None, None, mesh.get_group())


class MixtureOfExperts(nn.Module):
    """An MLP for every token, and of E experts the best few for each.

    An expert takes so many rows of a sequence, the first ones; others do without it. So shapes are
    fixed, and what a sequence gives does not depend on the ranks. `bias` keeps the experts busy:
    whoever trains raises it for those that got little (section 2.1.2 of DeepSeek-V3).
    """

    bias: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.active, self.capacity = config.active, config.capacity
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.shared = MLP(config.dim, config.expert_hidden)
        self.experts = Experts(config.dim, config.expert_hidden, config.experts)
        self.register_buffer("bias", torch.zeros(config.experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: (B, T, D). Returns (B, T, D), and how many tokens chose each expert, (E,)."""
        scores = self.router(x).float().sigmoid()
        experts, count = scores.size(-1), self.active
        chosen = (scores + self.bias).topk(count, dim=-1).indices  # (B, T, count)
        weights = scores.gather(-1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).type_as(x)

        # The place of each choice among the rows of its expert; the last row takes what is over.
        rows = min(x.size(1), math.ceil(self.capacity * x.size(1) * count / experts))
        flat = chosen.flatten(1)  # (B, T * count)
        hits = F.one_hot(flat, experts)
        place = (hits.cumsum(1) - 1).gather(-1, flat[..., None]).squeeze(-1)
        slots = torch.where(place < rows, flat * rows + place, experts * rows)
        slots = slots[..., None].expand(-1, -1, x.size(-1))

        taken = x.new_zeros(x.size(0), experts * rows + 1, x.size(-1))
        taken = taken.scatter(1, slots, x.repeat_interleave(count, 1))[:, :-1]
        taken = taken.unflatten(1, (experts, rows)).transpose(0, 1)  # (E, B, rows, D)
        given = self.experts(taken.flatten(1, 2)).unflatten(1, (-1, rows))
        given = F.pad(given.transpose(0, 1).flatten(1, 2), (0, 0, 0, 1))
        given = given.gather(1, slots).unflatten(1, (-1, count))
        return self.shared(x) + (given * weights[..., None]).sum(2), hits.sum((0, 1))


class Block(nn.Module):
    """Pre-norm attention, then an MLP or experts."""

    def __init__(self, config: Config, dense: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = MLP(config.dim, config.hidden) if dense else MixtureOfExperts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """x: (B, T, D). Returns the same, and the tokens that chose each expert, if there are."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y, chosen = self.mlp(self.mlp_norm(x)), None
        if isinstance(y, tuple):
            y, chosen = y
        return x + y, chosen


class Transformer(nn.Module):
    """Embedding, blocks, norm, head and loss."""

    def __init__(self, config: Config, recompute: bool = False) -> None:
        """`recompute`: keep the inputs of blocks only (activation checkpointing)."""
        super().__init__()
        self.config, self.recompute = config, recompute
        self.embedding = nn.Embedding(config.vocab, config.dim)
        dense = config.dense_layers if config.experts else config.layers
        self.layers = nn.ModuleList(Block(config, n < dense) for n in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, targets: (B, T) int64. Returns the mean cross-entropy, 0-dim, and how many tokens
        chose each expert, (blocks with experts, E)."""
        x, size = self.embedding(tokens), self.config.dim // self.config.heads
        powers = torch.arange(0, size, 2, device=tokens.device) / size
        places = torch.arange(tokens.size(1), device=tokens.device)
        angles = places[:, None] * self.config.rope_base**-powers
        choices = []
        for layer in self.layers:
            inputs = (x, angles.cos(), angles.sin())
            if self.recompute:
                x, chosen = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                x, chosen = layer(*inputs)
            if chosen is not None:
                choices.append(chosen)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten())
        return loss, torch.stack(choices) if choices else tokens.new_empty(0, 0)


def initialise(module: nn.Module) -> None:
    """Values for what `module` itself holds."""
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
        for buffer in module.buffers(recurse=False):
            nn.init.zeros_(buffer)


def balance(model: Transformer, chosen: Tensor, rate: float) -> None:
    """Raise the bias of experts that fewer tokens chose than of others, lower that of the others.

    `chosen`: what the forward returned, summed over all ranks.
    """
    mixtures = [m for m in model.modules() if isinstance(m, MixtureOfExperts)]
    for mixture, counts in zip(mixtures, chosen.float(), strict=True):
        mixture.bias += rate * (counts.mean() - counts).sign()


def flops_per_token(model: Transformer, length: int) -> float:
    """Of a forward and a backward: 6 for each parameter that a token meets, and attention's."""
    config = model.config
    embedding = config.vocab * config.dim
    met = sum(p.numel() for p in model.parameters()) - embedding
    for module in model.modules():
        if isinstance(module, Experts):
            numel = sum(p.numel() for p in module.parameters())
            met -= numel * (config.experts - config.active) // config.experts
    return 6.0 * met + 6.0 * config.layers * length * config.dim  # causal: half of all pairs
