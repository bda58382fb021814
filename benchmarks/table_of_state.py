"""Rows of the table of optimizer state (`tables.py`): what the fullest rank holds, beside 1/W.

A Llama of 16 blocks, sharded over W ranks, takes one step. What a rank holds are the bytes of
all tensors of the optimizer's state; 1/W is what the unsharded optimizer holds, divided by W.
"""

from collections.abc import Iterator
from typing import Any

import pytorch_optimizer as more
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from transformers import LlamaConfig, LlamaForCausalLM

import shardc

WORLDS = (2, 4)

# name: (class, settings, whether it is given matrices of the blocks only)
STATES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "AdamW": (optim.AdamW, {}, False),
    "AdamW, as whole tensors": (optim.AdamW, {}, False),
    "Muon": (optim.Muon, {}, True),
    "Adafactor": (optim.Adafactor, {}, False),
    "SOAP": (more.SOAP, {"max_precondition_dim": 512}, False),
    "Prodigy, one owner": (more.Prodigy, {}, False),
}


def _llama() -> nn.Module:
    """Proportions of Llama 3 8B; as there, SOAP leaves the side of the vocabulary alone."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=448,
            num_hidden_layers=16,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
    )


def state_cells(mesh: Any) -> dict[str, tuple[str, str]]:
    """By optimizer: how shardc runs it, and the fullest rank's bytes / (all bytes / W)."""
    cells = {}
    for name, (make, settings, matrices) in STATES.items():
        plain, model = _llama(), shardc.fully_shard(_llama(), mesh=mesh, units="auto")
        reference = make(_chosen(plain, matrices), **settings)
        is_whole = name != "AdamW"
        optimizer = (
            shardc.WholeTensorOptimizer(make, _chosen(model, matrices), **settings)
            if is_whole
            else make(_chosen(model, matrices), **settings)
        )
        for one, each in ((plain, reference), (model, optimizer)):
            for p in one.parameters():
                p.grad = torch.ones_like(p)
            each.step()
        held = [_nbytes(inner) for inner in (optimizer.inners if is_whole else [optimizer])]
        fullest = torch.tensor(float(sum(held)))
        dist.all_reduce(fullest, dist.ReduceOp.MAX)
        how = "`WholeTensorOptimizer`" if is_whole else "as it is"
        cells[name] = how, f"{float(fullest) / (_nbytes(reference) / mesh.size()):.3f}"
    return cells


def _chosen(model: nn.Module, matrices: bool) -> list[nn.Parameter]:
    return [
        p
        for name, p in model.named_parameters()
        if not matrices or (p.dim() == 2 and "layers" in name)
    ]


def _nbytes(optimizer: Any) -> int:
    return sum(t.nbytes for state in optimizer.state.values() for t in _tensors(state))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, shardc.ShardTensor):
        yield value.to_local()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)
