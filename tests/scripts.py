"""Scripts of `benchmarks/` and `examples/` as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

ROOT = Path(__file__).parent.parent


def load(path: str) -> ModuleType:
    """The script at a path from the root of the project; it finds those beside it."""
    script = ROOT / path
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for dataclasses
    with mock.patch.object(sys, "path", [str(script.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module
