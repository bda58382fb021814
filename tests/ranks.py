"""Real gloo processes for tests, started once a world size and reused.

    @on_ranks(2, 3)
    def test_something(mesh, flag): ...     # runs on every rank; `flag` as pytest gives it

    @on_ranks(2, device="sim")
    def test_streams(mesh): ...             # on simulated accelerators (`accelerator`)

The decorated function is what pytest collects; its body runs in the worker processes, on a mesh of
all of them. A failure on any rank fails the test with that rank's traceback. A rank that does not
answer in time fails it too, with the stacks of its threads. The processes are then replaced.
Between tests they are stopped (SIGSTOP): threads of idle gloo groups would take half of a core.

Where a rank is ended by SIGSEGV or SIGABRT the test runs once more in fresh processes, with a
warning, and is counted in the last lines of the run: memory of the process was corrupt, for which
an earlier test may be to blame. A test whose own code ends a process fails both times.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing as mp
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

# Seconds. Only a rank that hangs may meet it, however busy the machine is.
TIMEOUT = float(os.environ.get("RANK_TIMEOUT", "600"))
# Seconds for the other ranks to answer once one has failed: they may hang on it.
_GRACE = 20.0

# Processes are forked from one that has imported what takes long, and has started no thread.
# (There is one such process for all that is tested, also for copies of shardc: it has none.)
# `RANK_START=fork` forks them from this one, before any test runs and starts some (autograd's).
FORKS = mp.get_context(os.environ.get("RANK_START", "forkserver"))
_IMPORTED = ("torch._inductor.compile_fx", "torch.testing")
_IMPORTED_IF_TESTED = ("transformers.trainer", "lightning.pytorch", "accelerate", "peft")
FORKS.set_forkserver_preload([*_IMPORTED])

reruns: list[str] = []  # a line for each test that ran again after a signal


class RankLost(AssertionError):
    """A rank's process was ended by a signal that says that memory is corrupt."""


def compile_sooner() -> None:
    """Spare each compile what no test looks at: a tenth of its time.

    The garbage collector runs less often and not after each compile. Dynamo flushes the CPU's cache
    to time the guards, for a line of its log.
    """
    gc.set_threshold(20_000, 20, 20)
    import torch._dynamo.config
    import torch._dynamo.guards

    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def free_port() -> int:
    """A port of this host on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """`world` processes joined in one group, each waiting for functions to run."""

    def __init__(self, world: int, device: str = "cpu") -> None:
        port = free_port()
        self.stacks = Path(tempfile.mkdtemp(prefix="shardc_ranks_"))
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = FORKS.Pipe()
            arguments = (rank, world, port, device, theirs, str(self.stacks))
            process = FORKS.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, module: str, name: str, kwargs: dict[str, Any], timeout: float) -> list[Any]:
        """Run a function on every rank; what each returned. Raises with the ranks' tracebacks."""
        self._signal(signal.SIGCONT)
        answers = self._run(module, name, kwargs, timeout)
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _run(self, module: str, name: str, kwargs: dict[str, Any], timeout: float) -> list[Any]:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found out below
                pipe.send((module, name, kwargs))
        answers: dict[int, tuple[bool, Any]] = {}
        lost, deadline, within = False, time.monotonic() + timeout, f"{timeout:.0f} s"
        while waiting := [p for rank, p in enumerate(self.pipes) if rank not in answers]:
            for pipe in wait(waiting, max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    code = self._exit_code(rank)
                    answers[rank] = False, f"ended with {code}\n{self._stacks_of(rank)}"
                    lost |= code in (-signal.SIGSEGV, -signal.SIGABRT)
                if not answers[rank][0] and (soon := time.monotonic() + _GRACE) < deadline:
                    deadline, within = soon, f"{_GRACE:.0f} s of the failure of rank {rank}"
            if time.monotonic() > deadline:
                break
        for rank in set(range(len(self.pipes))) - answers.keys():
            answers[rank] = False, f"no answer within {within}\n{self._hang(rank)}"
        failures = [f"rank {rank}: {text}" for rank, (good, text) in answers.items() if not good]
        if failures:
            raise (RankLost if lost else AssertionError)("\n".join(failures))
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def _exit_code(self, rank: int) -> int | None:
        self.processes[rank].join(10.0)
        return self.processes[rank].exitcode

    def _hang(self, rank: int) -> str:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # it writes its stacks
        end = time.monotonic() + 30.0
        while not self._stacks_of(rank) and time.monotonic() < end:
            time.sleep(0.1)
        return self._stacks_of(rank)

    def _stacks_of(self, rank: int) -> str:
        path = self.stacks / str(rank)
        return path.read_text()[-6000:] if path.exists() else ""

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.stacks, ignore_errors=True)


