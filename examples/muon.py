"""An optimizer that needs whole matrices, on a sharded model: a small Muon.

    torchrun --nproc-per-node 2 examples/muon.py

Most optimizers work element by element and run on a rank's part as they are. Muon
(https://kellerjordan.github.io/posts/muon/) makes each update orthogonal, which needs all of the
matrix. The pattern, for any optimizer of the kind (Shampoo, SOAP, Adafactor):

    state sharded     torch.zeros_like(param)         a part, as the parameter
    full tensor in    update.full_tensor()            gathered, on every rank
    shard out         param.add_(full_update)         each rank takes its part of it

At most one full matrix exists at a time, the state stays a part, and checkpoints save and load it
at any world size. On a plain model the same code runs unsharded. Left out, to stay short: every
rank computes every update. `shardc.WholeTensorOptimizer(torch.optim.Muon, params)` gives each
matrix one rank that does, for any stock optimizer.
"""

import argparse
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import AdamW, Optimizer

from shardc import ShardTensor, fully_shard, get_optimizer_state_dict


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """The nearest orthogonal matrix, roughly: (m, n) -> (m, n), by Newton and Schulz's iteration.

    The coefficients are those of https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrix else x.T


class Muon(Optimizer):
    """Momentum whose update is made orthogonal, for matrices; give the rest to another optimizer.

    Raises:
        ValueError: a parameter that is no matrix.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() != 2:
                    raise ValueError(f"Muon takes matrices, got shape {tuple(param.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Every rank must call it."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"], group["momentum"])

    def _update(self, param: Tensor, grad: Tensor, lr: float, momentum: float) -> None:
        state = self.state[param]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(param)  # sharded as the parameter
        state["momentum"].lerp_(grad, 1 - momentum)
        update = torch.lerp(grad, state["momentum"], momentum)  # Nesterov's look ahead
        if isinstance(update, ShardTensor):
            update = update.full_tensor()
        scale = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
        param.add_(orthogonalized(update), alpha=-lr * scale)


def main() -> None:
    """Fit a small network to random labels, and show what the state dict holds."""
    parser = argparse.ArgumentParser(description="Train with Muon and AdamW on a sharded model.")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.Linear(48, 8))
    fully_shard(model)
    optimizers = (
        Muon(param for param in model.parameters() if param.dim() == 2),
        AdamW((param for param in model.parameters() if param.dim() != 2), lr=0.01),
    )
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank its own batch
    x = torch.randn(32, 16, generator=generator)
    labels = torch.randint(8, (32,), generator=generator)
    for step in range(steps):
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1:3d}  loss {loss.item():.3f}")
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizers, options=on_rank_0)
    for name, entries in state.get("state", {}).items():
        print(name, {key: tuple(value.shape) for key, value in entries.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
