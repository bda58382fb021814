"""Checkpoints as a training run uses them: stopped and resumed, killed while saving, exported."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Stack, full, seeded, tokens
from ranks import TIMEOUT, Ranks, on_ranks, run_on_ranks
from real_models import gpt2, language
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import AdamW

from shardc import (
    ShardTensor,
    fully_shard,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

BATCH = 6


def build(mesh, seed: int) -> tuple[Stack, AdamW]:
    model = fully_shard(seeded(lambda: Stack(tied=True), seed), mesh=mesh, units="auto")
    return model, AdamW(model.parameters(), lr=0.01 * (seed + 1))


def train(mesh, model, optimizer, steps) -> None:
    """Every rank takes its share of a global batch that is the same for any world size."""
    share = slice(
        mesh.get_rank() * BATCH // mesh.size(), (mesh.get_rank() + 1) * BATCH // mesh.size()
    )
    for number in steps:
        x, y = (tokens(seed, (BATCH, 7))[share] for seed in (number, number + 50))
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer) -> dict[str, torch.Tensor]:
    state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"model.{name}": value for name, value in state[0].items()}
    for name, entries in state[1]["state"].items():
        found |= {f"{name}.{key}": value for key, value in entries.items()}
    return found


def save(mesh, folder: str) -> None:
    """Train two steps, save, train two more; write down how that ended."""
    model, optimizer = build(mesh, 0)
    train(mesh, model, optimizer, range(2))
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=f"{folder}/step-2")
    train(mesh, model, optimizer, range(2, 4))
    ended = everything(model, optimizer)
    if mesh.get_rank() == 0:
        torch.save(ended, f"{folder}/ended.pt")


def resume(mesh, folder: str, exact: bool) -> None:
    model, optimizer = build(mesh, 3)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    newest = max(path.parent for path in Path(folder).glob("step-*/.metadata"))
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    ended = torch.load(f"{folder}/ended.pt")
    before = everything(model, optimizer)
    assert not torch.equal(before["model.head.weight"], ended["model.head.weight"])
    train(mesh, model, optimizer, range(2, 4))
    after = everything(model, optimizer)
    assert after.keys() == ended.keys()
    for name, value in ended.items():
        if exact:
            assert torch.equal(after[name], value), name
        else:
            torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-5)


def test_resume(tmp_path: Path) -> None:
    """At the same world size to the last bit, at another within the order of reductions."""
    run_on_ranks(2, "test_resume", "save", {"folder": str(tmp_path)})
    for world in (2, 3):
        run = {"folder": str(tmp_path), "exact": world == 2}
        run_on_ranks(world, "test_resume", "resume", run)


class Stuck(dcp.FileSystemWriter):
    """Writes its data on the first rank, says so, and never gets further."""

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        written.wait()
        Path(self.path, f"wrote-{dist.get_rank()}").touch()
        threading.Event().wait()
        return written


def save_and_hang(mesh, folder: str) -> None:
    save(mesh, folder)
    model, _ = build(mesh, 4)
    dcp.save({"model": model.state_dict()}, storage_writer=Stuck(f"{folder}/step-4"))


def test_killed_while_saving(tmp_path: Path) -> None:
    """The processes are killed with the data of the next checkpoint half written."""
    ranks = Ranks(2)
    try:
        for pipe in ranks.pipes:
            pipe.send(("test_resume", "save_and_hang", {"folder": str(tmp_path)}))
        deadline = time.monotonic() + TIMEOUT
        while len(list(tmp_path.glob("step-4/wrote-*"))) < 2:
            assert time.monotonic() < deadline and all(p.is_alive() for p in ranks.processes)
            time.sleep(0.05)
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            assert process.exitcode == -signal.SIGKILL
    finally:
        ranks.stop()
    assert list(tmp_path.glob("step-4/*.distcp")) and not (tmp_path / "step-4/.metadata").exists()
    run_on_ranks(2, "test_resume", "resume", {"folder": str(tmp_path), "exact": True})


@on_ranks(2)
def test_export_for_transformers(mesh, tmp_path):
    """`save_pretrained` of the full state on rank 0 writes safetensors that load as they are."""
    model = fully_shard(seeded(gpt2), mesh=mesh, units="auto")  # its head is tied
    assert all(isinstance(p, ShardTensor) for p in model.parameters())
    optimizer = AdamW(model.parameters(), lr=0.01)
    batch = language(1)
    model(**batch).loss.backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if mesh.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    assert (tmp_path / "model.safetensors").exists()
    plain = type(seeded(gpt2)).from_pretrained(tmp_path)
    assert not any(isinstance(p, ShardTensor) for p in plain.parameters())
    for key, param in plain.named_parameters():
        assert torch.equal(param, full(model.get_parameter(key))), key
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
