"""The two tiers of the tests: `make test`, and what it leaves out (`thorough.toml`)."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent

collected: list[str] = []
"""All tests that pytest has found in this run, before it leaves any out."""


def left_out() -> dict[str, str]:
    """What the quick tier leaves out: the beginning of each test's name, and the reason."""
    groups = tomllib.loads((HERE / "thorough.toml").read_text())["left_out"]
    return {test: group["reason"] for group in groups for test in group["tests"]}


def reason_for(test: str, left: dict[str, str]) -> str | None:
    """Why a test is left out, given as `tests/file.py::name[case]`; None where it is not."""
    name = test.removeprefix("tests/")
    return next((reason for start, reason in left.items() if name.startswith(start)), None)
