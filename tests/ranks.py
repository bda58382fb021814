"""Real gloo processes for tests, started once a world size and reused.

    @on_ranks(2, 3)
    def test_something(mesh, flag): ...     # runs on every rank; `flag` as pytest gives it

    @on_ranks(2, device="sim")
    def test_streams(mesh): ...             # on simulated accelerators (`accelerator`)

The decorated function is what pytest collects; its body runs in the worker processes, on a mesh of
all of them. A failure on any rank fails the test with that rank's traceback. A rank that does not
answer in time fails it too, and the processes are replaced.

Where a rank is ended by SIGSEGV or SIGABRT, or does not answer, the test runs once more in fresh
processes, with a warning. That is gloo's doing: after some ten thousand collectives, now and then,
its TCP transport releases the control block of an `UnboundBuffer`'s shared pointer twice, and the
heap is corrupted (seen in core dumps, torch 2.13; `tests/soak.py` meets it too); once a reduction
that one rank had finished never ended on the other. A test whose own code ends a process, or hangs,
fails both times.
"""

import faulthandler
import functools
import importlib
import inspect
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIMEOUT = float(os.environ.get("RANK_TIMEOUT", "240"))


class RankLost(AssertionError):
    """A rank's process was ended by a signal that says that memory is corrupt, or hangs."""


class Ranks:
    """`world` processes joined in one group, each waiting for functions to run."""

    def __init__(self, world: int, device: str = "cpu") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, port, device, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, module: str, name: str, kwargs: dict[str, Any], timeout: float) -> list[Any]:
        """Run a function on every rank; what each returned. Raises with the ranks' tracebacks."""
        for pipe in self.pipes:
            pipe.send((module, name, kwargs))
        deadline, results, failures, hanging = time.monotonic() + timeout, [], [], 0
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    failures.append(f"rank {rank} did not answer within {timeout:.0f} s")
                    hanging += 1
                    continue
                good, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                good, value = False, "the process died"
            results.append(value)
            if not good:
                failures.append(f"rank {rank}:\n{value}")
                deadline = min(deadline, time.monotonic() + 20)  # the others may hang on it
        if failures:
            crashed = any(self._crashed(process) for process in self.processes)
            lost = crashed or hanging == len(failures)  # else they wait for one that failed
            raise (RankLost if lost else AssertionError)("\n".join(failures))
        return results

    def _crashed(self, process: Any) -> bool:
        process.join(1.0 if not process.is_alive() else 0.0)
        return process.exitcode in (-signal.SIGSEGV, -signal.SIGABRT)

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


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
            warnings.warn(f"{module}.{name} runs again: {error}", stacklevel=2)
    raise AssertionError("unreachable")


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
        return pytest.mark.parametrize("world", worlds)(test)

    return decorate


def _serve(rank: int, world: int, port: int, device: str, pipe: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank), OMP_NUM_THREADS="1",
    )  # fmt: skip
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    faulthandler.enable()  # a process that is killed by a signal says where it was
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "sim":
        import accelerator

        accelerator.load()
        backend = "cpu:gloo,sim:simccl"
    dist.init_process_group(backend)
    mesh = init_device_mesh(device, (world,))
    while True:
        try:
            module, name, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            torch._dynamo.reset()
            torch.manual_seed(0)
            function = getattr(importlib.import_module(module), name)
            result = inspect.unwrap(function)(mesh, **kwargs)
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
