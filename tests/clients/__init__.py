"""Training codebases, unchanged, with shardc under FSDP2's names (`SHARDC_AS_FSDP2=1`).

Each script is a loop as a user of the codebase writes it. It trains, saves half-way, resumes, and
exports, on two ranks: once by FSDP2 and once by shardc.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
RANKS = 2


@dataclass(frozen=True)
class Client:
    """A codebase and the script of its loop.

    Attributes:
        package: its name on PyPI; its import is looked for under `module`.
        compiles: whether the loop leaves the backend of `torch.compile` to the user.
        ways: the words that the script gets in each run.
        bound: the largest difference of a parameter, as a part of its way in training.
    """

    script: str
    package: str
    module: str = ""
    compiles: bool = False
    ways: tuple[str, ...] = ()
    bound: float = 1e-3

    @property
    def is_there(self) -> bool:
        return importlib.util.find_spec(self.module or self.package) is not None

    @property
    def version(self) -> str:
        return version(self.package)


CLIENTS = {
    "accelerate, fsdp_version=2": Client("accelerate_loop.py", "accelerate"),
    "transformers, Trainer": Client("trainer_loop.py", "transformers", compiles=True),
    "transformers, DistributedConfig": Client(
        "transformers_sharded_at_load.py", "transformers", compiles=True
    ),
    "TRL, SFTTrainer": Client("trl_sft.py", "trl", compiles=True),
    "TRL, GRPOTrainer": Client("trl_grpo.py", "trl", compiles=True),
    "PEFT, LoRA by accelerate": Client("peft_loop.py", "peft", compiles=True),
    "Lightning, Trainer": Client("lightning_trainer.py", "lightning", compiles=True),
    "Lightning, Fabric": Client("lightning_fabric.py", "lightning", compiles=True),
    "torchao, float8": Client("torchao_float8.py", "torchao", compiles=True),
    "torchtune, full_finetune_distributed": Client("torchtune_loop.py", "torchtune", compiles=True),
    "torchtune, optimizer_in_bwd": Client(
        "torchtune_loop.py", "torchtune", compiles=True, ways=("in_backward",)
    ),
    "litgpt, LoRA": Client("litgpt_loop.py", "litgpt"),
    "verl, FSDP2 functions": Client("verl_loop.py", "verl"),
    "OLMo-core, train module": Client("olmo_core_loop.py", "ai2-olmo-core", "olmo_core"),
    "torchtitan, Trainer": Client("torchtitan_loop.py", "torchtitan", compiles=True, bound=5e-3),
    "torchtitan, Trainer in bf16": Client(
        "torchtitan_loop.py", "torchtitan", ways=("bf16",), bound=0.0
    ),
    "torchtitan, experts in bf16": Client(
        "torchtitan_moe_loop.py", "torchtitan", ways=("bf16",), bound=0.0
    ),
}


def run(client: Client, *ways: str, by_shardc: bool) -> dict[str, Any]:
    """The report of a script, run on two ranks; the end of its output is in the error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", str(HERE / client.script), folder]
        command += [*client.ways, *ways]
        env = os.environ | {"SHARDC_AS_FSDP2": str(int(by_shardc)), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{client.script} {' '.join(ways)}: {done.stderr[-3000:]}")
        report: dict[str, Any] = torch.load(Path(folder, "report.pt"), weights_only=True)
        return report


def faults(client: Client, found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, str]:
    """For each column of the table, how shardc's report falls short of FSDP2's; "" where it holds.

    Resumed and exported values must have the bits of the trained ones.
    """
    return {
        "trains as by FSDP2": "; ".join(_differing(client, found, wanted)),
        "resumes": "; ".join(_other_bits(found["trained"], found["resumed"])),
        "exports": "; ".join(_other_bits(found["trained"], found["exported"])),
    }


def _differing(client: Client, found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    ours, theirs, start = found["trained"], wanted["trained"], wanted["start"]
    if (found["classes"], wanted["classes"]) != (["ShardTensor"], ["DTensor"]):
        yield f"parameters were {found['classes']} and {wanted['classes']}"
    if ours.keys() != theirs.keys():
        yield f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
        return
    for name, value in theirs.items():
        way = (value - start[name]).abs().max().item()
        off = (value - ours[name]).abs().max().item()
        if off > client.bound * way:
            yield f"{name} is {off:.2g} off, of {way:.2g}"


def _other_bits(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> Iterator[str]:
    if wanted.keys() != found.keys():
        yield f"names differ: {sorted(wanted.keys() ^ found.keys())}"
    yield from (n for n in wanted.keys() & found.keys() if not torch.equal(wanted[n], found[n]))
