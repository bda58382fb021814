"""Compiled graphs on disk: one rank compiles for all, and the next start compiles nothing."""

import json
import os
import pickle
import pickletools
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import check_parity, seeded, tokens
from ranks import FORKS, forget_agreements, free_port, mesh_of, on_ranks
from subclasses import Fp8, extended
from test_backend import warned_on_all_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.cpu_vec_isa import VecISA
from torch.distributed.device_mesh import DeviceMesh

import shardc
from shardc import fully_shard
from shardc.backend import compile_cache
from shardc.backend.graph_plan import graph_plans
from shardc.backend.options import Options
from shardc.reports.live import rows_of
from shardc.runtime import compat
from shardc.runtime.watch import hand_over
from shardc.runtime.watch.history import history_of


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x):  # little C++ to compile
        return self.down(self.up(x)).sum()


def _start(width, mesh, batch=3, own_groups=False, reshard_after_forward=True, **options):
    """What a process does after its start: the model, its loss and gradients, hits and misses."""
    torch._dynamo.reset()
    forget_agreements()
    counters.clear()
    graph_plans.clear()
    model = seeded(lambda: Net(width))
    for unit in (model.up, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    if own_groups:
        model.set_separate_all_gather_group()
        model.set_separate_reduce_scatter_group()
    step = torch.compile(model, backend="shardc", options=options)
    torch.manual_seed(dist.get_rank())
    loss = step(torch.randn(batch, width))
    loss.backward()
    grads = [p.grad.to_local().clone() for p in model.parameters()]
    found = counters["aot_autograd"]
    return step, [loss.detach(), *grads], found["autograd_cache_hit"], found["autograd_cache_miss"]


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield path


def in_folder(folder):
    """Compiled graphs are kept in `folder`."""
    compile_cache._folder.cache_clear()
    return mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder))


def _gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _one_compiles(*found):
    """Whether one rank has compiled a graph that all others have loaded."""
    return sorted(_gathered(found)) == [(0, 1)] + [(1, 0)] * (dist.get_world_size() - 1)


@on_ranks(2)
def test_one_rank_compiles_and_all_load_at_the_next_start(mesh, folder):
    with in_folder(folder):
        before = _known(mesh)
        _, first, hit, miss = _start(6, mesh)
        compiled = [(p.phase, p.collectives, p.order, p.peak, rows_of(p)) for p in graph_plans]
        entered = _known(mesh) - before
        assert _one_compiles(hit, miss)
        before = _known(mesh)
        step, second, *found = _start(6, mesh)
    assert found == [1, 0]
    loaded = [(p.phase, p.collectives, p.order, p.peak, rows_of(p)) for p in graph_plans]
    assert loaded == compiled and [phase for phase, *_ in loaded] == ["forward", "backward"]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(shardc.report(step).buckets) == 2
    # A graph that is loaded enters its collectives into the history, where parting ranks show.
    assert 0 < _known(mesh) - before <= entered


@pytest.mark.parametrize(
    ("shape", "settings"), [((2, 2), {"own_groups": True}), ((4,), {"reshard_after_forward": 2})]
)
@on_ranks(4)
def test_one_rank_compiles_for_groups_of_other_ranks(mesh, folder, shape, settings):
    own = mesh_of("cpu", shape)
    with in_folder(folder):
        _, _, hit, miss = _start(5, own, **settings)
        assert _one_compiles(hit, miss)
        step, _, *found = _start(5, own, **settings)
        assert found == [1, 0]
        model = step._orig_mod
        model.zero_grad()
        check_parity(seeded(lambda: Net(5)), model, step, _batch, mesh, steps=2)


def _known(mesh):
    return history_of(compat.group_name(mesh.get_group())).count


@on_ranks(2)
def test_graphs_of_later_steps_are_compiled_by_one_rank_too(mesh, folder):
    with in_folder(folder):
        step, *_ = _start(6, mesh)
        counters.clear()
        x = torch.randn(3, 6)
        with step.no_sync():
            step(x).backward()
        step(x).backward()  # reduces what waited, too
        with torch.no_grad():
            step(x)
        found = counters["aot_autograd"]
        hit, miss = found["autograd_cache_hit"], found["autograd_cache_miss"]
    assert hit + miss == 3
    assert sum(miss for _, miss in _gathered((hit, miss))) == 3


