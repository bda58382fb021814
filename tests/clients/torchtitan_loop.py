"""torchtitan's `Trainer` on its debug model of Llama 3: `apply_fsdp_to_decoder`, chunked loss, DCP.

torchtitan knows accelerators only: its names for the device are bound to the CPU, without figures
of memory. Attention is its `ScaledDotProductAttention`, because the compiled FlexAttention of its
language models has no backward on CPUs. Its default, `spmd_types`, needs a newer torch than 2.13
for FSDP2, too. The data set and the tokenizer are small ones.

It computes in float32, or by torchtitan's default in bf16 ("bf16").
"""

import json
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import FOLDER, HALF, STEPS, WAYS, report, whole
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

CPU = SimpleNamespace(
    **vars(torch.cpu)
    | dict(
        current_device=lambda: 0,
        empty_cache=lambda: None,
        get_device_name=lambda device=None: "CPU",
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=2**34),
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda: None,
        set_device=lambda device: None,
    )
)
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: CPU
if not hasattr(dist, "set_timeout"):  # later torch has it
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

DEBUG_MODEL = llama3_debugmodel
WORDS = [f"w{number}" for number in range(64)]


def write_data() -> None:
    """Write a tokenizer of words, and rows of words."""
    made = torch.Generator().manual_seed(5)
    drawn = torch.randint(0, len(WORDS), (64, 100), generator=made).tolist()
    (FOLDER / "data").mkdir(exist_ok=True)
    rows = [json.dumps({"text": " ".join(WORDS[at] for at in row)}) for row in drawn]
    (FOLDER / "data" / "data.json").write_text("\n".join(rows))
    ids = {word: at for at, word in enumerate(["<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (FOLDER / "assets").mkdir(exist_ok=True)
    tokenizer.save(str(FOLDER / "assets" / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (FOLDER / "assets" / "tokenizer_config.json").write_text(json.dumps(special))


def config(folder: str, seed: int) -> Trainer.Config:
    """The settings of the debug model, with short rows."""
    made = DEBUG_MODEL()
    for layer in made.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    made.hf_assets_path = str(FOLDER / "assets")
    made.dump_folder = str(FOLDER / folder)
    made.dataloader = HuggingFaceTextDataLoader.Config(
        dataset="c4_test", dataset_path=str(FOLDER / "data")
    )
    made.training.local_batch_size = 2
    made.training.global_batch_size = 8
    made.training.seq_len = 64
    made.training.steps = STEPS
    if "bf16" not in WAYS:
        made.training.mixed_precision_param = "float32"
    made.training.max_norm = 0.5
    made.training.disable_cuda_graphs = True
    made.optimizer.implementation = "foreach"
    made.parallelism.spmd_backend = "partial_dtensor"
    made.debug.seed = seed
    made.checkpoint.enable = True
    made.checkpoint.interval = HALF
    made.checkpoint.initial_load_path = str(FOLDER / "seed")
    made.checkpoint.last_save_model_only = made.checkpoint.last_save_in_hf = True
    made.validator.enable = False
    if "compiled" in WAYS:
        made.compile.enable = True
        made.compile.components = ["model"]
        made.compile.backend = "shardc"
    change(made)
    return made


def change(made: Trainer.Config) -> None:
    """Change settings: other scripts put a function of their own here."""


def clip_by_rounded_norms() -> None:
    """Round the total norm by which gradients are clipped to bf16.

    A rank has other parts of a gradient by FSDP2 than by shardc, and sums their squares in float32.
    So the last bit of a norm may differ; a step in bf16 makes a quarter of the parameters' way of
    it (`benchmarks/LOG.md`). The rounded norm is the same, and so is each bit of all other values.
    """
    clip = nn.utils.clip_grads_with_norm_

    def clip_rounded(parameters: object, most: float, norm: Tensor, *rest: object) -> None:
        clip(parameters, most, norm.bfloat16().float(), *rest)

    nn.utils.clip_grads_with_norm_ = clip_rounded


def unsharded(seed: int) -> nn.Module:
    """The debug model on this process."""
    torch.manual_seed(seed)
    made = config("", seed)
    made.model_spec.model.update_from_config(config=made)
    model = made.model_spec.model.build()
    model.init_weights()
    return model


def build(seed: int, load_step: int = -1) -> Trainer:
    """A trainer; FSDP2 must sum on gloo, which cannot multiply."""
    made = config("run", seed)
    made.checkpoint.load_step = load_step
    trainer = made.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return trainer


def exported(trainer: Trainer) -> dict[str, Tensor]:
    """The parameters that the last step writes, in safetensors with Hugging Face's names or not."""
    last, model = FOLDER / "run" / "checkpoint" / f"step-{STEPS}", unsharded(seed=3)
    if not trainer.config.checkpoint.last_save_in_hf:
        dcp.load(model.state_dict(), checkpoint_id=last, no_dist=True)
        return whole(model)
    adapter = trainer.checkpointer.sd_adapter
    written: dict[str, Tensor] = {}
    for file in last.glob("*.safetensors"):
        written |= load_file(file)
    model.load_state_dict(adapter.from_hf(written))
    return whole(model)


def main() -> None:
    """Train, resume and export."""
    clip_by_rounded_norms()
    write_data()
    if os.environ["RANK"] == "0":
        dcp.save(unsharded(seed=0).state_dict(), checkpoint_id=FOLDER / "seed", no_dist=True)
    trainer = build(seed=1)
    model = trainer.model_parts[0]
    trainer.train()
    trained, found = whole(model), exported(trainer)
    again = build(seed=2, load_step=HALF)
    again.train()
    resumed = whole(again.model_parts[0])
    report(model, start=whole(unsharded(seed=0)), trained=trained, resumed=resumed, exported=found)


if __name__ == "__main__":
    main()
