"""The project's own tests with the torch of this machine, a case for each file that it fits."""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "tests"
FILES = ("layout", "passes", "timeline", "schedule", "eager", "backend", "accumulate", "strategies")


def run(name: str, tiny: bool) -> dict[str, Any]:
    """How many tests passed and failed."""
    more = ["--collect-only"] if tiny else []
    path = TESTS / f"test_{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", str(path), *more]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=TESTS, check=False)
    print(ended.stdout)
    last = ended.stdout.strip().splitlines()[-1]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    return counts if ended.returncode == 0 else {**counts, "error": last}


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {name: partial(run, name) for name in FILES}
