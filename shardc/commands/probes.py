"""Probes of `shardc doctor`, which may hang or crash: each has its own process and a deadline.

python -m shardc.commands.probes compile cpu
python -m shardc.commands.probes gather gloo RANK WORLD PORT
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
MAX_REASON = 300
"""Characters of an error that fit on a line."""


def try_compile(device: str, timeout: float) -> str:
    """Compile and run a small function with Inductor, without caches; return the error, or ""."""
    with tempfile.TemporaryDirectory(prefix="shardc_doctor_") as folder:
        fresh = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        return _run([["compile", device]], fresh, timeout)


def try_gather(backend: str, world_size: int, timeout: float) -> str:
    """All-gather among `world_size` new processes of this machine; return the error, or ""."""
    try:
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        return f"nothing can listen on {HOST}: {error}"
    facts = [str(world_size), str(store.port)]
    return _run([["gather", backend, str(r), *facts] for r in range(world_size)], {}, timeout)


def _run(probes: Sequence[Sequence[str]], env: Mapping[str, str], timeout: float) -> str:
    """Run the probes at once, each in a process of its own; return the first error, or ""."""
    deadline = time.monotonic() + timeout
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    own = {name: value for name, value in os.environ.items() if name not in launcher}
    running = []
    try:
        for probe in probes:
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with its process below
            command = [sys.executable, "-m", __spec__.name, *probe]
            process = subprocess.Popen(command, env={**own, **env}, stdout=log, stderr=log)
            running.append((process, log))
        while any(process.poll() is None for process, _ in running):
            if any(process.poll() for process, _ in running):
                break
            if time.monotonic() > deadline:
                return f"not done within {timeout:g} s"
            time.sleep(0.05)
        for process, log in running:
            if process.poll():
                log.seek(0)
                return _reason(process.returncode, log.read())
        return ""
    finally:
        for process, log in running:
            process.kill()
            process.wait()
            log.close()


def _reason(code: int, output: str) -> str:
    """The signal that ended a process, or the last line of its output that names an exception.

    Hints may follow that line. Without such a line: the last line of the output, or the exit code.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    if code < 0:
        return f"ended by signal {-code}"
    return (errors or lines or [f"exit code {code}"])[-1][:MAX_REASON]


# -- the functions of the processes --------------------------------------------------------------


def compile_on(device: str) -> None:
    """Compile a pointwise function, and compare its values with the values of eager mode."""
    x = torch.linspace(0, 1, 1000, device=device)
    torch.testing.assert_close(torch.compile(_wave)(x), _wave(x))


def _wave(x: torch.Tensor) -> torch.Tensor:
    return (3 * x).sin() + x.square()


def gather(backend: str, rank: str, world_size: str, port: str) -> None:
    """Gather the numbers of all ranks, as one of the ranks."""
    number, count = int(rank), int(world_size)
    device = torch.device("cuda", number) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, int(port), is_master=False)
    dist.init_process_group(
        backend, store=store, rank=number, world_size=count, timeout=timedelta(minutes=5)
    )
    whole = torch.empty(count, device=device)
    dist.all_gather_into_tensor(whole, torch.full((1,), float(number), device=device))
    torch.testing.assert_close(whole.cpu(), torch.arange(count, dtype=torch.float))
    dist.destroy_process_group()


_PROBES: dict[str, Callable[..., None]] = {"compile": compile_on, "gather": gather}

if __name__ == "__main__":
    _PROBES[sys.argv[1]](*sys.argv[2:])
