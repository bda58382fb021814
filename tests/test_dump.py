"""What is written down of a compile: dumps, torch's structured trace, logs."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule

from shardc.passes import dump
from shardc.passes.context import PassContext
from shardc.passes.estimate.hardware import Link, Profile
from shardc.passes.estimate.memory import measure_liveness
from shardc.passes.nodes import is_all_gather, set_moved
from shardc.passes.runner import run_passes
from shardc.passes.schedule.coalesce import _merge
from shardc.reports.graph import read_graph
from shardc.reports.plan_text import decisions, summary
from shardc.runtime.layout.spec import Moved, UnshardSpec, intern_spec

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def _chain():
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.exp.default, (graph.call_function(aten.sin, (x,)),)),))
    return GraphModule(torch.nn.Module(), graph)


def look_on(gm, ctx):
    return gm


def turn_exp_into_cos(gm, ctx):
    for node in gm.graph.find_nodes(op="call_function", target=aten.exp.default):
        node.target = aten.cos.default
    return gm


def test_a_pass_that_changes_nothing_has_a_line_and_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDC_DUMP", str(tmp_path))
    monkeypatch.setattr(dump, "_begun", set())
    ctx = PassContext("forward")
    run_passes(_chain(), ctx, [look_on, turn_exp_into_cos])
    run_passes(_chain(), ctx, [look_on], done=2)  # what the same graph goes through later
    stem = f"{ctx.number:03d}_forward"
    names = sorted(path.name for path in (tmp_path / "rank0").iterdir())
    assert names == [
        f"{stem}_0_input.py",
        f"{stem}_2_turn_exp_into_cos.diff",
        f"{stem}_2_turn_exp_into_cos.py",
        "index.txt",
    ]
    lines = (tmp_path / "rank0" / "index.txt").read_text().splitlines()[2:]
    assert [re.split(r"\s{2,}", line) for line in lines] == [
        [f"{stem}_0_input.py", "2 ops, before the first pass"],
        [f"{stem}_1_look_on", "changed nothing"],
        [f"{stem}_2_turn_exp_into_cos.py", "2 ops, 1 line new, 1 gone"],
        [f"{stem}_2_turn_exp_into_cos.diff", "what it changed"],
        [f"{stem}_3_look_on", "changed nothing"],
    ]
    changes = (tmp_path / "rank0" / f"{stem}_2_turn_exp_into_cos.diff").read_text().splitlines()
    assert [line[0] + line.split("aten.")[1] for line in changes[2:] if line[0] in "+-"] == [
        "-exp.default(sin)",
        "+cos.default(sin)",
    ]


def test_without_a_dump_no_text_is_made(monkeypatch):
    monkeypatch.delenv("SHARDC_DUMP", raising=False)
    monkeypatch.setattr(dump.compat, "is_traced", lambda: False)
    monkeypatch.setattr(dump, "graph_text", lambda gm: pytest.fail("a text was made"))
    run_passes(_chain(), PassContext("forward"), [look_on])


def test_a_folder_that_cannot_be_written_is_given_up_with_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(dump, "_given_up", set())
    monkeypatch.setattr(dump, "_begun", set())
    taken = tmp_path / "file"
    taken.write_text("no folder")
    full = tmp_path / "full" / "rank0"
    (full / "index.txt").mkdir(parents=True)  # the index cannot be written
    for root in (taken, full.parent):
        monkeypatch.setenv("SHARDC_DUMP", str(root))
        with pytest.warns(UserWarning) as caught:
            for _ in range(2):
                run_passes(_chain(), PassContext("forward"), [look_on, turn_exp_into_cos])
        assert len(caught) == 1 and f"SHARDC_DUMP={root}: nothing more" in str(caught[0].message)


def _two_gathers():
    """ag0 ag1 -> wait0 -> mul -> wait1 -> add; segments are inputs 0 and 1, of 4 and 8 elements."""
    graph = Graph()

    def node(made, size):
        made.meta["val"] = torch.empty(size, device="meta")
        return made

    starts = []
    segments = [node(graph.placeholder(f"primals_{i + 1}"), 4 * (i + 1)) for i in range(2)]
    for number, (segment, name) in enumerate(zip(segments, "ab", strict=True)):
        size = 2 * segment.meta["val"].numel()
        start = graph.call_function(c10d.all_gather_into_tensor.default, (segment, 2, "0"))
        spec = UnshardSpec(torch.float32, 2, "0", ((size, 0),), ((size,),), (True,))
        set_moved(node(start, size), [Moved(intern_spec(spec), number, name)])
        starts.append(start)
    first = node(graph.call_function(c10d.wait_tensor.default, (starts[0],)), 8)
    product = node(graph.call_function(aten.mul.Tensor, (first, 2)), 8)
    second = node(graph.call_function(c10d.wait_tensor.default, (starts[1],)), 16)
    graph.output((node(graph.call_function(aten.add.Tensor, (second, product)), 16),))
    return GraphModule(torch.nn.Module(), graph)


_SLOW = Profile(
    "slow", "made up", (("float32", 100.0),), 10.0, 1e9, 8, Link(0.0, 1.0), Link(0.0, 1.0),
    overhead=0.0, message=1.0, matmul_efficiency=1.0, memory_efficiency=1.0,
)  # fmt: skip


def test_a_graph_in_a_line_and_its_decisions():
    ctx = PassContext("forward", number=7)
    gm = _two_gathers()
    rows = read_graph(gm, ctx.phase, _SLOW, measure_liveness(gm, owns_inputs=False), fused=False)
    assert [(r.kind, r.buckets, r.nbytes, r.ranks) for r in rows.collectives] == [
        ("all_gather", ("a",), 32, 2),
        ("all_gather", ("b",), 64, 2),
    ]
    # The wire: 1 + 16 s, then 1 + 32 s; mul takes 6.4 s behind the second, add 16 s after it.
    assert summary(ctx, rows, 3 * 2**20) == (
        "forward graph 7: 2 all_gather, 96 B; planned 66 s: compute 22.4 s, exposed 43.6 s of "
        "50 s on the wire; peak 3 MiB"
    )
    assert list(decisions(ctx, rows.collectives, {})) == [
        "all_gather of a (32 B) starts before mul, and is waited for before mul",
        "all_gather of b (64 B) starts before mul, and is waited for before add",
    ]


def test_what_travels_in_one_message_is_one_row():
    gm = _two_gathers()
    _merge(gm, [node for node in gm.graph.nodes if is_all_gather(node)])
    ctx = PassContext("forward")
    rows = read_graph(gm, ctx.phase, _SLOW, measure_liveness(gm, owns_inputs=False), fused=False)
    (row,) = rows.collectives
    assert (row.buckets, row.nbytes, row.exposed) == (("a", "b"), 96, 49.0)
    assert list(decisions(ctx, [row], {})) == [
        "all_gather of a+b (96 B, one message) starts before mul, and is waited for before mul"
    ]


_STEP = """
    import torch, torch.distributed as dist
    from models import Stack, tokens
    from shardc import fully_shard
    from shardc.runtime import compat
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(Stack(), units="auto")
    options = {"profile": "h100-nvlink", "memory_budget": "1GB"}
    step = torch.compile(model, backend="shardc", options=options)
    step(tokens(0), tokens(1)).backward()
    print("traced" if compat.is_traced() else "not traced")
    dist.destroy_process_group()
