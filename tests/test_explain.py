"""`explain` and `report`: what is predicted is what runs, and nothing is changed by asking."""

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import sympy
import torch
import torch.distributed as dist
from models import Gated, Stack, compiled, shard_all, tokens
from ranks import on_ranks
from subclasses import Fp8, Rowwise, extended
from torch import nn
from torch.fx import Graph
from torchao import float8

import shardc
from shardc.passes.estimate.cost import WORLD, collective_seconds
from shardc.passes.nodes import module_of
from shardc.reports.findings import PADDING_SHARE
from shardc.reports.formulas import TOKENS
from shardc.reports.if_hierarchical import if_hierarchical
from shardc.reports.if_quantised import if_quantised
from shardc.reports.record import BucketRow, CollectiveRow, MemoryPoint, Op, Record
from shardc.reports.report import Report
from shardc.runtime import compat

INPUTS = (tokens(0), tokens(1))
NVLINK = "h100-nvlink"


@pytest.fixture(scope="module")
def stack_report() -> Report:
    return shardc.explain(Stack(6), *INPUTS, world_size=16)


# -- explain -------------------------------------------------------------------------------------


def test_explain_changes_nothing():
    model = Stack(3, tied=True)
    before = copy.deepcopy(model.state_dict())
    model.eval()
    hook = sys.excepthook
    report = shardc.explain(model, *INPUTS, world_size=7)
    assert sys.excepthook is hook
    assert report.world_size == 7 and len(report.buckets) == 4
    assert not dist.is_initialized() and not shardc.units_of(model) and not model.training
    assert type(model) is Stack
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert shardc.get_profile("cpu") is shardc.passes.estimate.hardware.current_profile("cpu")


def test_every_bucket_is_gathered_twice_and_reduced_once(stack_report):
    rows = stack_report.collectives
    counts = Counter((row.phase, row.kind, bucket) for row in rows for bucket in row.buckets)
    blocks = [f"layers.{index}" for index in range(6)]
    expected = {("forward", "all_gather", name): 1 for name in ["Stack", *blocks]}
    expected |= {("backward", "all_gather", name): 1 for name in blocks}  # the root is kept
    expected |= {("backward", "reduce_scatter", name): 1 for name in ["Stack", *blocks]}
    assert counts == expected


def test_times_add_up(stack_report):
    r = stack_report
    assert 0 < r.compute_seconds < r.step_seconds
    assert r.exposed_seconds == pytest.approx(r.step_seconds - r.compute_seconds)
    stalls = sum(row.exposed for row in r.collectives)
    assert stalls == pytest.approx(r.exposed_seconds, rel=0.01)
    assert all(op.start >= before.start + before.seconds - 1e-12
               for before, op in zip(r.ops, r.ops[1:], strict=False))  # fmt: skip
    for one, other in zip(r.collectives, r.collectives[1:], strict=False):
        assert one.issued <= one.start < one.end <= other.start + 1e-12
        assert one.exposed == pytest.approx(max(0.0, one.end - one.waited))


def test_a_whole_step_hides_the_last_reductions_behind_updates(stack_report):
    whole = stack_report.whole_step()
    assert whole.compute_seconds == pytest.approx(stack_report.compute_seconds)
    assert whole.sent_bytes == stack_report.sent_bytes and whole.settings["step"] == "one graph"
    test_times_add_up(whole)

    (update,) = (op for op in stack_report.ops if op.phase == "optimizer")
    *early, root = (op for op in whole.ops if op.phase == "optimizer")  # the root comes last
    assert early and sum(op.seconds for op in early) + root.seconds == pytest.approx(update.seconds)
    assert root.start >= whole.collectives[-1].end > early[0].start
    hidden = stack_report.exposed_seconds - whole.exposed_seconds
    assert hidden == pytest.approx(sum(op.seconds for op in early), rel=0.01)

    assert whole.peak.total <= stack_report.peak.total and whole.memory[-1].held[2] == 0
    inference = shardc.explain(Stack(2), *INPUTS, train=False)
    assert inference.whole_step() is inference


