"""What Inductor fails on becomes a script that fails in the same way, alone."""

import os
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Stack, seeded, shard_all, tokens
from ranks import on_ranks
from test_backend import BROKEN, warned_on_all_ranks
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves

import shardc.backend.lowering
from shardc import fully_shard
from shardc.backend import repro


def _options(**inductor):
    return {"inductor": {"force_disable_caches": True, **inductor}}


def _steps(model, options, *inputs, **kwargs):
    """A forward and a backward, with the messages of warnings on all ranks."""
    step = torch.compile(model, backend="shardc", options=options, **kwargs)
    return warned_on_all_ranks(lambda: step(*inputs).pow(2).mean().backward())


def _run(path):
    """The last line that a script prints, run in a process without peers."""
    folders = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, path], env=alone | {"PYTHONPATH": folders},
        capture_output=True, text=True, cwd=Path(path).parent,
    )  # fmt: skip
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize("reason", BROKEN)
@on_ranks(2)
def test_the_script_fails_as_the_graph_did(mesh, reason):
    model = fully_shard(seeded(Block), mesh=mesh)
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, SHARDC_DUMP=folder):
            (message,) = _steps(model, _options(**BROKEN[reason]), torch.randn(3, 18))
        own = Path(folder, f"rank{dist.get_rank()}")
        scripts = sorted(own.glob("repro_*.py"), key=lambda path: int(path.stem.split("_")[1]))
        assert [script.stem.split("_")[2] for script in scripts] == ["forward", "backward"]
        forward = scripts[0]
        told = re.search(r"to reproduce it alone: (\S+) \S+/rank\d/(\S+\.py)", message)
        assert told and told[1] == sys.executable, message  # of the rank that was first
        assert told[2].endswith("_forward.py") and reason in message, message
        assert forward.name in (own / "index.txt").read_text()
        if dist.get_rank() == 0:
            for script in scripts:
                last = _run(script)
                assert "torch._inductor.exc.InductorError: " in last and reason in last, last


@on_ranks(2)
def test_the_error_names_the_script_where_nothing_falls_back(mesh):
    model = fully_shard(seeded(Block), mesh=mesh)
    options = {**_options(**BROKEN["no code for this op"]), "fallback": False}
    with mock.patch.dict(os.environ):
        os.environ.pop("SHARDC_DUMP", None)
        with pytest.raises(torch._inductor.exc.InductorError) as caught:
            _steps(model, options, torch.randn(3, 18))
    path = re.search(r"to reproduce it alone: \S+ (\S+\.py)", str(caught.value)).group(1)
    assert Path(path).is_relative_to(tempfile.gettempdir())
    assert f"rank{dist.get_rank()}" in path and "class Graph(" in Path(path).read_text()


@torch.library.custom_op("shardc_test_repro::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    """An op of the user's, in a module that can be imported."""
    return x * 3


tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, grad: tripled(grad))


class WithOwnOp(Block):
    def forward(self, x):
        return tripled(super().forward(x))


@pytest.mark.parametrize("module", [__name__, "__main__"])
@on_ranks(2)
def test_the_script_registers_ops_of_the_user_or_says_what_it_needs(mesh, module):
    model = fully_shard(seeded(WithOwnOp), mesh=mesh)
    own_op = mock.patch.object(tripled._init_fn, "__module__", module)
    with tempfile.TemporaryDirectory() as folder:
        with mock.patch.dict(os.environ, SHARDC_DUMP=folder), own_op:
            _steps(model, _options(**BROKEN["no code for this op"]), torch.randn(3, 18))
        scripts = sorted(Path(folder, f"rank{dist.get_rank()}").glob("repro_*.py"))
        assert len(scripts) == 2
        for script in scripts if dist.get_rank() == 0 else ():
            assert "shardc_test_repro.tripled" in script.read_text()
            last = _run(script)
            if module == __name__:
                assert "torch._inductor.exc.InductorError: " in last, last
            else:
                said = "The graph calls shardc_test_repro::tripled, an op that .* defined. Copy its"
                assert re.search(said, last), last


class Scaled(Stack):
    """With a constant tensor."""

    def forward(self, tokens):
        return super().forward(tokens) * torch.tensor([0.5, 2.0]).sum()


@pytest.mark.parametrize("dynamic", [False, True])
@on_ranks(2)
def test_the_script_holds_the_graph_op_by_op(mesh, dynamic):
    model = shard_all(seeded(Scaled), mesh, reshard_after_forward=True)
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        keep = mock.patch.object(
            shardc.backend.lowering,
            "write_repro",
            lambda gm, *rest: seen.append(gm) or repro.write_repro(gm, *rest),
        )
        with mock.patch.dict(os.environ, SHARDC_DUMP=folder), keep:
            broken = {**_options(**BROKEN["no code for this op"]), "fold": False}
            _steps(model, broken, tokens(0), dynamic=dynamic)
        scripts = sorted(Path(folder, f"rank{dist.get_rank()}").glob("repro_*.py"))
        for gm, script in zip(seen, scripts, strict=True):
            made = runpy.run_path(str(script))
            assert any(isinstance(given, int) for given in made["INPUTS"]) == dynamic
            assert made["GROUPS"] == {"0": (dist.get_rank(), 2)}
            with torch.no_grad():
                again = repro.rebuild(made["Graph"], made["CONSTANTS"], made["INPUTS"])
            pairs = zip(_calls(gm), _calls(again), strict=True)
            for ours, theirs in pairs:
                assert theirs[: 2 if dynamic else 3] == ours[: 2 if dynamic else 3], script.name
    assert len(seen) == 2


def _calls(gm):
    """The ops of a graph, in order, on results of what, with the shapes of what they give."""
    return [
        (
            str(node.target),
            [str(operand.target) for operand in node.all_input_nodes if operand.op == node.op],
            [v.shape for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)],
        )
        for node in gm.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
    ]


def test_what_no_script_can_hold_is_named():
    with torch._inductor.config.patch(post_grad_custom_pre_pass=lambda graph: None):
        found = repro._settings()
    own = {name: text for name, text in found.items() if name == "post_grad_custom_pre_pass"}
    assert own == {"post_grad_custom_pre_pass": "<function, which no script can hold>"}
    assert repro._lines(own) == (
        "{\n    # 'post_grad_custom_pre_pass': <function, which no script can hold>\n}"
    )


def test_objects_of_the_training_script_are_named():
    graph = Graph()
    op = torch.ops.shardc.custom_all_gather.default
    graph.output((graph.call_function(op, (graph.placeholder("x"), 2, "0", "comm:0")),))
    gm = GraphModule(nn.Module(), graph)
    assert repro._arguments(gm, "group", "group_name") == ["0"]
    assert "It calls comm:0 of the training script" in repro._notes(gm)[1]


def test_groups_have_their_names_ranks_and_sizes_without_peers():
    script = """
        from shardc.runtime import compat
        groups = {"0": (3, 4), "5": (1, 2), "rows": (0, 3)}
        compat.make_fake_groups(groups)
        found = {name: compat.resolve_group(name) for name in groups}
        print({name: (group.rank(), group.size()) for name, group in found.items()} == groups)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


def test_a_graph_that_compiles_says_so(capsys):
    class Graph(nn.Module):
        def forward(self, x):
            return (torch.ops.aten.sin.default(x),)

    repro.reproduce(Graph, {}, [((4,), (1,), torch.float32, "cpu")], {}, {}, {})
    assert capsys.readouterr().out.startswith("Inductor compiles it here")
