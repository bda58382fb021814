"""Tiny instances of models that nobody here wrote, each with a batch maker.

Two blocks, a hidden size around 32, no dropout: the architectures are real, the sizes are not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 61


TRACES_DEEPCOPY = not torch.__version__.startswith("2.11.")
"""Dynamo 2.11 breaks the graph at `copy.deepcopy`, which encoder-decoders of transformers call."""


@dataclass(frozen=True)
class Case:
    """One model: how to build it, and the keyword arguments of its forward for a seed.

    Attributes:
        fullgraph: whether Dynamo captures the unsharded model, too, without a graph break.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]
    fullgraph: bool = True


# -- batches -------------------------------------------------------------------------------------


def _ids(seed: int, length: int = 9) -> Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def _values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def language(seed: int, length: int = 9) -> dict[str, Tensor]:
    """Tokens and labels."""
    return {"input_ids": _ids(seed, length), "labels": _ids(seed + 1000, length)}


def _padded(seed: int) -> dict[str, Tensor]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 7:] = 0
    return {**language(seed), "attention_mask": mask}


def _pictures(seed: int) -> dict[str, Tensor]:
    return {"pixel_values": _values(seed, 2, 3, 16, 16), "labels": _ids(seed, 1)[:, 0] % 5}


def _sound(seed: int) -> dict[str, Tensor]:
    return {"input_features": _values(seed, 2, 8, 24), "labels": _ids(seed, 7)}


def _sequence(seed: int) -> dict[str, Tensor]:
    return {"x": _values(seed, 2, 6, 20), "target": _values(seed + 1000, 2, 6, 20)}


# -- transformers --------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """Tied embeddings, weights stored transposed (Conv1D); the graph breaks before its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": VOCAB}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **special))


def llama(**kwargs: Any) -> nn.Module:
    """Grouped-query attention, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_DECODER, **kwargs))


_DECODER = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 16,
}  # fmt: skip


def _bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=44,
        vocab_size=VOCAB, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def bert_backbone() -> nn.Module:
    """BERT without a head, for inference."""
    from transformers import BertModel

    return BertModel(_bert_config()).eval()


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=44, num_layers=2, num_heads=4, vocab_size=VOCAB, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=44,
        image_size=16, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=5, problem_type="single_label_classification",
    )  # fmt: skip
    return ViTForImageClassification(config)


def mixtral(experts: int = 3, **kwargs: Any) -> nn.Module:
    """Experts, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    chosen = {"num_local_experts": experts, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**_DECODER, **chosen, **kwargs))


def _mixtral_balanced() -> nn.Module:
    """With the load-balancing loss: it reads router logits through hooks, taking a lock first."""
    return mixtral(output_router_logits=True)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=44, decoder_ffn_dim=44, vocab_size=VOCAB,
        num_mel_bins=8, max_source_positions=12, max_target_positions=16, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=VOCAB, time_step_rank=3
    )
    return MambaForCausalLM(config)


# -- torch.nn ------------------------------------------------------------------------------------


class Regression(nn.Module):
    """A sequence model between two linear layers, with a squared-error loss."""

    def __init__(self, body: nn.Module, dim: int) -> None:
        super().__init__()
        self.inner, self.body, self.outer = nn.Linear(20, dim), body, nn.Linear(dim, 20)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.body(self.inner(x))
        return F.mse_loss(self.outer(x[0] if isinstance(x, tuple) else x), target)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(20, 2, 44, dropout=0.0, batch_first=True)
    return Regression(nn.TransformerEncoder(layer, 2), 20)


def _lstm() -> nn.Module:
    return Regression(nn.LSTM(22, 22, num_layers=2, batch_first=True), 22)


class Residual(nn.Module):
    """Convolutions with batch norm around an identity; the first grouped."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, groups=2, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(Residual(6), Residual(6))
        self.head = nn.Linear(6, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(pixel_values)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


MODELS: dict[str, Case] = {
    "gpt2": Case(gpt2, language, fullgraph=False),
    "llama": Case(llama, _padded),
    "bert": Case(_bert, _padded),
    "t5": Case(_t5, language, fullgraph=TRACES_DEEPCOPY),
    "vit": Case(_vit, _pictures),
    "mixtral": Case(mixtral, language),
    "mixtral-balanced": Case(_mixtral_balanced, language, fullgraph=False),
    "whisper": Case(_whisper, _sound, fullgraph=TRACES_DEEPCOPY),
    "mamba": Case(_mamba, lambda seed: language(seed, length=3)),
    "encoder": Case(_encoder, _sequence),
    "lstm": Case(_lstm, _sequence, fullgraph=False),
    "convnet": Case(ConvNet, _pictures),
}
