"""These tests run where the stand-ins are the GPU: `make test-cuda`."""

import os

import pytest

collect_ignore_glob = [] if "libstandin" in os.environ.get("LD_PRELOAD", "") else ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole-kit", action="store_true", help="all cases of benchmarks/gpu")
