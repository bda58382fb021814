"""Rehearses three training steps in a process of its own, where the stand-ins are the GPU.

The process is a rank of a world over ProcessGroupNCCL. Alone it has no peers to agree with; several
meet at a store, agree on all that ranks agree on, and have their traces compared. Collectives move
nothing. All else is real but for the kernels. The last step is traced.
"""

import json
import multiprocessing
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LIMIT_S = 600


@dataclass(frozen=True)
class Setup:
    """What is rehearsed.

    Attributes:
        who: "shardc", or "plain" (not sharded) and "fsdp2", to compare with; "ahead": `precompile`.
        way: "compiled", "blocks" (each block by itself) or "uncompiled".
        features: names of what else happens; see the code.
        mode: that of `torch.compile`.
        options: of the backend.
        reshard: `reshard_after_forward`.
        param_dtype: the compute dtype; None: float32.
        reduce_dtype: what gradients are reduced in.
        wire: what parameters are gathered in and gradients sent in; None: in their dtypes.
        world, rank: the process is this rank of the world; odd ones have the second GPU.
        expandable: whether the allocator's segments grow in place.
        faults: what is left out, to see that it is missed: waits, or that ranks agree.
        cache: the folder of compiled graphs and kernels; None: one that all cases share.
        port: where the ranks of the world meet; 0: there are no others.
    """

    who: str = "shardc"
    way: str = "compiled"
    features: frozenset[str] = frozenset()
    mode: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reshard: bool | int | None = None
    param_dtype: str | None = "bfloat16"
    reduce_dtype: str | None = None
    wire: str | None = None
    blocks: int = 2
    dim: int = 256
    batch: int = 2
    length: int = 128
    world: int = 8
    rank: int = 0
    expandable: bool = False
    faults: frozenset[str] = frozenset()
    cache: Path | None = None
    port: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a rehearsal gave.

    Attributes:
        error: the traceback, if it failed.
        kernels: names of the Triton kernels that were compiled to a cubin.
        held, peak, reserved: bytes of the device before the last step, and the most during it.
        planned: the most bytes that the graphs were planned to hold.
        loaded: how many Dynamo graphs were found compiled.
        compiled: how many kernels Triton compiled.
        orders: for each graph that was compiled, its phase, and the messages and waits planned.
        log: what the process printed.
        trace: the file with the last step.
    """

    error: str
    kernels: list[str]
    held: int
    peak: int
    reserved: int
    planned: int
    loaded: int
    compiled: int
    orders: list[tuple[str, list[str]]]
    log: Path
    trace: Path


def rehearse(setup: Setup, folder: Path) -> Outcome:
    """Run `setup` in a process of its own, which keeps its files in `folder`."""
    return _end(_start(setup, folder), folder, time.monotonic() + LIMIT_S)


def rehearse_together(setups: Sequence[Setup], folder: Path) -> list[Outcome]:
    """Run ranks that meet, in the order of their ranks; each has a folder of its own."""
    port, folders = _free_port(), [folder / str(rank) for rank in range(len(setups))]
    started = []
    for rank, (setup, own) in enumerate(zip(setups, folders, strict=True)):
        own.mkdir()
        started.append(_start(replace(setup, rank=rank, world=len(setups), port=port), own))
    until = time.monotonic() + LIMIT_S
    return [_end(process, own, until) for process, own in zip(started, folders, strict=True)]


def _start(setup: Setup, folder: Path) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stage"])
    process = context.Process(target=_on_stage, args=(setup, folder))
    process.start()
    return process


def _end(process: BaseProcess, folder: Path, until: float) -> Outcome:
    process.join(max(0.0, until - time.monotonic()))
    log, found = folder / "log", folder / "outcome.json"
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"the rehearsal did not end in {LIMIT_S} s; see {log}")
    if not found.exists():
        end = log.read_text()[-3000:]
        raise RuntimeError(f"the rehearsal ended with {process.exitcode}:\n{end}")
    return Outcome(**json.loads(found.read_text()), log=log, trace=folder / "trace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _on_stage(setup: Setup, folder: Path) -> None:
    import stage  # imports torch: only in the processes that rehearse

    stage.run(setup, folder)