class Called(nn.Module):
    """A linear layer, and what is called after it."""

    def __init__(self, after, width):
        super().__init__()
        self.lin, self.after = nn.Linear(width, width, bias=False), after

    def forward(self, x):
        return self.after(self.lin(x))


def _blocks(mesh):
    torch._dynamo.reset()
    counters.clear()
    forget_agreements()
    blocks = seeded(lambda: [Called(torch.sin, 6), Called(torch.cos, 6)])
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
        block.compile(backend="shardc")
    return blocks


def _compiled():
    return sum(_gathered(counters["aot_autograd"]["autograd_cache_miss"]))


@on_ranks(2)
def test_blocks_without_collectives_are_compiled_by_one_rank_too(mesh, folder):
    model = fully_shard(nn.Sequential(*_blocks(mesh)), mesh=mesh)  # the runtime gathers for them
    with in_folder(folder):
        model(torch.randn(3, 6)).sum().backward()
    assert _compiled() == 2


@on_ranks(2)
def test_ranks_that_compare_over_several_groups_compile_at_once(mesh, folder):
    """One that waited for another would trace only when that one has something to compare."""
    first, second = seeded(lambda: [Called(torch.sin, 6), Called(torch.cos, 6)])
    fully_shard(first, mesh=mesh)
    fully_shard(second, mesh=DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"))
    call = torch.compile(lambda x: second(first(x)).sum(), backend="shardc")
    made = mock.Mock(side_effect=hand_over.HandOver)  # none is made
    with in_folder(folder), mock.patch.object(compile_cache, "HandOver", made):
        call(torch.randn(3, 6)).backward()
    assert not made.called


@pytest.mark.parametrize("differentiated", [False, True])
@on_ranks(2)
def test_another_graph_of_equal_buckets(mesh, folder, differentiated):
    """A rank may be alone with it: the first rank compiles, and who comes meanwhile waits.

    Where the graph has something new to compare, those who wait compile, too.
    """
    first, second = _blocks(mesh)
    with in_folder(folder):
        first(torch.randn(3, 6)).sum().backward()
        assert _compiled() == 1
        x = torch.randn(3, 6, requires_grad=differentiated)  # its gradient needs another gather
        second(x).sum().backward()
        assert _compiled() == (3 if differentiated else 2), _compiled()


@on_ranks(2)
def test_what_is_loaded_trains_as_unsharded(mesh, folder):
    """Its blocks are traced once."""

    class Repeated(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.layers = nn.ModuleList(Scaled(scale) for _ in range(4))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 6), scale

        def forward(self, x):
            return x + self.scale * torch.tanh(self.linear(x))

    hits = []
    with in_folder(folder):
        for scale in (2.0, 2.0, 3.0):
            torch._dynamo.reset()
            forget_agreements()
            counters.clear()
            plain, model = (seeded(lambda s=scale: Repeated(s)) for _ in range(2))
            fully_shard(model, mesh=mesh, units="auto")
            step = torch.compile(model, backend="shardc")
            check_parity(plain, model, step, lambda seed: {"x": tokens(seed, (2, 6)) / 31}, mesh)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert sorted(_gathered(hits[0])) == [0, 1] and hits[1] == 1
    assert sorted(_gathered(hits[2])) == [0, 1]  # the body counts, which only its digest names


@on_ranks(2)
def test_rows_of_tables_are_looked_up_by_what_is_loaded(mesh, folder):
    def start():
        torch._dynamo.reset()
        forget_agreements()
        counters.clear()
        graph_plans.clear()
        model = seeded(lambda: nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 4)))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        step = torch.compile(model, backend="shardc", options={"embedding_rows": True})
        out = step(torch.arange(12).view(3, 4) % (9 + mesh.get_local_rank()))
        out.square().sum().backward()
        grads = [p.grad.full_tensor() for p in model.parameters()]
        found = counters["aot_autograd"]["autograd_cache_hit"]
        return found, [p.collectives for p in graph_plans], [out.detach(), *grads]

    with in_folder(folder):
        _, compiled, first = start()
        found, loaded, second = start()
    assert found == 1, found
    assert loaded == compiled, (loaded, compiled)
    assert any("fetch_rows" in line for line in loaded[0])
    assert any("return_rows" in line for line in loaded[1])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[1].count_nonzero() > 0


