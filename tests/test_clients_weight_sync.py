"""Calls by which trainers of reinforcement learning read weights for their engines.

Each call is written as its codebase writes it, and reads a model with LoRA adapters by FSDP2 and by
shardc: names and values must be equal, and the models must train on alike.
"""

import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from fsdp2 import fsdp2, sharded
from models import Stack, seeded
from peft import LoraConfig, get_peft_model
from peft.utils.save_and_load import get_peft_model_state_dict
from ranks import on_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate
from transformers import LlamaConfig, LlamaForCausalLM

import shardc

CALLS = {}
TOKENS = torch.arange(14).view(2, 7)


def call(codebase):
    """Register a function `model -> {name: whole tensor}` under its name and codebase."""

    def register(function):
        CALLS[f"{codebase}: {function.__name__.replace('_', ' ')}"] = function
        return function

    return register


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# -- TRL 1.16 (f2cd577) ----------------------------------------------------------------------------


@call("TRL, sync_weights")
def merged_adapters_are_pushed(model):
    found = {}
    model.merge_adapter()
    for name, param in model.state_dict().items():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix in name or "original_module" in name:
            continue
        found[name.replace("modules_to_save.default.", "")] = param.full_tensor().clone()
    model.unmerge_adapter()
    return found


@call("TRL, AsyncGRPOTrainer")
def parameters_are_streamed(model):
    shapes = {name: list(param.shape) for name, param in model.named_parameters()}
    found = {}
    for name, param in model.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param.detach()
        assert list(full.shape) == shapes[name]
        found[name] = full
    return found


@call("TRL, SFTTrainer's loss in chunks")
def a_head_is_gathered_once(model):
    head = model.get_output_embeddings()
    weight = head.weight
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return {"logits": torch.ones(3, 16) @ weight.t()}


# -- verl 0.9 (b178a3c) ----------------------------------------------------------------------------


@call("verl, collect_lora_params")
def adapters_are_collected(model):
    with FSDP1.summon_full_params(model, writeback=False):
        params = get_peft_model_state_dict(model)
        return {name: whole(param).detach().cpu() for name, param in params.items()}


@call("verl, collect_lora_params of a base")
def a_base_is_collected_on_the_host(model):
    found = {}
    with FSDP1.summon_full_params(model, writeback=False):
        inner = model.base_model.model
        inner = inner.to("cpu")
        for name, param in inner.state_dict().items():
            if "_flat_param" not in name and "lora_" not in name:
                found[name.replace(".base_layer", "")] = whole(param).detach().cpu()
    return found


@call("verl, layered_summon_lora_params")
def adapters_are_collected_layer_by_layer(model):
    found = {}
    prefix = "base_model.model.model.layers."
    for name, module in model.named_modules():
        if not name.startswith(prefix) or "." in name.removeprefix(prefix):
            continue
        assert isinstance(module, FSDPModule)
        with FSDP1.summon_full_params(module, writeback=False):
            for inner, param in module.state_dict().items():
                if "lora_" in inner:  # PEFT 0.21 selects none of these names
                    found[f"{name}.{inner}"] = whole(param).detach().cpu()
            module._is_root = False
    return found


@call("verl, get_per_tensor_param")
def a_state_dict_is_read_after_the_model_has_left(model):
    model.to("cpu")
    params = model.state_dict()
    model.cpu()
    made = (
        (name, param.to("cpu", non_blocking=True).full_tensor())
        if isinstance(param, DTensor)
        else (name, param)
        for name, param in params.items()
    )
    return dict(made)


@call("verl, one_step_off_policy")
def weights_are_broadcast_by_their_keys(model):
    params, found = model.state_dict(), {}
    keys = [(name, param.size(), param.dtype) for name, param in params.items()]
    for name, shape, dtype in keys:
        assert name in params
        tensor = torch.empty(shape, dtype=dtype)
        origin = params[name]
        if hasattr(origin, "full_tensor"):
            origin = origin.full_tensor()
        if dist.get_rank() == 0:
            tensor.copy_(origin)
        dist.broadcast(tensor, src=0)
        found[name] = tensor
    return found


# -- SGLang (105cec0), slime -----------------------------------------------------------------------


@call("SGLang, update_weights, of verl's bridge")
def batches_are_serialized(model):
    batch = []
    for name, value in model.state_dict().items():
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(value.full_tensor() if isinstance(value, DTensor) else value)
        batch.append((name, buffer.getvalue()))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [name for name, _ in batch])
    assert gathered[0] == gathered[1]
    return {name: pickle.loads(data).clone() for name, data in batch}


@call("slime, UpdateWeight")
def buckets_wait_for_gathers(model):
    bucket = []
    for name, param in model.state_dict().items():
        assert param.numel() * param.element_size() > 0
        if isinstance(param, DTensor):
            everywhere = [Replicate()] * param.device_mesh.ndim
            param = param.redistribute(placements=everywhere, async_op=True).to_local()
        bucket.append((name, param))
    return {name: param.wait() if hasattr(param, "wait") else param for name, param in bucket}


# -- the two sides ---------------------------------------------------------------------------------


def adapted(shard, mesh):
    """A Llama with adapters, sharded block by block, and its optimizer."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), config)
    for layer in model.base_model.model.model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.01)


def step(model, optimizer):
    loss = model(input_ids=TOKENS + dist.get_rank(), labels=TOKENS).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_weights_are_read_as_by_fsdp2(mesh, name):
    found = {}
    for shard in (torch_fully_shard, shardc.fully_shard):
        model, optimizer = adapted(shard, mesh)
        step(model, optimizer)
        with torch.no_grad():
            given = {key: value.detach().clone() for key, value in CALLS[name](model).items()}
        kinds = {type(value) for value in given.values()}
        assert kinds == {torch.Tensor}, (shard, kinds)
        after = torch.stack([step(model, optimizer) for _ in range(2)])
        found[shard] = given, after
    (theirs, their_losses), (ours, our_losses) = found.values()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=2e-5, msg=key)
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shard", [fsdp2, sharded])
@on_ranks(2, device="sim")
def test_a_state_dict_is_read_after_its_model_has_left_the_device(mesh, shard):
    """verl's `get_per_tensor_param` takes the state dict, offloads the model, and gathers then."""
    model = shard(seeded(Stack).to("sim"), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    tokens = TOKENS.to("sim")
    want = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    for _ in range(2):
        params = model.state_dict()
        model.cpu()
        for state in (params, model.state_dict()):
            found = {name: value.to("sim").full_tensor().cpu() for name, value in state.items()}
            assert all(torch.equal(found[name], value) for name, value in want.items())
        model.to("sim")
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = want
        want = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
        assert not any(torch.equal(before[name], value) for name, value in want.items())


@on_ranks(2)
def test_a_model_of_fsdp2_moves_after_a_step_beside_a_sharded_model(mesh):
    """`to` swaps DTensors, which torch refuses where there are weak references to them."""
    step(*adapted(shardc.fully_shard, mesh))
    model, optimizer = adapted(torch_fully_shard, mesh)
    step(model, optimizer)
    model.to("cpu")
