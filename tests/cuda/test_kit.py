"""The kit for a machine with a GPU runs through: small models, and no values to compare.

A case or a few of each part; `--whole-kit` has all of them run, half an hour.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KIT = Path(__file__).parents[2] / "benchmarks/gpu"
FEW = {
    "smoke": "compiled bfloat16",
    "numerics": "hsdp, accumulate, uncompiled",
    "hazards": "late copies, uncompiled",
    "around": "checkpoints, uncompiled",
    "whole": "compiled",
    "speed": "2 x 2048",
    "memory": "8 x 4096, short, shardc, expandable True",
    "profiles": "",
    "suite": "layout",
}


@pytest.mark.parametrize("part", FEW)
def test_part(part: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    only = "" if request.config.getoption("--whole-kit") else FEW[part]
    command = [sys.executable, str(KIT), part, "--tiny", "--only", only, "--limit", "1200"]
    command += ["--folder", str(tmp_path)]
    # Where the kit runs, the project is not installed.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=variables)
    print(ended.stdout)
    results = json.loads((tmp_path / f"{part}.json").read_text())
    assert results and not ended.returncode, results
    assert all(case in ended.stdout for case in results)
    # All is there: the table is printed, and nothing runs.
    again = subprocess.run([*command, "--limit", "5"], check=False, env=variables)
    assert again.returncode == 0
