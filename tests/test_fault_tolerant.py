"""`examples/fault_tolerant.py`: a copy is killed and comes back, and nothing else changes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import free_port
from torch.optim import AdamW

torchft = pytest.importorskip("torchft", reason="torchft has no wheel for this Python")
from torchft.coordination import LighthouseServer  # noqa: E402

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import fault_tolerant  # noqa: E402

RANKS, STEPS = 2, 100
STEP = re.compile(r"copy (\d) step (\d+) (done|again) of (\d)")


class Copy:
    """The processes of one copy of the model."""

    def __init__(self, number: int, lighthouse: str, folder: Path, *options: str) -> None:
        port = str(free_port())
        self.saved, self.log = folder / f"{number}.pt", folder / f"{number}.log"
        command = [sys.executable, str(EXAMPLES / "fault_tolerant.py"), *options]
        shared = {"COPY": str(number), "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
        with self.log.open("a") as log:
            self.processes = [
                subprocess.Popen(
                    [*command, "--save", str(self.saved)],
                    env=os.environ | shared | {"RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
                for rank in range(RANKS)
            ]

    def steps(self) -> list[tuple[int, int]]:
        """The steps that it has taken: (number, copies that took part)."""
        found = STEP.findall(self.log.read_text())
        return [(int(step), int(there)) for _, step, done, there in found if done == "done"]

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def wait(self) -> None:
        codes = [process.wait(timeout=300) for process in self.processes]
        assert codes == [0] * RANKS, self.log.read_text()[-5000:]


def unsharded(steps):
    """One process that takes the same steps: (number, copies that took part)."""
    model = fault_tolerant.build()
    opt = AdamW(model.parameters(), lr=1e-2)
    for step, there in steps:
        opt.zero_grad()
        for part in range(there * RANKS):
            loss = fault_tolerant.loss_of(model(fault_tolerant.batch(step, part)))
            (loss / (there * RANKS)).backward()
        opt.step()
    return model.state_dict()


def test_a_copy_is_killed_and_comes_back(tmp_path):
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=2000
    )
    options = ("--steps", str(STEPS), "--pause", "0.3", "--backend", "eager")
    copies = []
    try:
        copies += [Copy(n, lighthouse.address(), tmp_path, *options) for n in range(2)]
        end = time.monotonic() + 200
        while (5, 2) not in copies[1].steps():
            assert time.monotonic() < end, copies[1].log.read_text()[-5000:]
            time.sleep(0.1)
        copies[1].kill()
        copies.append(Copy(1, lighthouse.address(), tmp_path, *options))
        for copy in (copies[0], copies[2]):
            copy.wait()
    finally:
        for copy in copies:
            copy.kill()
        lighthouse.shutdown()
    taken = {number: there for copy in copies for number, there in copy.steps()}
    steps = sorted(taken.items())
    assert [number for number, _ in steps] == list(range(STEPS))
    alone = [number for number, there in steps[6:] if there == 1]
    assert alone and taken[STEPS - 1] == 2, f"alone in {alone}: it has not come back"
    first, second = (torch.load(copy.saved) for copy in (copies[0], copies[2]))
    for name, value in unsharded(steps).items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, msg=lambda m, n=name: f"{n}: {m}")
