"""torchao's float8 training, emulated on the CPU; weights are gathered in float8.

After each step, FSDP2 computes the scales of all weights together; shardc does so in its gathers.
"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import FOLDER, HALF, STEPS, WAYS, llama, report, rows, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

CONFIG = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)


def built(seed: int) -> nn.Module:
    """A sharded model with float8 weights in its blocks."""
    model = llama(seed)
    convert_to_float8_training(model.model.layers, config=CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if "compiled" in WAYS:
        model.compile(backend="shardc", options={"executor": "eager"})
    return model


def train(resumed: bool) -> nn.Module:
    """The trained model."""
    model = built(seed=int(resumed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if resumed:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=FOLDER / "half")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        precompute_float8_dynamic_scale_for_fsdp(model)
    data = rows()
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    for step, batch in enumerate(loader):
        if resumed and step < HALF:
            continue
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        if step + 1 == HALF and not resumed:
            weights, states = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=FOLDER / "half")
        if step + 1 == STEPS:
            break
    return model


dist.init_process_group("gloo")
start = whole(llama())
trained = train(resumed=False)
report(
    trained,
    start=start,
    trained=whole(trained),
    resumed=whole(train(resumed=True)),
    exported=get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True)),
)
