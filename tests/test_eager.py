"""The eager runtime: a sharded model uncompiled has FSDP's results, memory and messages."""

import contextlib
import gc
import logging
import threading
import time
import warnings
import weakref
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp2 import check_against_fsdp2, fsdp2, sharded
from models import (
    Block,
    Checkpointed,
    Choosing,
    CompiledMode,
    Stack,
    batch_of,
    check_gradients,
    check_parity,
    full,
    mean_over_ranks,
    measured_peak,
    seeded,
    tokens,
)
from ranks import on_ranks
from test_backend import Broken, Graphs
from test_shard_tensor import strictly
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardc import fully_shard
from shardc.runtime.comm import unshard
from shardc.runtime.unit import eager
from shardc.runtime.unit import gather_order as gathers


class Events:
    """What is started and waited for, in order, while it is entered: ("start", unit) and so on."""

    def __init__(self):
        self.log = []
        self.gathered = []
        self._patches = contextlib.ExitStack()

    def __enter__(self):
        start, reducing = gathers._start, unshard.reducing

        def start_and_log(bucket, *args):
            gather = start(bucket, *args)
            self.log.append(("start", bucket.owner.name))

            def note(raw):
                self.log.append(("wait", bucket.owner.name))
                self.gathered.append(weakref.ref(raw.untyped_storage()))
                return gather.started.then(raw)

            return replace(gather, started=replace(gather.started, then=note))

        def reduce_and_log(flat, *others):
            self.log.append(("reduce", flat.numel()))
            return reducing(flat, *others)

        for module, name, new in (
            (gathers, "_start", start_and_log),
            ("shardc.runtime.unit.backward_pass", "reducing", reduce_and_log),
        ):
            target = f"{module if isinstance(module, str) else module.__name__}.{name}"
            self._patches.enter_context(mock.patch(target, new))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def of(self, kind):
        return [unit for event, unit in self.log if event == kind]

    def alive(self, expected=0):
        """How many bytes of gathered buckets exist once gloo's threads have let go of theirs."""
        for _ in range(2000):
            gc.collect()
            storages = [reference() for reference in self.gathered]
            nbytes = sum(storage.nbytes() for storage in storages if storage is not None)
            del storages
            if nbytes == expected:
                break
            time.sleep(0.02)
        return nbytes


def _step(model, call, number):
    rank = torch.distributed.get_rank()
    call(tokens(10 * number + rank), tokens(10 * number + rank + 5)).backward()


UNITS = ["layers.0", "layers.1", "layers.2"]


# -- results, messages, memory ---------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_bitwise_equal_to_fsdp2(mesh, tied):
    theirs = fsdp2(seeded(lambda: Stack(3, tied=tied)), mesh)
    ours = sharded(seeded(lambda: Stack(3, tied=tied)), mesh)
    check_against_fsdp2(theirs, ours, ours, _step, tolerance=0)


@on_ranks(2)
def test_gathered_ahead_and_again_for_the_backward(mesh):
    model = sharded(seeded(lambda: Stack(3)), mesh)
    with Events() as events:
        for name, layer in model.layers.named_children():
            layer.register_forward_hook(lambda *_, n=name: events.log.append(("done", n)))
        for number in range(2):
            events.log.clear()
            _step(model, model, number)
            assert events.of("start") == ["Stack", *UNITS, *UNITS[::-1]]
            assert events.of("wait") == events.of("start")
            # The next bucket is under way while this one is computed with, from the second step on.
            ahead = [events.log.index(("start", f"layers.{n + 1}")) <
                     events.log.index(("done", f"{n}")) for n in range(2)]  # fmt: skip
            assert ahead == [number > 0] * 2, events.log
            # The one after that is not.
            assert events.log.index(("start", "layers.2")) > events.log.index(("done", "0"))
            backward = events.log[events.log.index(("done", "2")) :]
            reduced = [i for i, (event, _) in enumerate(backward) if event == "reduce"]
            started = backward.index(("start", "layers.1"))
            assert (started < reduced[0]) == (number > 0), backward
            assert events.alive() == 0
        loss = model(tokens(1), tokens(2))
        # Only the root's stays; what the blocks saved are handles.
        root = 4 * model._shardc_unit.buckets[0].layout.numel
        assert events.alive(expected=root) == root
        loss.backward()
        del loss
        assert events.alive() == 0


