"""PEFT around sharded models: LoRA and DoRA train, save, load and merge as unsharded."""

import tempfile

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from models import full
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import on_ranks
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import NF4Tensor, to_nf4
from transformers import LlamaConfig, LlamaForCausalLM

from shardc import (
    ShardTensor,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    summon_full_params,
)

EAGER = {"executor": "eager"}


def base() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


def adapted(dora: bool, seed: int = 1) -> PeftModel:
    model = base()
    torch.manual_seed(seed)
    config = LoraConfig(
        r=3, target_modules=["q_proj", "down_proj"], use_dora=dora, init_lora_weights=False
    )
    return get_peft_model(model, config)


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, call: nn.Module, ranks: list[int]) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        for rank in ranks:
            loss = call(input_ids=tokens(rank), labels=tokens(rank)).loss
            (loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_both(model: nn.Module, plain: nn.Module, compiled: bool) -> None:
    """`model` on each rank's tokens, `plain` on those of all."""
    call = torch.compile(model, backend="shardc", options=EAGER) if compiled else model
    train(model, call, [dist.get_rank()])
    train(plain, plain, list(range(dist.get_world_size())))


def trained(dora: bool, compiled: bool = False) -> tuple[nn.Module, nn.Module]:
    """A sharded model, and what one process trains."""
    plain, model = adapted(dora), adapted(dora)
    fully_shard(model, units="auto")
    train_both(model, plain, compiled)
    return model, plain


def check_equal(model: nn.Module, plain: nn.Module) -> None:
    want = dict(plain.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == want.keys()
    for name, param in found.items():
        torch.testing.assert_close(full(param), want[name], rtol=1e-4, atol=1e-5)


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(5)).logits.detach()


@on_ranks(2)
def test_adapters_train_as_unsharded(mesh):
    """DoRA, compiled; uncompiled: see below; LoRA: see test_integrations."""
    model, plain = trained(True, compiled=True)
    start = dict(adapted(True).named_parameters())
    for name, param in model.named_parameters():
        assert isinstance(param, ShardTensor)
        assert torch.equal(full(param), start[name]) != param.requires_grad, name
    check_equal(model, plain)


@on_ranks(2)
def test_adapters_are_saved_and_loaded(mesh):
    model, plain = trained(dora=True)
    folder = tempfile.mkdtemp()
    with pytest.raises(RuntimeError, match="full_state_dict=True"):
        model.save_pretrained(f"{folder}/refused")
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    model.save_pretrained(f"{folder}/state", state_dict=state)
    with summon_full_params(model):
        model.save_pretrained(f"{folder}/summoned")
    for name in ("state", "summoned"):
        check_equal(PeftModel.from_pretrained(base(), f"{folder}/{name}", is_trainable=True), plain)
        other = fully_shard(adapted(True, seed=2), units="auto")
        with pytest.raises(AssertionError):
            check_equal(other, plain)
        other.load_adapter(f"{folder}/{name}", "default", is_trainable=True)
        check_equal(other, plain)


@pytest.mark.parametrize("dora, summoned", [(False, False), (True, False), (True, True)])
@on_ranks(2)
def test_adapters_are_merged(mesh, dora, summoned):
    def inside():
        return summon_full_params(model) if summoned else torch.no_grad()

    model, plain = trained(dora)
    want = logits(plain)
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = full(weight).clone()
    with inside():
        model.merge_adapter()
    assert not torch.allclose(full(weight), before)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    with inside():
        model.unmerge_adapter()
    torch.testing.assert_close(full(weight), before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    with inside():
        merged = model.merge_and_unload()
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(logits(merged), want, rtol=1e-4, atol=1e-4)
    alone, options = base(), StateDictOptions(full_state_dict=True)
    alone.load_state_dict(get_model_state_dict(merged, options=options))
    torch.testing.assert_close(logits(alone), want, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_embeddings_are_resized_before_sharding(mesh):
    model = fully_shard(adapted(False), units="auto")
    with pytest.raises(RuntimeError, match=r"resize_token_embeddings.*before fully_shard"):
        model.resize_token_embeddings(40)
    want = logits(adapted(False))
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    model = adapted(False)
    model.resize_token_embeddings(40)
    fully_shard(model, units="auto")
    train(model, model, [dist.get_rank()])
    assert logits(model).shape == (2, 7, 40)


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_embeddings_that_stayed_gathered_are_not_resized_in_silence(mesh, compiled):
    """After a forward its module gives the full weight, of which `.data` is replaced."""
    model = fully_shard(adapted(False), units="auto", reshard_after_forward=False)
    call = torch.compile(model, backend="shardc", options=EAGER) if compiled else model
    call(input_ids=tokens(0), labels=tokens(0))
    with pytest.raises(RuntimeError, match=r"resize_token_embeddings.*before fully_shard"):
        model.resize_token_embeddings(40)
        call(input_ids=tokens(0), labels=tokens(0))


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_adapters_that_come_later(mesh, compiled):
    """Nothing reduces their gradients: the step is refused, until they are sharded, too."""
    model, plain = (adapted(False) for _ in range(2))
    fully_shard(model, units="auto")
    second = LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    for each in (model, plain):
        torch.manual_seed(3)
        each.add_adapter("second", second)
        each.set_adapter("second")
    start = {name: full(p).clone() for name, p in model.named_parameters()}
    call = torch.compile(model, backend="shardc", options=EAGER) if compiled else model
    with pytest.raises(RuntimeError, match=r"'base_model.*q_proj\.lora_A\.second\.weight'.*Add it"):
        train(model, call, [dist.get_rank()])
    for name, param in model.named_parameters():
        assert torch.equal(full(param), start[name]), name
    for module in model.modules():
        if hasattr(module, "lora_A") and "second" in module.lora_A:
            fully_shard([module.lora_A["second"], module.lora_B["second"]])
    model.zero_grad()
    train_both(model, plain, compiled)
    check_equal(model, plain)


# -- quantised bases -------------------------------------------------------------------------------


def quantised(library: str) -> PeftModel:
    """A Llama whose linear weights are NF4, each whole on every rank, with adapters."""
    model = base()
    for name, module in list(model.named_modules()):
        if not name.endswith("_proj"):
            continue
        if library == "bitsandbytes":
            made = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, quant_type="nf4",
                compute_dtype=torch.float32,
            )  # fmt: skip
            made.load_state_dict(module.state_dict())
            model.set_submodule(name, made.to("cpu"))
        else:
            weight = to_nf4(module.weight.detach(), block_size=16, scaler_block_size=4)
            module.weight = nn.Parameter(weight, requires_grad=False)
    torch.manual_seed(1)
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


def is_quantised(param: nn.Parameter) -> bool:
    return isinstance(param, bitsandbytes.nn.Params4bit) or type(param.data) is NF4Tensor


@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_quantised_bases_under_sharded_adapters(mesh, library, compiled):
    """QLoRA: adapters and the rest are sharded; NF4 weights are left alone, or cut, too."""
    model, plain, cut = quantised(library), quantised(library), library == "torchao"
    bases = [name for name, param in model.named_parameters() if is_quantised(param)]
    assert len(bases) == 14
    whole = None if cut else [model.get_parameter(name) for name in bases]
    fully_shard(model, units="auto", ignored_params=whole)
    assert {isinstance(model.get_parameter(name), ShardTensor) for name in bases} == {cut}
    train_both(model, plain, compiled)
    start, want = (dict(each.named_parameters()) for each in (quantised(library), plain))
    for name, param in model.named_parameters():
        if isinstance(param, ShardTensor) and name not in bases:
            assert torch.equal(want[name], start[name]) != param.requires_grad, name
            torch.testing.assert_close(full(param), want[name], rtol=1e-4, atol=1e-5)
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder, state_dict=state)
    loaded = PeftModel.from_pretrained(quantised(library).unload(), folder, is_trainable=True)
    torch.testing.assert_close(logits(loaded), logits(plain), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_weights_of_bitsandbytes_are_not_cut(mesh):
    model = quantised("bitsandbytes")
    with pytest.raises(NotImplementedError, match=r"q_proj.*ignored_params"):
        fully_shard(model, units="auto")
