"""Parts that the clients' scripts share: a model, its batches, and a report of a run."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(sys.argv[1])
"""The folder of one run, for its checkpoints and its report."""

WAYS = frozenset(sys.argv[2:])
"""How a script runs: "compiled", where the client leaves the backend to the user."""

HALF, STEPS = 2, 4


def llama(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    """A Llama of two blocks; equal on all ranks."""
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | settings))


def rows(count: int = 16, length: int = 9, vocabulary: int = 131) -> list[dict[str, Tensor]]:
    """Training rows of tokens; equal on all ranks."""
    made = torch.Generator().manual_seed(5)
    drawn = torch.randint(0, vocabulary, (count, length), generator=made)
    return [{"input_ids": row, "labels": row} for row in drawn]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters of a model, by the names of a checkpoint; every rank must call it."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (
            param.full_tensor() if isinstance(param, DTensor) else param
        )
        .detach()
        .clone()
        for name, param in model.named_parameters()
    }


def report(model: nn.Module, **found: dict[str, Tensor]) -> None:
    """Write the results of a run from rank 0: whole values by name.

    Args:
        model: a trained model; the classes of its parameters tell FSDP2 from shardc.
        found: "start", "trained", "resumed" and "exported".
    """
    classes = sorted({type(param).__name__ for param in model.parameters()})
    if dist.get_rank() == 0:
        torch.save({"classes": classes, **found}, FOLDER / "report.pt")
    dist.barrier()
    dist.destroy_process_group()