def _batch(seed):
    torch.manual_seed(seed)
    return {"x": torch.randn(3, 5)}


@on_ranks(2)
def test_ranks_with_shapes_of_their_own_compile_and_load_their_own(mesh, folder):
    rank = mesh.get_local_rank()
    with in_folder(folder):
        _, first, *found = _start(6, mesh, batch=3 + rank)
        assert found == [0, 1]
        _, second, *found = _start(6, mesh, batch=3 + rank)
        assert found == [1, 0]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        # Beside another peer the schedule may be another: nothing is taken for it.
        _, _, *found = _start(6, mesh, batch=3 + 2 * rank)
        assert found == [0, 1]


@on_ranks(2)
def test_what_the_passes_look_at_is_part_of_the_key(mesh, folder):
    with in_folder(folder):
        for options in ({}, {"prefetch": 0}):
            assert _one_compiles(*_start(6, mesh, **options)[2:]), options
        with mock.patch.object(compile_cache, "_version", lambda: "other code"):
            assert _one_compiles(*_start(6, mesh)[2:])


@on_ranks(2)
def test_a_graph_that_a_partitioner_of_ours_cuts_is_kept(mesh, folder):
    with in_folder(folder):
        _, first, *found = _start(6, mesh, keep_read_first=True)
        assert _one_compiles(*found)
        _, second, *found = _start(6, mesh, keep_read_first=True)
    assert found == [1, 0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_ranks(2)
def test_kernels_travel_with_their_graph(mesh, folder):
    """A rank with a folder of its own runs no compiler, nor does a start that finds its graph."""
    built, build = [], CppBuilder.build

    def noting(builder):
        built.append(builder.get_target_file_path())
        build(builder)

    def start():
        built.clear()
        CppPythonBindingsCodeCache.cache_clear()
        _, results, *found = _start(6, mesh, batch=7)
        return results, found, [name for name in built if "main" in name or "gch" in name]

    own = Path(folder, str(mesh.get_local_rank()))
    in_chunks = mock.patch.object(hand_over, "_CHUNK", 1000)
    with in_folder(own), in_chunks, mock.patch.object(CppBuilder, "build", noting):
        first, (hit, miss), compiled = start()
        assert _one_compiles(hit, miss) and bool(compiled) == bool(miss), (hit, compiled)
        assert len(list(own.glob("aotautograd/*/*"))) == 1
        second, found, compiled = start()
        assert found == [1, 0] and not compiled, compiled
    compile_cache._folder.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(not hasattr(VecISA, "_probe_load"), reason="torch before 2.13 probes inline")
def test_a_library_that_loads_is_tried_once(tmp_path):
    probe = mock.Mock(side_effect=[False, True])
    with mock.patch.object(VecISA, "_probe_load", probe), compat.remembering_probes():
        tried = [VecISA._probe_load(VecISA(), f"{tmp_path}/a.so") for _ in range(4)]
    assert tried == [False, True, True, True] and probe.call_count == 2


@on_ranks(2)
def test_a_damaged_entry_is_compiled_anew(mesh, folder):
    """And where one rank cannot load, by all."""
    with in_folder(folder):
        _start(6, mesh)
        dist.barrier()
        if mesh.get_local_rank() == 0:
            (entry,) = Path(folder).glob("aotautograd/*/*")
            entry.write_bytes(entry.read_bytes()[:1000])
        dist.barrier()
        assert _one_compiles(*_start(6, mesh)[2:])
        dumps = {"SHARDC_DUMP": f"{folder}/dumps"} if mesh.get_local_rank() == 1 else {}
        with mock.patch.dict(os.environ, dumps):
            _, _, hit, _ = _start(6, mesh)
        assert hit == 0


@on_ranks(2)
def test_a_compile_that_fails_is_left_to_each_rank(mesh, folder):
    def fail(*args, **kwargs):
        raise compat.inductor_error()(RuntimeError("no code for this op"), None)

    def start():
        with in_folder(folder), mock.patch.object(compat, "compile_fx_inner", fail):
            _, values, *_ = _start(6, mesh)
            assert not list(Path(folder).glob("aotautograd/*/*"))
        assert all(value.isfinite().all() for value in values)

    (message,) = warned_on_all_ranks(start)
    assert "no code for this op" in message


# -- a rank that dies while it compiles for all ---------------------------------------------------


def _compile_and_die(rank, port, folder, at, results):
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHINDUCTOR_CACHE_DIR=folder
    )
    torch.set_num_threads(1)
    torch._inductor.config.cpp.vec_isa_ok = False  # or each process tries what the compiler can
    dist.init_process_group("gloo", rank=rank, world_size=3)
    hand_over._DEAD, hand_over._BEAT = 3.0, 0.2
    store = dist.distributed_c10d._get_default_store()

    class Dying(hand_over.HandOver):
        """The rank that compiles for all is the last one, which does not hold the store."""

        def __init__(self, group, key):
            super().__init__(group, key)
            self._maker, self.leads = 2, rank == 2

        def begin(self, folders):
            super().begin(folders)
            if at == "begins":
                os.kill(os.getpid(), signal.SIGKILL)

        def give(self, content):
            if content is not None and at == "has written":
                os.kill(os.getpid(), signal.SIGKILL)
            super().give(content)

    compile_cache.HandOver = Dying
    if rank == 2 and at == "writes":
        write = torch._inductor.codecache.write_atomic

        def die(path, content, *args, **kwargs):
            if "aotautograd" in str(path):
                Path(f"{path}.half").write_bytes(content[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return write(path, content, *args, **kwargs)

        import torch._functorch._aot_autograd.autograd_cache as theirs

        theirs.write_atomic = die
    mesh = dist.init_device_mesh("cpu", (3,))
    try:
        _start(7, mesh)
        results.put((rank, "no error"))
    except RuntimeError as error:
        results.put((rank, str(error)))
    del store
    threading.Event().wait()


@pytest.mark.parametrize("at", ["begins", "writes", "has written"])
def test_a_rank_killed_while_it_compiles_for_all(at, folder):
    port = free_port()
    results = FORKS.Queue()
    arguments = (port, folder, at, results)
    ranks = [FORKS.Process(target=_compile_and_die, args=(rank, *arguments)) for rank in range(3)]
    for process in ranks:
        process.start()
    try:
        errors = dict(results.get(timeout=300) for _ in range(2))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert set(errors) == {0, 1}
    for text in errors.values():  # they compiled, or loaded what is whole, and miss it later
        assert "a collective of shardc failed" in text, errors


# -- ahead of time --------------------------------------------------------------------------------

_JOB = """
    import os, torch, torch.distributed as dist
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from shardc import fully_shard

    class Cut(nn.Sequential):  # in pieces, which the runtime gathers for
        def forward(self, x):
            x = self[0](x)
            torch._dynamo.graph_break()
            return self[1](x)

    def build():
        kind = Cut if "CUT" in os.environ else nn.Sequential
        model = kind(*(nn.Linear(6, 6, bias=False) for _ in range(2)))
        return model, (torch.empty(3, 6),)

    def train(mesh):  # all graphs of a job; how many were found, and how many compiled
        model, _ = build()
        fully_shard(model, mesh=mesh, units="auto")
        model.compile(backend="shardc")
        x = torch.randn(3, 6)
        model(x).sum().backward()
        model.zero_grad()
        with model.no_sync():
            model(x).sum().backward()
        model(x).sum().backward()
        with torch.no_grad():
            model.eval()(x)
        found = counters["aot_autograd"]
        return f"{found['autograd_cache_hit']} {found['autograd_cache_miss']}"

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        text = train(init_device_mesh("cpu", (2,)))
        open(f"{os.environ['REPORTS']}/{dist.get_rank()}", "w").write(text)
        dist.destroy_process_group()
"""


def _precompiled(folder, *options, **environment):
    """What `shardc precompile` has compiled in `folder`, and what it has found there."""
    Path(folder, "job.py").write_text(textwrap.dedent(_JOB))
    command = [sys.executable, "-m", "shardc", "precompile", "job:build", "--world-size=2",
               "--cache=cache", "--json", *options]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "2"} | environment
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.strip().split("\n")[-1])
    assert said["folder"] == f"{folder}/cache"
    return said["compiled"], said["found"]