def test_a_step_that_gathers_ahead_finds_its_first_bucket(stack_report):
    whole, ahead = stack_report.whole_step(), stack_report.whole_step(gather_ahead=True)
    assert ahead.settings["gathered ahead"] == "Stack"
    assert ahead.sent_bytes == whole.sent_bytes and len(ahead.collectives) == 20
    test_times_add_up(ahead)
    assert whole.collectives[0].buckets == ("Stack",)
    assert ahead.collectives[0].buckets == ("layers.0",) and ahead.ops[0].start == 0
    last = ahead.collectives[-1]
    assert (last.phase, last.kind, last.buckets) == ("optimizer", "all_gather", ("Stack",))
    *_, update, copied = ahead.ops  # a half of the other updates runs behind the gather
    assert last.issued == update.start and copied.name == "copy" and copied.start == last.end

    root = next(row for row in stack_report.buckets if row.name == "Stack")
    assert root.nbytes <= min(point.held[4] for point in ahead.memory)
    assert 0 <= ahead.peak.total - whole.peak.total <= root.nbytes == ahead.memory[-1].held[4]
    again = json.loads(json.dumps(ahead.to_dict()))
    assert Report.from_dict(again) == ahead
    blocks = shardc.explain(Gated(3), torch.randn(2, 8, 32), world_size=4, units="auto")
    sent = [row for row in blocks.whole_step(gather_ahead=True).collectives if row.kind[0] == "a"]
    assert [row.buckets[0][-1] for row in sent] == ["1", "2", "2", "1", "0"]
    alone = shardc.explain(Stack(2), *INPUTS, world_size=1).whole_step(gather_ahead=True)
    assert alone.settings["gathered ahead"] == "nothing"


def test_micro_batches_of_a_whole_step_share_gathers(stack_report):
    one, plenty = stack_report.whole_step(), 2**30
    block = next(row.nbytes for row in stack_report.buckets if row.name == "layers.0")
    for gathered_bytes, gathers in ((0, 3 * 13), (block + 1, 3 * 13 - 5), (plenty, 7)):
        whole = stack_report.whole_step(micro_batches=3, gathered_bytes=gathered_bytes)
        kinds = Counter(row.kind for row in whole.collectives for name in row.buckets)
        assert kinds == {"all_gather": gathers, "reduce_scatter": 3 * 7}
        test_times_add_up(whole)
        assert whole.tokens == 3 * one.tokens and whole.flops == 3 * one.flops
        (update,) = (op for op in stack_report.ops if op.phase == "optimizer")
        assert whole.compute_seconds - update.seconds == pytest.approx(
            3 * (one.compute_seconds - update.seconds)
        )
        more = whole.peak.total - one.peak.total
        segments = sum(row.segment for row in stack_report.buckets)  # of gradients that wait
        assert segments <= more <= segments + (gathered_bytes if gathers > 7 else 7 * block)
        assert whole.memory[-1].held[2:5] == (0, 0, 0)
    assert whole.step_seconds < 2.5 * one.step_seconds
    assert stack_report.whole_step(micro_batches=1, gathered_bytes=plenty).ops == one.ops
    with pytest.raises(ValueError, match="micro_batches must be at least 1"):
        stack_report.whole_step(micro_batches=0)


def _by_hand(first, late):
    """A step of two buckets: `first` is gathered first, and `late` is reduced last. A third one,
    `c`, is only updated."""
    early = "ab"["ab".index(late) - 1]
    other = "ab"["ab".index(first) - 1]

    def sent(phase, kind, name, *times):
        return CollectiveRow(phase, kind, (name,), 2, 35, "", "", *times)

    size = {"a": 30, "b": 10, "c": 10}
    spans = {first: ((0.0, 8.0), (12.0, 12.5)), other: ((0.0, 10.0),), "c": ()}
    buckets = tuple(
        BucketRow(n, n, 1, 1, "", "", 35, 0.0, size[n], True, True, gathered=spans[n], seconds=4.0)
        for n in "abc"
    )
    rows = (
        sent("forward", "all_gather", first, 0.0, 0.0, 4.0, 0.0, 4.0),
        sent("forward", "all_gather", other, 0.0, 4.0, 8.0, 5.0, 3.0),
        sent("backward", "reduce_scatter", early, 12.0, 12.0, 16.0, 14.0, 2.0),
        sent("backward", "reduce_scatter", late, 14.0, 16.0, 20.0, 16.0, 4.0),
    )
    times = {"forward": ((4, 1), (8, 2)), "backward": ((10, 2), (12, 2)), "optimizer": ((20, 5),)}
    ops = [Op(phase, "step", "", *each) for phase, own in times.items() for each in own]
    held = [(0.0, 70), (8.0, 35), (10.0, 0), (12.0, 35), (14.0, 0), (20.0, 0)]
    memory = [MemoryPoint(at, (50, 100, 50, 0, gathered, 0)) for at, gathered in held]
    given = {"buckets": buckets, "collectives": rows, "ops": tuple(ops), "memory": tuple(memory)}
    return Report("by hand", 2, 1, "", **given)


