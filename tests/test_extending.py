"""What docs/contributing.md walks through, from outside of the package: a pass, a hardware profile,
a type of device and a backend of collectives of this file's own."""

import collections
import functools
import re
import subprocess
import sys
from dataclasses import astuple, replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Stack, compiled, full, seeded, tokens
from ranks import on_ranks
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh

import shardc
from shardc import fully_shard
from shardc.extending import PROFILES, CommBackend, Link, contract, pipeline, register_backend
from shardc.passes.contract import FACTS
from shardc.passes.estimate.hardware import current_profile
from shardc.passes.nodes import is_all_gather
from shardc.runtime.groups.backends import BACKENDS, backend_of
from shardc.runtime.watch.lost_peers import is_from_backend
from shardc.sharding.units import units_of

# -- a pass ----------------------------------------------------------------------------------------


def scale_losses(gm, ctx):
    """Forward graphs: ten times the first result."""
    if ctx.phase == "forward":
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            loss = output.args[0][0]
            ten = gm.graph.call_function(torch.ops.aten.mul.Tensor, (loss, 10.0))
        ten.meta["val"] = loss.meta["val"]
        output.args = ((ten, *output.args[0][1:]),)
    return gm


@contract(needs="gathers", gives="counted")
def count_gathers(gm, ctx):
    gm.meta["gathers"] = sum(map(is_all_gather, gm.graph.nodes))
    return gm


@contract(needs="counted scheduled")
def look(gm, ctx):
    seen_gathers.append((ctx.phase, sum(map(is_all_gather, gm.graph.nodes))))
    return gm


seen_gathers = []


@on_ranks(1)
def test_passes_of_ones_own_that_build_on_each_other(mesh):
    joint, graph = pipeline.JOINT_PASSES, pipeline.GRAPH_PASSES
    plain, model = seeded(Stack), fully_shard(seeded(Stack), mesh=mesh, units="auto")
    with mock.patch.object(pipeline, "GRAPH_PASSES", [*graph[:-1], scale_losses, look]):
        with pytest.raises(BackendCompilerFailed, match="look needs 'counted', and no pass of"):
            compiled(model)(tokens(0), tokens(1))
        with mock.patch.object(pipeline, "JOINT_PASSES", [*joint, count_gathers]):
            loss = compiled(model)(tokens(0), tokens(1))
            loss.backward()
    torch.testing.assert_close(loss, 10 * plain(tokens(0), tokens(1)))
    assert seen_gathers == [("forward", 3), ("backward", 2)]


@on_ranks(1)
def test_a_pass_over_forward_and_backward_together(mesh):
    seen = []

    @contract(needs="tags")
    def note_saved(forward, backward, ctx):
        seen.append(len(forward.graph.output_node().args[0]) - ctx.results)

    model = fully_shard(seeded(lambda: torch.nn.Linear(3, 2)), mesh=mesh)
    with mock.patch.object(pipeline, "HALVES_PASSES", [*pipeline.HALVES_PASSES, note_saved]):
        compiled(model)(torch.ones(4, 3)).sum().backward()
    assert seen == [1]


def _place(steps, step):
    """The place of a pass where `coalesce` comes right behind `write_gradients`."""
    names = [each.__name__ for each in steps]
    name = step.__name__
    return names.index("write_gradients") + 0.5 if name == "coalesce" else names.index(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: [*steps[1:], steps[0]],
         r"the pass drop_second_gathers needs 'one_wait' \(a gather has one wait\), and wait_once, "
         "which gives that, comes later: put it first"),
        (lambda steps: sorted(steps, key=lambda step: _place(steps, step)),
         "the pass coalesce needs 'movable' .*, which write_gradients before it ends: put coalesce "
         "before that"),
        (lambda steps: [step for step in steps if step.__name__ != "schedule"],
         "the pass write_gradients needs 'scheduled' .*, and no pass of the pipeline gives that"),
    ],
    ids=["before what gives", "behind what ends", "without what gives"],
)  # fmt: skip
def test_a_wrong_order_of_passes_is_refused(change, message):
    pipeline.check()
    with (
        mock.patch.object(pipeline, "GRAPH_PASSES", change(pipeline.GRAPH_PASSES)),
        pytest.raises(ValueError, match=message),
    ):
        pipeline.check()


def test_every_pass_has_a_contract():
    steps = [step for stage in pipeline.stages() for step in stage]
    assert all(hasattr(step, "contract") for step in steps)
    facts = {fact for step in steps for part in astuple(step.contract) for fact in part}
    assert facts == FACTS.keys()


# -- a hardware profile ----------------------------------------------------------------------------

SLOW = replace(PROFILES["cpu"], name="raspberry", board="Raspberry", message=1.0)


def test_a_profile_of_ones_own():
    model, x = seeded(Stack), tokens(0)
    with mock.patch.dict(PROFILES, raspberry=SLOW):
        reports = [shardc.explain(model, x, world_size=4, profile=p) for p in ("cpu", "raspberry")]
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "get_device_name", lambda: "A Raspberry 7"),
        ):
            assert current_profile("cuda") is SLOW
    seconds = [sum(row.seconds for row in report.collectives) for report in reports]
    assert seconds[0] < 1.0 < seconds[1]
    with pytest.raises(ValueError, match="unknown profile 'raspberry'"):
        shardc.get_profile("raspberry")


# -- a type of device ------------------------------------------------------------------------------

