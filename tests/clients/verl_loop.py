"""verl's functions on FSDP2 models, in the order of its `FSDPEngine`, and its checkpoint manager.

verl knows accelerators only: CPUs are entered into its registry of platforms.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from common import FOLDER, HALF, STEPS, llama, report, rows, whole
from torch import nn
from torch.distributed.tensor import DTensor
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

torch.cpu.empty_cache = lambda: None
torch.cpu.set_rng_state = torch.set_rng_state


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):
    """CPUs as one of verl's platforms."""

    device_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"


os.environ["VERL_PLATFORM"] = "cpu"

from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402
from verl.utils.fsdp_utils import (  # noqa: E402
    MixedPrecisionPolicy,
    apply_fsdp2,
    fsdp2_clip_grad_norm_,
    fsdp2_load_full_state_dict,
    get_fsdp_full_state_dict,
    get_init_weight_context_manager,
    get_shard_placement_fn,
    load_fsdp_model_to_gpu,
    load_fsdp_optimizer,
    offload_fsdp_model_to_cpu,
    offload_fsdp_optimizer,
)
from verl.workers.engine.fsdp.utils import create_device_mesh  # noqa: E402


def build(seed: int) -> nn.Module:
    """A sharded model: rank 0 has the values, the others start on the meta device."""
    mesh = create_device_mesh(dist.get_world_size(), -1)
    with get_init_weight_context_manager(use_meta_tensor=True, mesh=mesh)():
        model = llama(seed)
    full_state = model.state_dict()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    sharding = {
        "mesh": mesh, "mp_policy": policy, "offload_policy": None, "reshard_after_forward": True,
        "shard_placement_fn": get_shard_placement_fn(dist.get_world_size()),
    }  # fmt: skip
    apply_fsdp2(model, sharding, {"forward_prefetch": True})
    fsdp2_load_full_state_dict(model, full_state, mesh, None)
    return model


def train(resumed: bool) -> nn.Module:
    """The trained model; it leaves for the CPU, and comes back, between the steps."""
    model = build(seed=int(resumed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    manager = FSDPCheckpointManager(model, optimizer, scheduler)
    if resumed:
        manager.load_checkpoint(str(FOLDER / "half"))
    first = HALF if resumed else 0
    for step in range(first, STEPS):
        load_fsdp_model_to_gpu(model)
        load_fsdp_optimizer(optimizer, "cpu")
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            row = rows()[4 * step + 2 * micro + dist.get_rank()]["input_ids"][None]
            (model(input_ids=row, labels=row, use_cache=False).loss / 2).backward()
        norm = fsdp2_clip_grad_norm_(model.parameters(), max_norm=0.5)
        assert torch.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        scheduler.step()
        if step + 1 == HALF and not resumed:
            manager.save_checkpoint(str(FOLDER / "half"))
        offload_fsdp_model_to_cpu(model)
        offload_fsdp_optimizer(optimizer)
    return model


dist.init_process_group("gloo")
start = whole(llama())
model = train(resumed=False)
trained = whole(model)
exported = get_fsdp_full_state_dict(model)
sent = {
    name: param.to("cpu", non_blocking=True).full_tensor() if isinstance(param, DTensor) else param
    for name, param in model.state_dict().items()
}
assert sent.keys() == trained.keys()
assert all(torch.equal(sent[name], trained[name]) for name in trained)
resumed = whole(train(resumed=True))
report(model, start=start, trained=trained, resumed=resumed, exported=exported)