@pytest.mark.parametrize(
    ("first", "late", "updates", "gather"),
    [
        ("b", "b", [(10, 0.5), (12, 1.5), (16, 1), (17, 2), (21, 1)], (17, 17, 21, 19)),
        ("b", "a", [(12, 1), (13, 1), (16, 3), (20, 1)], (13, 16, 20, 19)),
    ],
)
def test_updates_run_behind_gathers_ahead(first, late, updates, gather):
    """Seconds by hand: half of `a` and `c` is updated before the last reduction is there, half
    behind the gather of `b`, where that starts last; else `c` behind it. The last op copies `b`."""
    ahead = _by_hand(first, late).whole_step(gather_ahead=True)
    assert [(op.start, op.seconds) for op in ahead.ops if op.phase == "optimizer"] == updates
    *_, row = ahead.collectives
    assert (row.issued, row.start, row.end, row.waited) == gather
    forward = [op.start for op in ahead.ops if op.phase == "forward"]
    assert forward == [0, 4]  # 4 and 8 without
    held = [point.held[4] for point in ahead.memory[:5]]
    assert held == [70, 70, 35, 35, 35]  # the next gather is still there as the first one ends
    assert max(point.held[4] for point in ahead.memory[5:]) == 70
    assert ahead.memory[-1].held[2:5] == (0, 0, 35)


def test_offload_moves_memory_to_the_host_and_takes_time(stack_report):
    kwargs = {"offload_policy": shardc.CPUOffloadPolicy()}
    offloaded = shardc.explain(Stack(6), *INPUTS, world_size=16, **kwargs)
    segments, optimizer, gradients, *_ = offloaded.peak.held
    assert segments == optimizer == 0
    assert gradients > 0  # on their way
    assert sum(offloaded.peak.held) <= sum(stack_report.peak.held[2:])
    profile = shardc.get_profile("h100-nvlink")
    gathers = [row for row in offloaded.collectives if row.kind == "all_gather"]
    assert len(gathers) == 13 and all(len(row.buckets) == 1 for row in gathers)
    for row in gathers:
        wire = collective_seconds(row.nbytes, 16, profile)
        assert row.seconds == pytest.approx(wire + row.nbytes / 16 / profile.host_bandwidth)


def test_memory_has_its_parts(stack_report):
    parameters = sum(p.numel() for p in Stack(6).parameters())
    segments, optimizer, gradients, activations, gathered, workspaces = stack_report.peak.held
    assert 4 * parameters / 16 <= segments < 4 * parameters / 16 * 1.2
    assert optimizer == 2 * segments
    assert gradients > 0 and activations > 0 and gathered > 0
    last = stack_report.memory[-1]
    assert workspaces == 2 * shardc.get_profile(stack_report.profile).workspace > 0
    held = (segments, 2 * segments, segments, 0, 0, workspaces)
    assert last.where == "optimizer" and last.held == held


def test_ops_come_from_modules(stack_report):
    modules = {(op.phase, op.module) for op in stack_report.ops if "mm" in op.name}
    for phase in ("forward", "backward"):
        assert {(phase, f"layers.{index}.up") for index in range(6)} <= modules
    row = next(r for r in stack_report.collectives if r.buckets == ("layers.3",))
    assert row.needed_by.startswith("layers.3")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].model.layers.3.mlp", "model.layers.3.mlp"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['fn'].__self__.0", "0"),
        ("L['self'].layers[2].up", "layers.2.up"),
        ("L['self']", ""),
    ],
)
def test_names_of_modules(path, name):
    node = Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"1": (path, nn.Module)}
    assert module_of(node) == name


