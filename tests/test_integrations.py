"""Each library's loop over a sharded model: as one process, resumed to the last bit, exported."""

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from loops import LOOPS, Run, Words, accelerator_of, adapted, batch, plain_run, quiet
from models import full, seeded
from ranks import mesh_of, on_ranks
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardc import ShardTensor, fully_shard, strict
from shardc.integrations.accelerate import prepare


def ran(library, run):
    """The whole parameters that a loop ends with, and what it exported, on rank 0."""
    torch._dynamo.utils.counters.clear()
    with quiet():
        params, exported = LOOPS[library](run)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert run.resumed or (graphs > 0) == (run.options is not None)
    assert all(isinstance(param, ShardTensor) for param in params.values())
    values = {name: full(param).clone() for name, param in params.items()}
    dist.barrier()
    return values, exported() if run.mesh.get_rank() == 0 else None


WAYS = [(library, None) for library in LOOPS]
WAYS += [("Trainer", "eager"), ("accelerate", "eager"), ("Fabric", "inductor")]
WAYS += [("Lightning", "eager"), ("PEFT", "inductor")]


@pytest.mark.parametrize("library, executor", WAYS)
@on_ranks(2)
def test_trains_resumes_and_exports(mesh, library, executor, tmp_path):
    build = adapted if library == "PEFT" else Words
    start = {name: p.detach().clone() for name, p in seeded(build).named_parameters()}
    wanted = plain_run(seeded(build), mesh.size())
    options = {"executor": executor} if executor else None

    values, exported = ran(library, Run(mesh, str(tmp_path), options))
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert not isinstance(value, ShardTensor)
        assert torch.equal(value, start[name]) != value.requires_grad, name
        torch.testing.assert_close(values[name], value.detach(), rtol=1e-3, atol=2e-5, msg=name)
    if exported is not None:
        assert exported.keys() == values.keys()
        assert all(torch.equal(exported[name], value) for name, value in values.items())

    again, _ = ran(library, Run(mesh, str(tmp_path), options, resumed=True))
    for name, value in values.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize("library, executor", [*WAYS[:4], ("Fabric", "eager")])
@on_ranks(2)
def test_float16_with_a_scaler(mesh, library, executor, tmp_path):
    """The first scale overflows: no rank steps, then all do, as in float32 within float16."""
    start = {name: p.detach().clone() for name, p in seeded(Words).named_parameters()}
    wanted = plain_run(seeded(Words), mesh.size(), fp16=True)
    options = {"executor": executor} if executor else None
    values, _ = ran(library, Run(mesh, str(tmp_path), options, fp16=True))
    for name, value in wanted.items():
        moved = (value.detach() - start[name]).abs().max()
        off = (value.detach() - values[name]).abs().max()
        assert 0 < off < 0.02 * moved, f"{name}: {off} of {moved}"


@pytest.mark.parametrize("library", ["Trainer", "accelerate"])
@on_ranks(4)
def test_a_mesh_of_some_processes_is_refused(mesh, library, tmp_path):
    """Beside tensor parallelism each rank would be given a batch of its own; nothing is sharded."""
    grid = mesh_of("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    seen = []

    class Split(Words):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                parallelize_module(layer, grid["tp"], {"up": ColwiseParallel()})
            seen.append(self)

    with pytest.raises(ValueError, match=r"over 2 of 4 processes.*tensor_parallel_size"):
        ran(library, Run(grid["dp"], str(tmp_path), None, build=Split))
    assert not any(isinstance(param, ShardTensor) for param in seen[0].parameters())


@pytest.mark.parametrize("way", ["DDP", "optimizer"])
@on_ranks(2)
def test_an_op_that_is_refused_inside_names_the_way_out(mesh, way):
    """Lightning's DDP: its strategy here. An optimizer in a loop that shards: not the loop."""
    if way == "DDP":
        with quiet(), pytest.raises(RuntimeError, match=r"integrations\.lightning\.FabricStrategy"):
            fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
            fabric.launch()
            fabric.setup_module(fully_shard(seeded(Words), mesh=mesh))
        return
    accelerator, model = accelerator_of(), seeded(Words)
    model, optimizer = prepare(accelerator, model, torch.optim.LBFGS(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = model(**batch(0, 0))["loss"]
        loss.backward()
        return loss

    strict()
    try:
        with pytest.raises(NotImplementedError, match=r"shardc\.WholeTensorOptimizer"):
            optimizer.step(closure)
    finally:
        strict(False)