@pytest.mark.parametrize("cut", [{}, {"CUT": "1"}], ids=["whole", "cut"])
def test_a_precompiled_job_compiles_nothing(folder, cut):
    scalar = {"TORCHINDUCTOR_VEC_ISA_OK": "0", **cut}  # or each process tries what it can
    graphs = 4 if cut else 2
    assert _precompiled(folder, **scalar) == (graphs, 0)
    assert _precompiled(folder, "--accumulation", **scalar) == (graphs, graphs)
    env = os.environ | {"REPORTS": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"} | scalar
    env.pop("OMP_NUM_THREADS", None)  # torchrun sets it for the job
    job = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
           "--standalone", "--master-port=0", "job.py"]  # fmt: skip
    done = subprocess.run(job, env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [Path(folder, rank).read_text() for rank in "01"] == [f"{2 * graphs} 0"] * 2


@on_ranks(4)
def test_a_job_of_copies_is_precompiled(mesh, folder):
    if mesh.get_local_rank() == 0:
        assert _precompiled(folder, "--copies=2", "--accumulation") == (4, 0)
    dist.barrier()
    counters.clear()
    with in_folder(f"{folder}/cache"):
        found = runpy.run_path(f"{folder}/job.py")["train"](mesh_of("cpu", (2, 2)))
    assert found == "4 0", found


def test_what_cannot_be_precompiled():
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="give world_size or mesh, not both"):
        shardc.precompile(model, torch.ones(2, 3), mesh=(2,), world_size=2)
    with pytest.raises(ValueError, match="for 'cuda' needs a GPU of the job's kind"):
        shardc.precompile(model, torch.ones(2, 3), world_size=2, device_type="cuda")
    extended(model, Fp8)
    with pytest.raises(ValueError, match=r"'weight' is a Fp8, .* not kept on disk.*at its start"):
        shardc.precompile(model, torch.ones(2, 3), world_size=2)


