"""litgpt's LoRA fine-tuning with its `parallelize_fn`, by Fabric's `ModelParallelStrategy`.

Its `setup` asks for accelerators and a downloaded model: the steps of its `main` run one by one.
"""

import lightning as L
import torch
from common import FOLDER, HALF, STEPS, report, rows, whole
from lightning.fabric.strategies import ModelParallelStrategy
from litgpt.finetune.lora import parallelize_fn, save_lora_checkpoint
from litgpt.lora import GPT, Config, lora_filter, mark_only_lora_as_trainable
from litgpt.utils import chunked_cross_entropy
from torch import Tensor, nn
from torch.utils.data import DataLoader

CONFIG = Config(
    n_layer=2, n_embd=32, n_head=4, n_query_groups=2, padded_vocab_size=131, block_size=32,
    rotary_percentage=1.0, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    intermediate_size=48, lora_r=4, lora_query=True, lora_value=True, lora_projection=True,
    lora_mlp=True, lora_dropout=0.0,
)  # fmt: skip


def trainable(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The LoRA parameters among all."""
    return {name: value for name, value in values.items() if lora_filter(name, value)}


def build(seed: int) -> GPT:
    """A model with LoRA parameters, its other parameters frozen."""
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    for name, param in model.named_parameters():  # a fresh `lora_B` is zero
        if "lora_B" in name:
            nn.init.normal_(param, std=0.02)
    mark_only_lora_as_trainable(model)
    return model


def train(resumed: bool) -> nn.Module:
    """The trained model."""
    model = build(seed=int(resumed))
    model = fabric.setup_module(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    optimizer = fabric.setup_optimizers(optimizer)
    state = {"model": model, "optimizer": optimizer, "step_count": 0}
    if resumed:
        fabric.load(FOLDER / "half", state)
    loader = fabric.setup_dataloaders(DataLoader(rows(), batch_size=1))
    for index, batch in enumerate(loader):
        if index < 2 * state["step_count"]:
            continue
        accumulates = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            logits = model(batch["input_ids"], lm_head_chunk_size=4)
            logits[-1] = logits[-1][..., :-1, :]
            fabric.backward(chunked_cross_entropy(logits, batch["labels"][..., 1:]) / 2)
        if accumulates:
            continue
        optimizer.step()
        optimizer.zero_grad()
        state["step_count"] += 1
        if state["step_count"] == HALF and not resumed:
            fabric.save(FOLDER / "half", state)
        if state["step_count"] == STEPS:
            break
    return model


strategy = ModelParallelStrategy(
    parallelize_fn=parallelize_fn, data_parallel_size=2, tensor_parallel_size=1
)
fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
start = trainable(whole(build(seed=0)))
model = train(resumed=False)
trained = trainable(whole(model._forward_module))
save_lora_checkpoint(fabric, model._forward_module, FOLDER / "lora.pth")
fabric.barrier()
exported = torch.load(FOLDER / "lora.pth", weights_only=True)["model"]
resumed = trainable(whole(train(resumed=True)._forward_module))
report(
    model._forward_module, start=start, trained=trained, resumed=resumed,
    exported=trainable(exported),
)  # fmt: skip