"""


def _run_step(**env):
    """A step on one rank in a process of its own."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_STEP)],
        env={**os.environ, "PYTHONPATH": paths, **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of a step that had everything written down; `log` has its stderr."""
    folder = tmp_path_factory.mktemp("written")
    env = {"SHARDC_DUMP": f"{folder}/dump", "TORCH_TRACE": f"{folder}/trace"}
    done = _run_step(**env, TORCH_LOGS="+shardc")
    (folder / "log").write_text(done.stderr)
    assert done.stdout == "traced\n"
    return folder


def test_the_index_lists_every_file(written):
    folder = written / "dump" / "rank0"
    lines = (folder / "index.txt").read_text().splitlines()[2:]
    listed = [line.split()[0] for line in lines if not line.endswith("changed nothing")]
    assert sorted(listed) == sorted(p.name for p in folder.iterdir() if p.name != "index.txt")
    made = [name.split("_", 1)[1] for name in listed if name.endswith(("plan.txt", "inductor.py"))]
    assert made == [
        "forward_plan.txt", "forward_inductor.py", "backward_plan.txt", "backward_inductor.py",
    ]  # fmt: skip
    (code,) = folder.glob("*_forward_inductor.py")
    assert "def call(" in code.read_text()


def test_the_plan_has_buckets_schedule_and_memory(written):
    (path,) = (written / "dump" / "rank0").glob("*_forward_plan.txt")
    text = path.read_text()
    assert re.match(r"forward graph \d+: 3 all_gather, ", text)
    parts = re.split(r"\n\n(buckets|schedule|memory)\n\n", text)
    assert parts[1::2] == ["buckets", "schedule", "memory"]
    buckets, schedule, memory = (part.splitlines() for part in parts[2::2])
    assert [row.split()[0] for row in buckets[2:5]] == ["Stack", "layers.0", "layers.1"]
    assert buckets[-1] == "within the budget, kept gathered: Stack, layers.0, layers.1"
    rows = [re.split(r"\s{2,}", row.strip())[1:4] for row in schedule[2:]]
    assert rows == [["forward", "all-gather", f] for f in ("Stack", "layers.0", "layers.1")]
    assert memory[-1].startswith("peak with all of these")


def test_the_trace_has_the_same(written):
    (path,) = (written / "trace").iterdir()
    seen, payload = {}, None
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            payload.append(line.removeprefix("\t"))
        else:
            record = json.loads(line.split("] ", 1)[1])
            payload = seen.setdefault(record.get("artifact", {}).get("name"), [])
    texts = {name: lines for name, lines in seen.items() if name and name.startswith("shardc_")}
    folder = written / "dump" / "rank0"
    files = [p for p in folder.iterdir() if p.suffix in (".py", ".diff", ".txt")]
    files = [p for p in files if p.name != "index.txt" and "_inductor" not in p.name]
    assert sorted(texts) == sorted(f"shardc_{path.name}" for path in files)
    for path in files:
        assert "\n".join(texts[f"shardc_{path.name}"]) == path.read_text(), path.name


def test_logs_by_level(written):
    said = [line.split("] ", 2) for line in (written / "log").read_text().splitlines()]
    said = [(where, *rest) for where, *rest in said if re.match(r"\[rank0\]:[IV]", where)]
    info = [rest[-1] for where, *rest in said if where.startswith("[rank0]:I")]
    kinds = [re.sub(r" graph \d+.*", "", line) for line in info]
    assert kinds == ["forward", "backward", "compiled"]
    debug = [rest[-1] for where, *rest in said if where.startswith("[rank0]:V")]
    for start in (
        r"compiling graph 0/0$",
        r"forward graph \d+: schedule took ",
        r"graph \d+: within 953.7 MiB: kept gathered: Stack, layers.0, layers.1; up to 2 units",
        r"graph \d+: all_gather of layers.1 \(.*\) starts before ",
        r"graph \d+: \d+ stretches became calls of \d+ bodies",
    ):
        assert any(re.match(start, line) for line in debug), start


def test_info_is_a_line_a_graph_and_nothing_is_traced_unasked():
    done = _run_step(TORCH_LOGS="shardc")
    assert done.stdout == "not traced\n"
    lines = re.findall(r"^\[rank0\]:.* (?:graph 0/0|[a-z]+ graph \d+)", done.stderr, re.MULTILINE)
    assert len(lines) == 3, done.stderr  # and a sum