@on_ranks(2)
def test_what_went_ahead_of_a_write_is_gathered_again(mesh):
    plain, model = seeded(lambda: Stack(3)), sharded(seeded(lambda: Stack(3)), mesh)
    x = tokens(1)
    before = plain(x, x)
    with torch.no_grad():  # nothing stays for a backward
        torch.testing.assert_close(model(x, x), before)  # now the order is known
    for side in (plain, model):

        def write(*_, layer=side.layers[1]):
            with torch.no_grad():
                layer.up.weight.mul_(3)

        side.layers[0].register_forward_hook(write)
    after = plain(x, x)
    assert not torch.equal(after, before)
    with Events() as events:
        torch.testing.assert_close(model(x, x), after)
    assert events.of("start") == ["Stack", "layers.0", "layers.1", *UNITS[1:]]


@on_ranks(2)
def test_a_forward_on_another_thread_is_one_of_its_own(mesh):
    first, second = (fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2))
    inside = []

    def run_second(*_):
        thread = threading.Thread(target=second, args=(torch.ones(2, 4),))
        thread.start()
        thread.join()

    second.register_forward_hook(
        lambda *_: inside.append(eager.is_inside_other_unit(second._shardc_unit))
    )
    first.register_forward_pre_hook(run_second)
    first(torch.ones(2, 4)).sum().backward()
    assert inside == [False]


@on_ranks(2)
def test_a_gradient_is_dealt_out_while_the_backward_runs(mesh):
    model = sharded(seeded(lambda: Stack(3)), mesh)
    seen = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, n=name: seen.append(n))
    model.layers[0].register_full_backward_pre_hook(lambda *_: seen.append("layers.0 begins"))
    _step(model, model, 0)
    begins = seen.index("layers.0 begins")
    assert "layers.2.up.weight" in seen[:begins] and "layers.0.up.weight" in seen[begins:]


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True) for _ in range(6)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@on_ranks(2)
def test_memory_is_that_of_fsdp2(mesh, tmp_path):
    peaks = []
    folder = tmp_path / str(mesh.get_local_rank())
    folder.mkdir()
    x = torch.randn(2, 64, 64)
    for shard in (fsdp2, sharded):
        model = shard(seeded(Deep), mesh)
        for _ in range(2):
            model(x).backward()
        peaks.append(min(measured_peak(lambda m=model: m(x).backward(), folder) for _ in range(3)))
    assert peaks[1] <= 1.1 * peaks[0], peaks


# -- pieces: compiled blocks, wrapped blocks, graph breaks -----------------------------------------


class BrokenBlock(Block):
    """Breaks the graph inside, between two uses of its bucket."""

    def forward(self, x):
        y = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(nn.functional.gelu(y))


class BrokenInside(Stack):
    def __init__(self, blocks):
        super().__init__(0)
        self.layers = nn.ModuleList(BrokenBlock() for _ in range(blocks))


OPTIONS = {"backend": "shardc", "options": {"executor": "eager", "fallback": False}}


def _compile_blocks(model):
    for layer in model.layers:
        layer.compile(**OPTIONS)
    return model


def _wrap_blocks(model):
    model.layers = nn.ModuleList(torch.compile(layer, **OPTIONS) for layer in model.layers)
    return model


MIXES = {
    "blocks compiled in place": (_compile_blocks, Stack),
    "blocks wrapped": (_wrap_blocks, Stack),
    "breaks between blocks": (lambda model: model.compile(**OPTIONS), Broken),
    "breaks in compiled blocks": (_compile_blocks, BrokenInside),
}