def test_inference_has_no_backward():
    report = shardc.explain(Stack(2), INPUTS[0], world_size=4, train=False)
    assert {row.phase for row in report.collectives} == {"forward"}
    assert {op.phase for op in report.ops} == {"forward"}


def test_options_and_sharding_arguments_are_those_of_a_run():
    policy = shardc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    report = shardc.explain(
        Stack(2), *INPUTS, world_size=4, mp_policy=policy, reshard_after_forward=False,
        options={"executor": "eager"},
    )  # fmt: skip
    assert {bucket.gathered_dtype for bucket in report.buckets} == {"bfloat16"}
    assert not any(bucket.reshard for bucket in report.buckets)
    assert not [r for r in report.collectives if r.phase == "backward" and r.kind == "all_gather"]
    assert report.settings == {"mp": "bfloat16", "reshard_after_forward": "False"}


class UpAndDown(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


def test_subclasses_send_what_their_hooks_say():
    def sent(model):
        x = torch.randn(16, 32)
        report = shardc.explain(model, x, world_size=8, reshard_after_forward=True)
        findings = {finding.kind for finding in report.findings}
        return findings, [(c.kind, c.dtype, c.nbytes) for c in report.collectives]

    elements = 32 * 64
    plain = [
        ("all_gather", "float32", 8 * elements),
        ("all_gather", "float32", 8 * elements),
        ("reduce_scatter", "float32", 8 * elements),
    ]
    findings, found = sent(UpAndDown())
    assert found == plain and "wire format" in findings
    findings, found = sent(extended(UpAndDown(), Fp8))
    largest, weight = ("all_reduce", "float32", 4), ("all_gather", "uint8", elements)
    assert found == [largest, weight, largest, weight, weight, plain[2]]
    assert "wire format" not in findings, "such a parameter does not travel in int8"
    findings, found = sent(extended(UpAndDown(), Rowwise))
    scales = 4 * (64 + 32)
    assert found == [
        ("all_gather", "uint8", 2 * elements + scales),
        ("all_gather", "uint8", elements + 4 * 32),
        plain[2],
    ]


def test_float8_of_torchao_is_planned_on_meta():
    def build(convert):
        with torch.device("meta"):
            model = UpAndDown()
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return float8.convert_to_float8_training(model, config=config) if convert else model

    plans = [
        shardc.explain(build(flag), torch.randn(16, 32), world_size=8) for flag in (False, True)
    ]
    gathered = [sum(c.nbytes for c in p.collectives if c.kind == "all_gather") for p in plans]
    assert gathered[0] == 4 * gathered[1] == 4 * 2 * 32 * 64
    assert all(type(p) is nn.Parameter for p in build(False).parameters())


def test_a_model_that_is_sharded_already():
    compat.join_fake_group(4)
    try:
        model = shardc.fully_shard(Stack(2), units="auto")
        report = shardc.explain(model, *INPUTS)
        assert report.world_size == 4 and len(report.buckets) == 3
        with pytest.raises(ValueError, match="sharded already: leave out world_size"):
            shardc.explain(model, *INPUTS, world_size=4)
        with pytest.raises(ValueError, match="fake process group of 4 ranks, and 8 are asked"):
            shardc.explain(Stack(2), *INPUTS, world_size=8)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 0}, "world_size must be a whole number of at least 1"),
        ({"world_size": 16_385}, "at most 16,384 ranks can be planned for, got 16,385"),
        ({"world_size": 4, "mesh": (2, 2)}, "give world_size or mesh, not both"),
        ({"mesh": (2, 2, 2)}, "sizes .shard,. or .replicate, shard."),
        ({"profile": "h1000"}, "unknown profile 'h1000'"),
        ({"options": {"fallbck": True}}, "did you mean 'fallback'"),
        ({"options": {"lower": False}}, "unknown shardc option 'lower'"),
    ],
)
def test_what_cannot_be_explained(given, message):
    with pytest.raises(ValueError, match=message):
        shardc.explain(Stack(1), *INPUTS, **given)
    assert not dist.is_initialized()


