"""Published models to plan for, built on the meta device: shapes only, no memory, in a second.

    shardc plan examples.models:llama3_8b --world-size 1024

Each function returns the model and small example inputs, as arguments by name, which is what a
function of your own must return too. Sizes are those of the models' published configurations
(https://huggingface.co/meta-llama, https://huggingface.co/mistralai); parameters are float32, as
training keeps them. transformers keeps the experts of a Mixtral block in two parameters, so they
are part of the block's unit.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

Built = tuple[nn.Module, dict[str, Tensor]]

BATCH, LENGTH = 1, 4096


def llama3_8b() -> Built:
    """Llama 3 8B: 32 blocks of 4096."""
    return _llama(4096, 14336, layers=32, heads=32)


def llama3_70b() -> Built:
    """Llama 3 70B: 80 blocks of 8192."""
    return _llama(8192, 28672, layers=80, heads=64)


def llama3_405b() -> Built:
    """Llama 3.1 405B: 126 blocks of 16384."""
    return _llama(16384, 53248, layers=126, heads=128)


def mixtral_8x7b() -> Built:
    """Mixtral 8x7B: 32 blocks of 4096, with 8 experts each."""
    config = MixtralConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    with torch.device("meta"):
        return MixtralForCausalLM(config), _inputs()


def _llama(hidden: int, inner: int, layers: int, heads: int) -> Built:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config), _inputs()


def _inputs() -> dict[str, Tensor]:
    """Token numbers and labels, (batch, length): the model returns its loss."""
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