@on_ranks(2)
def test_a_loaded_graph_with_dynamic_sizes_takes_gradients_of_its_outputs(mesh, folder):
    with in_folder(folder):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            model = fully_shard(seeded(lambda: nn.Linear(6, 6, bias=False)), mesh=mesh)
            step = torch.compile(model, backend="shardc", dynamic=True)
            x = torch.ones(3, 6)
            step(x).backward(torch.ones(3, 6))
            hit = counters["aot_autograd"]["autograd_cache_hit"]
    assert hit == 1
    grad = model.weight.grad.to_local()
    assert torch.equal(grad, torch.full_like(grad, 3))


def test_code_for_one_gpu_becomes_code_for_another():
    code = (
        "with torch.cuda._DeviceGuard(1):\n"
        "    raw_stream1 = get_raw_stream(1)\n"
        "    k.run(x, 1, stream=raw_stream1)\n"
        "    y = full([1], 1, device=device(type='cuda', index=1))  # cuda:1 and cuda:10\n"
    )
    moved = compat.with_index(code, 1, 12)
    assert moved == (
        "with torch.cuda._DeviceGuard(12):\n"
        "    raw_stream12 = get_raw_stream(12)\n"
        "    k.run(x, 1, stream=raw_stream12)\n"
        "    y = full([1], 1, device=device(type='cuda', index=12))  # cuda:12 and cuda:10\n"
    )


def test_code_that_shapes_no_graph_leaves_compiled_graphs_valid():
    """The key has all classes of what is kept with a graph, and no report, command or optimizer."""
    shardc.explain(nn.Linear(4, 4), torch.empty(2, 4, device="meta"), world_size=2)
    kept = pickle.dumps(replace(graph_plans[-1], buckets=(), options=Options()))  # as it is kept
    named = [arg for _, arg, _ in pickletools.genops(kept) if isinstance(arg, str)]
    modules = {name for name in named if name.startswith("shardc.") and name in sys.modules}
    files = {str(path) for path in compile_cache.core_files()}
    assert len(modules) > 3 and {sys.modules[name].__file__ for name in modules} <= files
    folders = ("reports/text.py", "commands/", "optim/", "state/", "integrations/", "planning/")
    assert not [file for file in files for part in folders if f"shardc/{part}" in file]