@pytest.mark.parametrize("mix", MIXES)
@on_ranks(2)
def test_a_bucket_is_gathered_once_for_all_pieces(mesh, mix):
    prepare, build = MIXES[mix]
    theirs = fsdp2(seeded(lambda: build(3)), mesh)
    ours = sharded(seeded(lambda: build(3)), mesh)
    pairs = list(zip(theirs.parameters(), ours.parameters(), strict=True))
    counters.clear()
    prepare(ours)
    with Events() as events:
        for number in range(3):
            events.log.clear()
            for model in (theirs, ours):
                _step(model, model, number)
            if number > 1:
                assert events.of("start") == [build.__name__, *UNITS, *UNITS[::-1]], events.log
                assert len(events.of("reduce")) == 4
            assert events.alive() == 0
            for p, q in pairs:
                assert torch.equal(p.grad.full_tensor(), full(q.grad))
                with torch.no_grad():
                    p.sub_(0.1 * p.grad)
                    q.sub_(0.1 * q.grad)
                p.grad = q.grad = None
    if build is Stack:
        assert counters["stats"]["unique_graphs"] == 1  # for all blocks


class HalfCompiled(nn.Module):
    """One unit; a function that is compiled calls its second layer."""

    def __init__(self, run):
        super().__init__()
        self.run, self.first, self.second = run, nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        return self.run(self.second, self.first(x)).square().mean()


def _call_and_squash(module, x):
    return torch.tanh(module(x))


@on_ranks(2)
def test_a_piece_takes_what_eager_code_has_gathered(mesh):
    plain = seeded(lambda: HalfCompiled(_call_and_squash))
    model = seeded(lambda: HalfCompiled(torch.compile(_call_and_squash, **OPTIONS)))
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 5)
    with Graphs() as graphs:
        check_parity(plain, model, model, lambda seed: {"x": x * (1 + seed % 7)}, mesh)
    assert [phase for phase, _ in graphs.seen] == ["forward", "backward"]
    assert not graphs.collectives("forward") + graphs.collectives("backward")


# -- the order of gathers --------------------------------------------------------------------------


@contextlib.contextmanager
def _logged(level):
    """What the logger of the project says, as a list of texts."""
    logger, handler, texts = logging.getLogger("shardc"), logging.Handler(), []
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@on_ranks(2)
def test_the_order_may_change_between_steps(mesh):
    plain, model = seeded(Choosing), sharded(seeded(Choosing), mesh)
    with _logged(logging.INFO) as texts:
        for order in ((0, 1), (1, 0), (1,), (0, 1, 0), (0, 1)):
            plain.order = model.order = order
            check_parity(plain, model, model, batch_of, mesh, steps=2)
    said = "the forward gathers layers.1 where the last one gathered layers.0"
    assert any(said in text for text in texts)
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.INFO)
    try:
        model.order = (1, 0)
        with pytest.warns(UserWarning, match="where the last one gathered"):
            _step(model, model, 0)
    finally:
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)


@on_ranks(2)
def test_the_profiler_and_the_logger_name_units(mesh):
    model = sharded(seeded(Stack), mesh)
    with torch.profiler.profile() as profile, _logged(logging.DEBUG) as texts:
        _step(model, model, 0)
    seen = {event.key for event in profile.key_averages()}
    for what in ("forward", "gather", "wait gather", "reduce", "wait reduce"):
        assert {f"shardc: {what} Stack", f"shardc: {what} layers.1"} <= seen, seen
    for what in ("gather", "reduce"):
        assert {f"{what} Stack", f"{what} layers.1"} <= set(texts), texts