def test_nested_inputs_are_not_explained():
    rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="padded to equal lengths"):
        shardc.explain(torch.nn.Linear(4, 4), rows, world_size=2)
    assert not dist.is_initialized()


@on_ranks(2)
def test_a_real_process_group_is_refused(mesh):
    with pytest.raises(ValueError, match=r"without peers.*shardc.report"):
        shardc.explain(Stack(1), *INPUTS)


# -- findings ------------------------------------------------------------------------------------


class Awkward(nn.Module):
    """Breaks the graph, has a parameter that nothing uses, and one block far larger than others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.big = nn.Linear(8, 4096, bias=False)
        self.forgotten = nn.Linear(3, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        torch._dynamo.graph_break()
        return self.big(x)


def test_findings_name_what_to_change():
    report = shardc.explain(Awkward(), torch.zeros(2, 8), world_size=64)
    found = {finding.kind: finding for finding in report.findings}
    assert {"graph break", "unused parameters", "padding", "large unit", "small units"} <= {*found}
    assert "2 parameters never used: Awkward.forgotten.weight" in found["unused parameters"].what
    assert all(finding.advice for finding in report.findings)
    assert "Findings\n- graph break" in str(report)


def test_padding_of_a_few_vectors_is_no_finding():
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.LayerNorm(1000), nn.Linear(1000, 1000)) for _ in range(2)]
        model, inputs = nn.Sequential(*blocks), torch.zeros(1, 1000)
    report = shardc.explain(model, inputs, world_size=64, profile="h100-nvlink")
    assert max(bucket.padding for bucket in report.buckets) > PADDING_SHARE
    assert "padding" not in {finding.kind for finding in report.findings}


def _linears(count, width, rows, dtype=torch.float32, bias=True):
    """Layers without values, and their input."""
    with torch.device("meta"):
        layers = (nn.Linear(width, width, bias=bias) for _ in range(count))
        return nn.Sequential(*layers), torch.zeros(rows, width, dtype=dtype)


def test_nothing_to_change_is_said():
    model, inputs = _linears(8, 4096, rows=65536, dtype=torch.bfloat16, bias=False)
    policy = shardc.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    report = shardc.explain(model, inputs, world_size=8, mp_policy=policy)
    assert report.findings == () and "Nothing to change was found." in str(report)
    assert report.exposed_seconds < 0.03 * report.step_seconds


def test_fewer_bytes_are_recommended_and_foretold():
    """What the finding says of int8 is about what a report of int8 says."""
    model, inputs = _linears(8, 4096, rows=1024)

    def explained(sent):
        policy = shardc.MixedPrecisionPolicy(gather_wire_dtype=sent, reduce_wire_dtype=sent)
        return shardc.explain(model, inputs, world_size=8, profile="h100-ib", mp_policy=policy)

    plain, quantised = explained(None), explained(torch.int8)
    (finding,) = (finding for finding in plain.findings if finding.kind == "wire format")
    assert "reduce_wire_dtype=torch.int8" in finding.advice and "0.40%" in finding.advice
    assert not any(finding.kind == "wire format" for finding in quantised.findings)
    told = if_quantised(plain, shardc.get_profile("h100-ib"))
    assert quantised.sent_bytes < 0.3 * plain.sent_bytes
    assert told.sent_bytes == pytest.approx(quantised.sent_bytes, rel=0.02)
    assert quantised.step_seconds < 0.6 * plain.step_seconds
    assert told.step_seconds == pytest.approx(quantised.step_seconds, rel=0.1)
    table = plain.compare(quantised)
    assert "gather_wire=int8" in table and "sent" in table


def test_reductions_stay_rings_where_nodes_share_their_network():
    """An all-to-all has a rank's share of a node's cards, a ring all of them: int8 would send less
    and take longer."""
    model, inputs = _linears(8, 8192, rows=256, dtype=torch.bfloat16)

    def explained(**wires):
        policy = shardc.MixedPrecisionPolicy(torch.bfloat16, **wires)
        return shardc.explain(model, inputs, world_size=64, profile=NVLINK, mp_policy=policy)

    plain, gathers = explained(), explained(gather_wire_dtype=torch.int8)
    both = explained(gather_wire_dtype=torch.int8, reduce_wire_dtype=torch.int8)
    assert both.sent_bytes < gathers.sent_bytes < plain.sent_bytes
    assert gathers.step_seconds < plain.step_seconds < both.step_seconds
    (finding,) = (finding for finding in plain.findings if finding.kind == "wire format")
    assert "(gather_wire_dtype=torch.int8)" in finding.advice and "parameters would" in finding.what


def test_two_steps_are_recommended_and_foretold():
    """Where rings over many ranks are mostly latency; on few nodes they are not."""
    model, inputs = _linears(8, 8192, rows=2560, dtype=torch.bfloat16)
    policy = shardc.MixedPrecisionPolicy(torch.bfloat16)

    def explained(world_size, devices_per_node=None):
        ranks = {"world_size": world_size, "devices_per_node": devices_per_node}
        return shardc.explain(model, inputs, profile=NVLINK, mp_policy=policy, **ranks)

    def kinds(report):
        return {finding.kind for finding in report.findings}

    ring, steps, few = explained(1024), explained(1024, 8), explained(16)
    (finding,) = (finding for finding in ring.findings if finding.kind == "many ranks")
    assert "hierarchical_mesh" in finding.advice
    assert "many ranks" not in kinds(steps) | kinds(few) and "wire format" not in kinds(steps)
    told = if_hierarchical(ring, shardc.get_profile("h100-nvlink"))
    assert steps.step_seconds < 0.8 * ring.step_seconds
    assert told == pytest.approx(steps.step_seconds, rel=0.15)
    assert {row.ranks for row in steps.collectives} == {8, 128, 1024}
    with pytest.raises(ValueError, match="devices_per_node goes with"):
        shardc.explain(model, inputs, mesh=(2, 8), devices_per_node=8)


# -- the report ----------------------------------------------------------------------------------


def test_a_report_is_saved_and_compared(stack_report, tmp_path):
    path = tmp_path / "report.json"
    stack_report.save(path)
    again = Report.load(path)
    assert again == stack_report and str(again) == str(stack_report)
    other = shardc.explain(Stack(6), *INPUTS, world_size=32)
    assert other.peak.held[0] < again.peak.held[0] and other.wire_seconds > again.wire_seconds
    table = again.compare(other)
    assert "W=16" in table and "W=32" in table and "peak memory" in table
    for name in ("step.html", "step.trace.json"):
        stack_report.save(tmp_path / name)
        assert "layers.3" in (tmp_path / name).read_text()
    with pytest.raises(ValueError, match="is written as"):
        stack_report.save(tmp_path / "report.txt")
    for text in (json.dumps({"buckets": []}), json.dumps(dict(again.to_dict(), ops=[{"on": 3}]))):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a report of shardc"):
            Report.load(path)


def test_a_report_of_a_version_before_is_read(stack_report, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({k: v for k, v in stack_report.to_dict().items() if k != "curve"}))
    assert Report.load(path).step_seconds == stack_report.step_seconds > 0


def test_what_repeats_is_shown_by_its_ends(stack_report):
    short, full = str(stack_report), stack_report.text(every_row=True)
    assert "layers.2 " not in short.split("Findings")[0]
    assert "... 2 like these" in short and "like these" not in full
    assert full.count("all-gather") > short.count("all-gather")


def test_rates():
    """Figures by hand: 100 tokens in 2 s, 60 of 100 FLOPs, 3 of 4 s of wire hidden."""
    rows = [
        CollectiveRow("forward", "all_gather", ("a",), 4, 400, "", "", 0.0, 0.0, 3.0, 0.0, 1.0),
        CollectiveRow("backward", "all_reduce", ("a",), 4, 400, "", "", 0.0, 3.0, 4.0, 4.0, 0.0),
    ]
    record = Record(
        "Model", 4, 1, "profile", tokens=100, flops=60.0, peak_flops=10.0,
        collectives=tuple(rows), ops=(Op("forward", "mm", "a", 1.0, 3.0),),
        memory=(MemoryPoint(0.0, (1, 2, 3, 4, 5)), MemoryPoint(1.0, (1, 2, 0, 0, 0))),
    )  # fmt: skip
    assert record.step_seconds == 4.0 and record.exposed_seconds == 1.0
    assert record.wire_seconds == 4.0 and record.flops_used == 60 / 40
    assert record.sent_bytes == 300 + 2 * 300
    assert record.peak.total == 15 and [row.hidden for row in rows] == [2.0, 1.0]


def test_formulas_tell_other_ranks_and_other_batches():
    def on(world, batch):
        inputs = (tokens(0, (batch, 7)), tokens(1, (batch, 7)))
        return shardc.explain(Stack(3), *inputs, world_size=world, symbolic=batch == 2)

    formulas, other = on(8, 2).formulas, on(64, 10)

    def value(name):
        formula = sympy.sympify(formulas[name], locals={"W": WORLD, "T": TOKENS})
        return float(formula.subs({WORLD: 64, TOKENS: 10 * 7}))

    assert value("FLOPs") == other.flops
    end = max(op.start + op.seconds for op in other.ops if op.phase == "forward")
    held = [point.held for point in other.memory if point.seconds <= end + 1e-12][-1]
    for name, wanted, off in (
        ("kept for the backward (bytes)", held[3], 0.01),
        ("segments (bytes)", other.peak.held[0], 0.3),  # padding
        ("sent (bytes)", other.sent_bytes, 0.3),
        ("wire (s)", other.wire_seconds, 0.05),
        ("compute (s)", other.compute_seconds, 0.05),
    ):
        assert value(name) == pytest.approx(wanted, rel=off), name
    assert "wire (s)" in on(8, 4).formulas and "FLOPs" not in on(8, 4).formulas


# -- against a real run --------------------------------------------------------------------------


def _collectives_that_run(model, step) -> list[str]:
    """What the profiler sees of collectives in one step, in order."""
    with torch.profiler.profile() as profile:
        step()
    kinds = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    names = {f"_c10d_functional::{kind}{form}": kind for kind in kinds for form in ("", "_out")}
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    outer = (getattr(event.cpu_parent, "name", None) for event in events)
    return [
        names[event.name]
        for event, caller in zip(events, outer, strict=True)
        if event.name in names and caller not in names  # one may be made of the other
    ]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@on_ranks(2)
def test_the_collectives_of_the_report_are_those_that_run(mesh, executor):
    """And those that `explain` foretells."""
    model = shard_all(Stack(3), mesh)
    step = compiled(model, executor)
    step(*INPUTS).backward()
    live = shardc.report(model)
    assert live.world_size == 2 and {op.phase for op in live.ops} >= {"forward", "backward"}
    ran = _collectives_that_run(model, lambda: step(*INPUTS).backward())
    planned = [row.kind for row in live.collectives]
    full = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    assert ran == [full[kind] for kind in planned] and len(ran) == 4 + 3 + 4
    if executor == "eager" and mesh.get_rank() == 0:
        lived, foretold = json.loads(json.dumps(live.to_dict())), _explained_elsewhere(2)
        for name in ("phase", "kind", "buckets", "ranks", "nbytes", "before", "needed_by"):
            rows = ([row[name] for row in each["collectives"]] for each in (lived, foretold))
            assert len(set(map(str, rows))) == 1, name
        assert foretold["buckets"] == lived["buckets"]


def _explained_elsewhere(world_size: int) -> dict:
    """What `explain` says in a process without a process group."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, shardc; from models import Stack, tokens\n"
        "torch.set_num_threads(1)\n"
        "r = shardc.explain(Stack(3), tokens(0), tokens(1), world_size=int(sys.argv[2]),\n"
        "    profile='cpu', options={'executor': 'eager', 'coalesce': False})\n"
        "print(json.dumps(r.to_dict()))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(world_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_report_needs_something_compiled():
    with pytest.raises(ValueError, match="takes a model that was sharded, got a Stack module"):
        shardc.report(Stack(1))
