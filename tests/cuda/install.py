"""Sets up what the rehearsal needs: a CUDA build of torch, and stand-ins for the libraries of CUDA.

Nothing of CUDA has to be installed: the headers come from NVIDIA's wheels, ptxas from Triton's. All
of it lies in `~/.cache/shardc-cuda` (or `$SHARDC_CUDA_ROOT`), about 5 GB for each version of torch.
"""

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TORCH = os.environ.get("SHARDC_CUDA_TORCH", "2.13.0")
HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]


@dataclass(frozen=True)
class Installed:
    """Where things are.

    Attributes:
        root: the folder of this version of torch.
    """

    root: Path

    @property
    def python(self) -> Path:
        """The interpreter that has the CUDA build of torch."""
        return self.root / "venv/bin/python"

    @property
    def libraries(self) -> Path:
        """The folder of the stand-ins."""
        return self.root / "standins"

    @property
    def site_packages(self) -> Path:
        """The packages of the interpreter."""
        return next((self.root / "venv/lib").glob("python3.*/site-packages"))

    def environment(self, source: Path) -> dict[str, str]:
        """The variables under which `python` takes the stand-ins for a GPU, with the project."""
        return {
            **os.environ,
            "LD_PRELOAD": str(self.libraries / "libstandin.so"),
            "LD_LIBRARY_PATH": str(self.libraries),
            "TRITON_LIBCUDA_PATH": str(self.libraries),
            "TRITON_CACHE_DIR": str(self.root / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(source), str(HERE)]),
        }


def install() -> Installed:
    """Make what is missing, and say where it is."""
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardc-cuda"
    there = Installed(Path(os.environ.get("SHARDC_CUDA_ROOT", base)) / TORCH)
    there.libraries.mkdir(parents=True, exist_ok=True)
    _install_torch(there)
    _build_stand_ins(there)
    return there


def _install_torch(there: Installed) -> None:
    # === takes the build that is named exactly so, the one with CUDA; == may take a local +cpu.
    packages = [f"torch==={TORCH}", "nvidia-cuda-cccl", "numpy", "tabulate", "tqdm"]
    packages += ["hypothesis", "pytest", "pytest-timeout"]  # of the tests
    done = there.root / "installed"
    if done.exists() and done.read_text().split() == packages:
        return
    print(f"setting up torch {TORCH} with CUDA in {there.root} (5 GB, minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", there.root / "venv"], check=True)
    pip = [there.python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "-q"]
    subprocess.run([*pip, *packages], check=True)
    done.write_text("\n".join(packages))


def _build_stand_ins(there: Installed) -> None:
    names = ("runtime", "driver", "management")
    sources = [HERE / f"standins/{name}.cpp" for name in names]
    driver = there.libraries / "libcuda.so.1"
    if driver.exists() and all(
        source.stat().st_mtime < driver.stat().st_mtime for source in (*sources, Path(__file__))
    ):
        return
    runtime = there.libraries / "libstandin.so"
    _compile(there, sources[0], runtime)
    # What torch wants of these libraries and runtime.cpp lacks: calls that succeed.
    wanted = {n for path in there.site_packages.glob("torch/lib/*.so") for n in _undefined(path)}
    _compile(there, sources[0], runtime, *_succeeding(there, wanted - _defined(runtime)))
    _compile(there, sources[2], there.libraries / "libnvidia-ml.so.1")
    maps = ["cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"]
    _compile(there, sources[1], driver, *_succeeding(there, maps), "-Wl,-soname,libcuda.so.1")
    (there.libraries / "libcuda.so").unlink(missing_ok=True)
    (there.libraries / "libcuda.so").symlink_to(driver.name)


def _compile(there: Installed, source: Path, library: Path, *more: str) -> None:
    packages = there.site_packages
    folders = ["nvidia/*/include", "nvidia/*/include/cccl", "triton/backends/nvidia/include"]
    include = [f"-I{path}" for folder in folders for path in sorted(packages.glob(folder))]
    # Compiled beside and renamed, so that a run under way keeps the library it has.
    made = library.with_name(f"{library.name}.{os.getpid()}")
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-O1", "-w", "-fvisibility=hidden"]
    subprocess.run([*command, *include, source, "-o", made, *more, "-ldl"], check=True)
    made.rename(library)


def _succeeding(there: Installed, names: set[str] | list[str]) -> list[str]:
    """What to compile along for functions of those names that do nothing and return 0."""
    source = there.libraries / f"rest{len(names)}.c"
    source.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names)))
    objects = source.with_suffix(".o")
    subprocess.run(["gcc", "-c", "-fPIC", "-w", source, "-o", objects], check=True)
    return [str(objects)]


def _symbols(library: Path, which: str) -> list[str]:
    listing = subprocess.run(["nm", "-D", which, library], check=True, stdout=subprocess.PIPE)
    return [line.split()[-1] for line in listing.stdout.decode().splitlines() if line.strip()]


def _undefined(library: Path) -> list[str]:
    """The functions of cudart, cuBLAS and NCCL that a library of torch wants."""
    wanted = _symbols(library, "--undefined-only")
    ours = [name for name in wanted if re.search(r"@libcudart|@libcublas|^nccl", name)]
    return [name.partition("@")[0] for name in ours]


def _defined(library: Path) -> set[str]:
    return {name.partition("@")[0] for name in _symbols(library, "--defined-only")}


def lay_out(folder: Path) -> Path:
    """The project as Python imports it, by links: `shardc` with the passes and the runtime in it.

    Its entry points come along, so that `backend="shardc"` is found.
    """
    package = folder / "shardc"
    package.mkdir(parents=True, exist_ok=True)
    parts = [*(PROJECT / "shardc").iterdir(), PROJECT / "passes", PROJECT / "runtime"]
    for part in parts:
        link = package / part.name
        if part.name != "__pycache__" and not link.is_symlink():
            with suppress(FileExistsError):  # another process made it
                link.symlink_to(part)
    info = folder / "shardc-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shardc\nVersion: 0\n")
    written = (PROJECT / "pyproject.toml").read_text()
    backend = re.search(r"torch_dynamo_backends\]\nshardc = \"(.*)\"", written)
    assert backend, "pyproject.toml names no backend for torch.compile"
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nshardc = {backend[1]}\n")
    return folder