@on_ranks(2)
def test_a_unit_alone_or_a_part_of_one(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    x = torch.randn(3, 18)
    for p, q in ((plain.layers[1], model.layers[1]), (plain.layers[0].up, model.layers[0].up)):
        want, got = p(x), q(x)
        assert torch.equal(want, got)
        want.square().mean().backward()
        got.square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(full(q.grad), p.grad)
    plain.zero_grad()
    model.zero_grad()
    check_parity(plain, model, model, batch_of, mesh)


@on_ranks(2)
def test_micro_batches_that_stay_gathered(mesh):
    plain, model = seeded(lambda: Stack(3)), sharded(seeded(lambda: Stack(3)), mesh)
    model.set_reshard_after_backward(False)
    for step in range(2):
        for micro_batch in range(3):
            with Events() as events:
                for run in (plain, model):
                    _step(run, run, micro_batch)
            assert len(events.of("start")) == (0 if micro_batch or step else 7), events.log
        check_gradients(plain, model, mesh)
        for p in plain.parameters():
            p.grad = mean_over_ranks(p.grad, mesh)
        for run in (plain, model):
            torch.optim.SGD(run.parameters(), lr=0.1).step()
            run.zero_grad()
    for unit in (*model.layers, model):
        unit.reshard()
    check_parity(plain, model, model, batch_of, mesh)


# -- gradients -------------------------------------------------------------------------------------


class Half(Block):
    """Leaves out its second half where told so."""

    half = False

    def forward(self, x):
        return self.up(self.norm(x)) if self.half else super().forward(x)


class Syncs(CompiledMode):
    """Counts single values that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_a_parameter_that_only_another_rank_used_gets_its_gradient(mesh):
    plain, model = seeded(Half), fully_shard(seeded(Half), mesh=mesh)
    rank, x = mesh.get_local_rank(), torch.randn(3, 18)
    model.half = True
    loss = model(x).square().mean()
    with Syncs() as syncs:
        loss.backward()
    assert syncs.count == 0  # the host does not wait for each parameter that is not used
    assert model.down.weight.grad is None  # no rank used it
    assert model.norm.weight.grad is not None
    plain.half = model.half = bool(rank)
    for p in plain.parameters():
        p.grad = torch.zeros_like(p)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run in (plain, model):
            run(x).square().mean().backward()
    said = any("['down.weight'] are used on some ranks" in str(w.message) for w in caught)
    assert said == bool(rank)
    check_gradients(plain, model, mesh)


@on_ranks(2)
def test_an_activation_written_before_its_backward_is_found(mesh):
    model = fully_shard(seeded(Block), mesh=mesh)
    x = torch.randn(3, 18, requires_grad=True) * 1
    y = model.up(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_ranks(2)
def test_parameters_written_before_the_backward_are_found(mesh):
    model = sharded(seeded(Stack), mesh)
    loss = model(tokens(0), tokens(1))
    with torch.no_grad():
        for param in model.layers[0].parameters():
            param.add_(1)
    with pytest.raises(RuntimeError, match=r"parameters of layers\.0 were written"):
        loss.backward()


def _save_matmuls():
    views = torch.ops.aten.view.default  # which the runtime takes too
    return create_selective_checkpoint_contexts(
        [torch.ops.aten.addmm.default, torch.ops.aten.mm.default, views]
    )


class Selective(Checkpointed):
    """Its checkpoints do not see the runtime."""

    contexts: ClassVar = {"context_fn": _save_matmuls}


@pytest.mark.parametrize("build", [Checkpointed, Selective])
@on_ranks(2)
def test_recomputation_gathers_once_more_and_ahead(mesh, build):
    plain, model = seeded(lambda: build(3)), sharded(seeded(lambda: build(3)), mesh)
    check_parity(plain, model, model, batch_of, mesh, steps=3)
    with Events() as events:
        _step(model, model, 0)
    assert events.of("start") == [build.__name__, *UNITS, *UNITS[::-1]]
    assert events.alive() == 0
    if build is Checkpointed:
        first_reduce = next(i for i, (event, _) in enumerate(events.log) if event == "reduce")
        assert events.log.index(("wait", "layers.2")) < first_reduce
        assert ("start", "layers.1") in events.log[first_reduce - 2 : first_reduce], events.log


@on_ranks(2)
def test_under_the_hooks_of_others(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    for wrap in (
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t),
    ):

        def call(*args, wrap=wrap, **kwargs):
            with wrap():
                return model(*args, **kwargs)

        with Events() as events:
            check_parity(plain, model, call, batch_of, mesh)
        assert events.of("start")[:5] == ["Stack", "layers.0", "layers.1", "layers.1", "layers.0"]


@on_ranks(2)
def test_inside_function_transforms(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    x = torch.randn(4, 3, 18)
    for run in (plain, model):
        torch.vmap(run.layers[0])(x).square().mean().backward()
    for p, q in zip(plain.layers[0].parameters(), model.layers[0].parameters(), strict=True):
        torch.testing.assert_close(full(q.grad), p.grad)
    jacobians = [torch.func.jacrev(run.layers[1])(x[0, 0]) for run in (plain, model)]
    torch.testing.assert_close(jacobians[1], jacobians[0])


# -- what goes wrong -------------------------------------------------------------------------------


class Failing(Stack):
    """Raises in the forward or backward of its second block, where told so."""

    where = None
    error: type[BaseException] = ValueError

    def forward(self, tokens, targets):
        x = self.layers[0](self.embed(tokens))
        if self.where == "forward":
            raise self.error("stop")
        if self.where == "backward":
            x.register_hook(self._fail)
        return self.head(self.layers[1](x)).flatten(0, 1).logsumexp(-1).mean() + 0 * targets.sum()

    def _fail(self, grad):
        raise self.error("stop")


WAYS_TO_STOP = [
    ("forward", ValueError),
    ("forward", KeyboardInterrupt),
    ("backward", KeyboardInterrupt),
    ("backward", ValueError),
    ("abandoned", None),
]


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("uncompiled", WAYS_TO_STOP),
        ("compiled blocks", WAYS_TO_STOP),
        *(("compiled", [way]) for way in WAYS_TO_STOP[::2]),
    ],
    ids=["uncompiled", "compiled blocks", *(f"compiled-{way}" for way, _ in WAYS_TO_STOP[::2])],
)
@on_ranks(2)
def test_the_step_after_an_interrupted_one_is_right(mesh, kind, ways):
    plain, model = seeded(Failing), sharded(seeded(Failing), mesh)
    call = model
    if kind == "compiled blocks":
        _compile_blocks(model)
    elif kind == "compiled":
        call = torch.compile(model, **OPTIONS)
    check_parity(plain, model, call, batch_of, mesh)
    root = model._shardc_unit.buckets[0]  # waits for a backward, as FSDP2's
    for where, error in ways:
        model.where, model.error = where, error or ValueError
        with Events() as events:
            if where == "abandoned":
                call(tokens(0), tokens(1))
            else:
                with pytest.raises(error):
                    call(tokens(0), tokens(1)).backward()
            waits = where == "backward" or (where == "abandoned" and kind != "compiled")
            kept = 4 * root.layout.numel if waits else 0
            assert events.alive(kept) == kept, (where, error)
            for bucket in _buckets(model):
                assert bucket.gathered.depth == 0
                assert bucket.gathered.is_kept == (waits and bucket is root)
        model.where = None
        model.zero_grad()
        check_parity(plain, model, call, batch_of, mesh, steps=1)


def _buckets(model):
    return [bucket for unit in model.modules() for bucket in getattr(unit, "_shardc_buckets", ())]


# -- evaluation ------------------------------------------------------------------------------------


@on_ranks(2)
def test_evaluation(mesh):
    plain, model = seeded(Stack), sharded(seeded(Stack), mesh)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), Events() as events:
            for seed in range(2):
                assert torch.equal(model.eval()(tokens(seed)), plain(tokens(seed)))
                assert events.alive() == 0
            assert events.of("start") == ["Stack", "layers.0", "layers.1"] * 2
            weight = model.head.weight
            with strictly(), pytest.raises(NotImplementedError, match=r"full_tensor\(\)"):
                weight @ weight.T
    check_parity(plain, model.train(), model, batch_of, mesh)


class _Pieces(nn.Module):
    """Two units with a break between them, and a parameter of the outermost one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return (self.second(x) * self.scale).square().mean()


@on_ranks(2)
def test_a_piece_that_one_rank_compiles_later_reads_as_that_of_the_others(mesh):
    """A forward without a backward leaves the outermost unit gathered, which is no reason."""
    model = seeded(_Pieces)
    for unit in (model.first, model.second, model):
        fully_shard(unit, mesh=mesh)
    call = torch.compile(model, backend="shardc", options={"executor": "eager"}, dynamic=False)
    call(torch.ones(2 + dist.get_rank(), 3)).backward()
    model(torch.ones(4, 3))
    assert model._shardc_unit.buckets[0].gathered.is_kept
    compiles = counters["stats"]["unique_graphs"]
    call(torch.ones(3, 3)).backward()  # rank 1 has graphs for three rows
    assert (counters["stats"]["unique_graphs"] > compiles) == (dist.get_rank() == 0)
    plain = seeded(_Pieces)
    for rows in ((2, 3), (3, 3)):
        (sum(plain(torch.ones(n, 3)) for n in rows) / 2).backward()
    want, got = ([p.grad for p in each.parameters()] for each in (plain, model))
    torch.testing.assert_close([full(grad) for grad in got], want)
