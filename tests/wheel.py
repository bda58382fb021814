"""`make dist` tries the wheel: a fresh environment, another folder, the README's quickstart.

python tests/wheel.py dist
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main(dist: Path) -> None:
    """Install the only wheel in `dist` behind torch, and train with it.

    Raises:
        subprocess.CalledProcessError: a step failed; it has printed why.
    """
    (wheel,) = dist.resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(f"{folder}/venv", with_pip=True)
        python = f"{folder}/venv/bin/python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        _timed("torch is installed", *pip, f"torch=={version('torch').partition('+')[0]}")
        begun = time.monotonic()
        _timed("the wheel is installed", *pip, str(wheel))
        _run(folder, f"{folder}/venv/bin/shardc", "--version")
        text = (ROOT / "README.md").read_text()
        (block,) = re.findall(r'```python title="train.py"\n(.*?)```', text, re.DOTALL)
        Path(folder, "train.py").write_text(block)
        torchrun = [python, "-m", "torch.distributed.run", "--standalone"]
        _run(folder, *torchrun, "--nproc-per-node", "2", "train.py")
    print(f"from the wheel to the end of three steps: {time.monotonic() - begun:.0f} s")


def _timed(what: str, *command: str) -> None:
    begun = time.monotonic()
    subprocess.run(command, check=True)
    print(f"{what}: {time.monotonic() - begun:.0f} s", flush=True)


def _run(folder: str, *command: str) -> None:
    print("$", " ".join(Path(part).name for part in command), flush=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run(command, cwd=folder, env=env, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
