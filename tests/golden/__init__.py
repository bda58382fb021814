"""Golden dumps: graphs and plans of small models, kept as texts that later compiles must repeat."""

from pathlib import Path

KEPT = Path(__file__).parent / "kept"