DEVICE = """
import dataclasses
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration
import shardc
from shardc.backend.compile import compile_graph
from shardc.backend.executor import shapes_only
from shardc.backend.fake_ranks import give_fakes, sharded_copy
from shardc.backend.graph_plan import graph_plans
from shardc.backend.options import Options
from shardc.extending import PROFILES, CommBackend, DeviceType, register_backend, register_device
from shardc.runtime import compat

backend_registration._setup_privateuseone_for_python_backend("npu")
dist.Backend.backend_capability["fake"].append("npu")
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
mesh = init_device_mesh("npu", (4,))
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

def refused(call):
    try:
        call()
    except NotImplementedError as error:
        print(error)

refused(lambda: shardc.fully_shard(model, mesh=mesh))
print([type(p) is nn.Parameter for p in model.parameters()])
PROFILES["npu"] = dataclasses.replace(PROFILES["cpu"], name="npu", board="npu")
register_backend(CommBackend("fake", averages=True))
register_device(DeviceType("npu", backend="fake", profile="npu"))
sharded = sharded_copy(model, mesh, {})
refused(sharded.set_symm_mem_for_comm)
refused(lambda: shardc.precompile(model, torch.empty(8, 64), mesh=mesh))

def planned(gm, inputs, **ignored):
    return compile_graph(gm, inputs, Options(executor="eager"), run=shapes_only)

with compat.fake_tensors("npu") as fake, compat.compiling_backward_at_once():
    give_fakes(sharded, fake)
    print(torch.compile(sharded, backend=planned)(fake(torch.empty(8, 64))).device.type)
for plan in graph_plans:
    (sent,) = plan.collectives
    print(plan.phase, "planned for", plan.profile.name + ":", sent.split(" of ")[0])
"""
"""Plans a step on torch's stand-in for other types of devices, whose tensors have shapes only."""


def test_a_type_of_device_of_ones_own():
    ran = subprocess.run([sys.executable, "-c", DEVICE], capture_output=True, text=True)
    unknown, whole, symmetric, ahead, *rest = ran.stdout.splitlines() or [ran.stderr]
    assert re.search("types 'cpu' and 'cuda', got 'npu': describe it to .*register_device", unknown)
    assert whole == str([True] * 4)
    assert re.search("symmetric memory for 'cuda' devices only, .* over 'npu'", symmetric)
    assert re.search("precompile compiles for 'cpu' and 'cuda', not for 'npu'", ahead)
    assert rest == [
        "npu",
        "forward planned for npu: Sequential: all_gather_into_tensor",
        "backward planned for npu: Sequential: reduce_scatter_tensor",
    ], ran.stderr


# -- a backend of collectives ----------------------------------------------------------------------

WIRE = Link(1e-7, 1e9)
QUICK = replace(
    PROFILES["cpu"], flops=(("float32", 1e7),), inside=WIRE, across=WIRE, message=1e-7
)  # fmt: skip
SENT = collections.Counter()
"""How often what was sent, and how many tensors at a time."""


class Counting(dist.ProcessGroup):
    """Gloo, counted; unlike gloo it averages."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "tallied"

    @functools.cached_property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def all_gather_single_coalesced(self, outputs, inputs, options):
        SENT["all_gather", len(inputs)] += 1
        for output, given in zip(outputs, inputs, strict=True):
            work = self.gloo._allgather_base(output, given, options)
            work.wait()
        return work

    def reduce_scatter_single_coalesced(self, outputs, inputs, options):
        averages, options.reduceOp = options.reduceOp == dist.ReduceOp.AVG, dist.ReduceOp.SUM
        SENT["mean" if averages else "sum", len(inputs)] += 1
        for output, given in zip(outputs, inputs, strict=True):
            shared = given / self.size() if averages else given
            work = self.gloo._reduce_scatter_base(output, shared, options)
            work.wait()
        return work

    # The names of the same before torch 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _gradients(mesh):
    """Of a step with several buckets a unit, and what it sent."""
    torch._dynamo.reset()
    SENT.clear()
    shardc.set_profile(QUICK)
    model = fully_shard(seeded(Stack), mesh=mesh, units="auto")
    compiled(model)(tokens(mesh.get_local_rank()), tokens(9)).backward()
    sent = dict(SENT)
    shardc.set_profile(None)
    return {name: full(param.grad) for name, param in model.named_parameters()}, sent


@on_ranks(2)
def test_a_backend_of_ones_own(mesh):
    dist.Backend.register_backend("tallied", Counting, devices=["cpu"])
    group = dist.new_group(backend="tallied", timeout=timedelta(seconds=60))
    own = DeviceMesh.from_group(group, "cpu")
    wanted, sent = _gradients(mesh)
    assert sent == {} and backend_of(group, "cpu") == CommBackend("tallied")

    def check():
        gradients, sent = _gradients(own)
        for name, gradient in wanted.items():
            torch.testing.assert_close(gradients[name], gradient, msg=name)
        kinds, tensors = collections.Counter(), set()
        for (kind, size), times in sent.items():
            kinds[kind] += size * times
            tensors.add(size)
        return dict(kinds), max(tensors)

    assert check() == ({"all_gather": 10, "sum": 6}, 2)
    error = RuntimeError("Out of beads")
    assert not is_from_backend(error)
    with mock.patch.dict(BACKENDS):
        known = CommBackend("tallied", averages=True, coalesces=False, errors=("out of beads",))
        register_backend(known)
        assert check() == ({"all_gather": 10, "mean": 6}, 1)
        assert is_from_backend(error)
        with torch.device("meta"):
            model = fully_shard(Stack(), mesh=own, units="auto")
        model.to_empty(device="cpu")  # only now it is known what averages
        units = units_of(model).values()
        assert {b.key.code.reduction.op for u in units for b in u._shardc_unit.buckets} == {"avg"}
    dist.destroy_process_group(group)