_pools: dict[tuple[int, str], Ranks] = {}


def run_on_ranks(
    world: int,
    module: str,
    name: str,
    kwargs: dict[str, Any],
    timeout: float = TIMEOUT,
    device: str = "cpu",
) -> list[Any]:
    """Run `module.name(mesh, **kwargs)` on `world` ranks, replacing them after a failure."""
    key = (world, device)
    for last in (False, True):
        if key not in _pools:
            _pools[key] = Ranks(world, device)
        try:
            return _pools[key].run(module, name, kwargs, timeout)
        except AssertionError as error:
            _pools.pop(key).stop()
            if last or not isinstance(error, RankLost):
                raise
            reruns.append(f"{module}.{name} on {world} ranks")
            warnings.warn(f"{module}.{name} runs again: {error}", stacklevel=2)
    raise AssertionError("unreachable")


def start_for(tests: Iterable[Any]) -> None:
    """Know the collected tests: libraries that they import are imported once, for all processes.

    Processes that are forked from this one are started at once.
    """
    FORKS.set_forkserver_preload(
        [*_IMPORTED, *(name for name in _IMPORTED_IF_TESTED if name in sys.modules)]
    )
    if FORKS.get_start_method() != "fork":
        return
    for test in tests:
        if device := getattr(test.function, "device", None):
            key = (test.callspec.params["world"], device)
            if key not in _pools:
                _pools[key] = Ranks(*key)


def stop_all() -> None:
    """End all rank processes."""
    while _pools:
        _pools.popitem()[1].stop()


def on_ranks(
    *worlds: int, timeout: float = TIMEOUT, device: str = "cpu"
) -> Callable[[Callable[..., None]], Any]:
    """Decorate a test `fn(mesh, ...)` to run on every rank, for each of the world sizes."""

    def decorate(fn: Callable[..., None]) -> Any:
        @functools.wraps(fn)
        def test(world: int, **kwargs: Any) -> None:
            run_on_ranks(world, fn.__module__, fn.__name__, kwargs, timeout, device)

        own = [p for n, p in inspect.signature(fn).parameters.items() if n != "mesh"]
        world = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([*own, world])  # type: ignore[attr-defined]
        test.device = device  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test)

    return decorate


@functools.cache
def mesh_of(
    device: str, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None = None
) -> Any:
    """A mesh of all ranks, the same for the same arguments.

    Its groups would stay if a test made one of its own: torch keeps meshes in caches. Every gloo
    group has a thread that wakes 130 times a second, and hundreds of them slow all tests down.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, shape, mesh_dim_names=mesh_dim_names)


def _serve(rank: int, world: int, port: int, device: str, pipe: Any, stacks: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank), OMP_NUM_THREADS="1",
    )  # fmt: skip
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed as dist

    # A stopped process would not notice that the one that started it is gone.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    stacks_file = Path(stacks, str(rank)).open("w")  # noqa: SIM115, it stays open
    faulthandler.enable(stacks_file)  # a process that is killed by a signal says where it was
    faulthandler.register(signal.SIGUSR1, stacks_file)  # and one that hangs, where it is
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "sim":
        import accelerator

        accelerator.load()
        backend = "cpu:gloo,sim:simccl"
    dist.init_process_group(backend)
    mesh = mesh_of(device, (world,))
    while True:
        try:
            module, name, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch._dynamo.reset()
            forget_agreements()
            torch.manual_seed(0)
            compile_sooner()
            if device == "sim":
                accelerator.configure()
            function = getattr(importlib.import_module(module), name)
            result = inspect.unwrap(function)(mesh, **kwargs)
            _drop_what_waits()
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def forget_agreements() -> None:
    """Have no test depend on what ranks agreed on in those before it."""
    if "shardc" in sys.modules:
        from shardc.runtime.groups import communicators
        from shardc.runtime.watch import agreement

        for kept in communicators._kept.values():
            if agreement._History in kept:
                kept[agreement._History].notes.clear()


def _drop_what_waits() -> None:
    """Free models that a test left with gradients that wait.

    Before a compiled optimizer steps, Dynamo traces a look at all that waits. The garbage collector
    must not change it meanwhile.
    """
    from shardc.runtime.unit.accumulate import accumulating

    if any(not each.is_empty for each in accumulating()):
        gc.collect()
