"""Shared set-up: one Inductor cache for all processes, rank processes ended with the session."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
_cache = Path(tempfile.gettempdir()) / f"shardc_test_inductor_{os.getuid()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_cache))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionfinish() -> None:
    import ranks

    ranks.stop_all()
