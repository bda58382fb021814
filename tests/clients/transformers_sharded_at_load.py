"""transformers' models sharded as they are loaded (`DistributedConfig`), in a loop of one's own.

The model starts from files of `save_pretrained`, and resumes from a distributed checkpoint.
"""

import torch
import torch.distributed as dist
from common import FOLDER, HALF, STEPS, WAYS, llama, report, rows, whole
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import (
    load_optimizer_distributed,
    save_optimizer_distributed,
)


def train(name: str, resumed: bool) -> nn.Module:
    """The trained model, loaded from a folder."""
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, distributed_config=sharding)
    if "compiled" in WAYS:
        model.compile(backend="shardc", options={"executor": "eager"}, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if resumed:
        load_optimizer_distributed(model, optimizer, str(FOLDER / "half_optimizer"))
    data = rows()
    for step, batch in enumerate(DataLoader(data, 2, sampler=DistributedSampler(data))):
        if resumed and step < HALF:
            continue
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == HALF and not resumed:
            model.save_pretrained(FOLDER / "half", distributed_checkpoint=True)
            save_optimizer_distributed(model, optimizer, str(FOLDER / "half_optimizer"))
        if step + 1 == STEPS:
            break
    return model


dist.init_process_group("gloo")
start = llama()
if dist.get_rank() == 0:
    start.save_pretrained(FOLDER / "start")
dist.barrier()
trained = train("start", resumed=False)
values = whole(trained)
trained.save_pretrained(FOLDER / "export")
resumed = train("half", resumed=True)
report(
    trained,
    start=whole(start),
    trained=values,
    resumed=whole(resumed),
    exported=load_file(FOLDER / "export" / "model.safetensors"),
)
