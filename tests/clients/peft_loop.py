"""PEFT's LoRA in accelerate's loop with `fsdp_version=2`."""

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from common import FOLDER, HALF, STEPS, WAYS, llama, report, rows, whole
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from trainers import declare_accelerators


def adapted(seed: int) -> PeftModel:
    """A model with adapters; `seed` changes the adapters only."""
    base = llama()
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["lm_head"]
    )
    return get_peft_model(base, config)


def train(resumed: bool) -> PeftModel:
    """The trained model; adapters that are trained from the start are exported."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = adapted(seed=int(resumed))
    if "compiled" in WAYS:
        model.compile(backend="shardc", options={"executor": "eager"})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loader = DataLoader(rows(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumed:
        accelerator.load_state(str(FOLDER / "half"))
    for step, batch in enumerate(loader):
        if resumed and step < HALF:
            continue
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == HALF and not resumed:
            accelerator.save_state(str(FOLDER / "half"))
        if step + 1 == STEPS:
            break
    if not resumed:
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            model.save_pretrained(FOLDER / "adapters", state_dict=state)
        accelerator.wait_for_everyone()
    return model


declare_accelerators()
start = whole(adapted(seed=0))
trained = train(resumed=False)
report(
    trained,
    start=start,
    trained=whole(trained),
    resumed=whole(train(resumed=True)),
    exported=whole(PeftModel.from_pretrained(llama(), FOLDER / "adapters")),
)
