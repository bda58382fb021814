"""CPU offload: segments, gradients and optimizer state on the host."""

import dataclasses

import pytest
import torch
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import Stack, compiled, seeded, tokens
from ranks import on_ranks
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardc import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, units_of
from shardc.runtime.comm.unshard import gather, reduce
from shardc.runtime.unit.bucket_spec import groups_for, is_elsewhere, spec_for


def _pair(mesh):
    """FSDP2's model and ours, offloaded, in bfloat16."""
    kwargs = {
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    return fsdp2(seeded(Stack), mesh, **kwargs), sharded(seeded(Stack), mesh, **kwargs)


def _step(model, call, number):
    rank = torch.distributed.get_rank()
    for index in range(2):
        model.set_requires_gradient_sync(index == 1)
        seed = 100 * number + 10 * index + rank
        call(tokens(seed), tokens(seed + 50)).backward()


@pytest.mark.parametrize("executor", ["eager", None])
@on_ranks(2)
def test_parity_with_accumulation_and_precision(mesh, executor):
    theirs, ours = _pair(mesh)
    call = compiled(ours, executor) if executor else ours
    check_against_fsdp2(
        theirs, ours, call, _step, 2, 2e-2, lambda params: torch.optim.AdamW(params, lr=1e-3)
    )


@pytest.mark.parametrize("executor", ["inductor", None])
@on_ranks(2)
def test_the_copies_of_a_device_that_is_not_the_host(mesh, executor):
    """What an accelerator would run, here from the CPU to the CPU; `test_streams` has streams."""
    theirs, ours = _pair(mesh)
    for module in units_of(ours).values():
        module._shardc_unit.change(host_is_apart=True)
    call = compiled(ours, executor) if executor else ours
    check_against_fsdp2(theirs, ours, call, _step, 2, 2e-2)
    call(tokens(0), tokens(1)).backward()  # compiles, without anything accumulated
    with torch.profiler.profile() as profile:
        call(tokens(0), tokens(1)).backward()
    names = [event.name for event in profile.events()]
    counts = [names.count(f"shardc::{op}") for op in ("all_gather", "to_host")]
    assert counts == [5, 3], counts
    if executor:
        told = {name for name in names if name.startswith("shardc: offload ")}
        assert told == {f"shardc: offload {name}" for name in ("layers.0", "layers.1", "Stack")}


@on_ranks(2)
def test_the_graph_copies_in_before_the_gather_and_out_after_the_reduction(mesh):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(
        torch.nn.Linear(8, 8, bias=False), mesh=mesh, mp_policy=policy,
        offload_policy=CPUOffloadPolicy(),
    )  # fmt: skip
    bucket = model._shardc_unit.buckets[0]
    bucket.device = torch.device("cuda", 0)  # as with a mesh of GPUs
    assert is_elsewhere(bucket)
    spec = spec_for(bucket, groups_for(bucket))
    assert spec.device == "cuda"
    spec = dataclasses.replace(spec, device="cuda:0")

    def both_ways(segment):
        full = gather(segment, spec)
        assert full.device.type == "cuda" and full.dtype == torch.bfloat16
        part = reduce(full.to(torch.float32), spec, segment=segment)
        assert part.device.type == "cpu" and part.dtype == torch.float32
        return part

    with FakeTensorMode(), torch.no_grad():  # autograd itself would need the device
        graph = make_fx(both_ways)(torch.empty(32)).graph
    calls = [str(node.target).split(".")[-2] for node in graph.nodes if node.op == "call_function"]
    order = [name for name in calls if name != "detach"]
    assert order == [
        "all_gather", "wait_tensor",
        "_to_copy", "reduce_scatter_tensor", "wait_tensor", "div", "to_host",
    ], order  # fmt: skip
