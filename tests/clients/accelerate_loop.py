"""accelerate's loop with `fsdp_version=2`; rank 0 alone loads (`cpu_ram_efficient_loading`)."""

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from common import FOLDER, HALF, STEPS, llama, report, rows, whole
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import declare_accelerators


def train(resumed: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """The trained model, and its export."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = llama(seed=int(resumed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(rows(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumed:
        accelerator.load_state(str(FOLDER / "half"))
    for step, batch in enumerate(loader):
        if resumed and step < HALF:
            continue
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == HALF and not resumed:
            accelerator.save_state(str(FOLDER / "half"))
        if step + 1 == STEPS:
            break
    return model, accelerator.get_state_dict(model)


declare_accelerators()
start = whole(llama())
trained, exported = train(resumed=False)
values = whole(trained)
resumed, _ = train(resumed=True)
report(trained, start=start, trained=values, resumed=whole(resumed), exported=exported)
