"""Small bugs, applied one at a time to a copy of the project: the tests named for each must fail.

    python tests/mutants/run.py -k gathers      # `make mutants` runs all of them

The bugs are data: every `.toml` file here holds tables of

    [[mutant]]
    what = "the bucket is gathered again although it is held"
    file = "runtime/unit/full_parameters.py"
    text = "if self.held is None:"      # occurs once in the file
    by = "if True:"
    tests = ["test_controls.py::test_unshard_gathers_once"]

General mutation tools (mutmut, cosmic-ray) draw their bugs from patterns, thousands of them, and
run all tests for each; neither takes bugs and their tests from a list, which is what makes a run of
a few minutes and keeps a bug that once slipped through from coming back.
"""

import argparse
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGES = {"shardc": ".", "passes": "shardc", "runtime": "shardc"}
"""The source folders, and the folder from which Python imports each."""
SECONDS = 600
"""A run of the tests of one mutant that takes longer is ended."""


_warm = multiprocessing.get_context("forkserver")
_warm.set_forkserver_preload(["pytest", "torch", "torch._inductor.compile_fx", "torch.testing"])
"""A run of pytest starts from a process that has imported torch, which takes longer than a test."""


@dataclass(frozen=True)
class Mutant:
    """One bug: `text`, which occurs once in `file`, becomes `by`; one of `tests` must fail."""

    what: str
    file: str
    text: str
    by: str
    tests: tuple[str, ...]


def read_mutants(folder: Path = HERE) -> list[Mutant]:
    """All mutants in the `.toml` files of `folder`."""
    tables = (
        table
        for path in sorted(folder.glob("*.toml"))
        for table in tomllib.loads(path.read_text())["mutant"]
    )
    return [Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def mutated(mutant: Mutant, root: Path) -> str:
    """The text of the mutant's file with the bug in it.

    Raises:
        ValueError: the text to replace does not occur exactly once.
    """
    source = (root / mutant.file).read_text()
    found = source.count(mutant.text)
    if found != 1 or mutant.text == mutant.by:
        raise ValueError(
            f"'{mutant.what}': {mutant.text!r} must occur once in {mutant.file} and be changed, "
            f"it occurs {found} times"
        )
    return source.replace(mutant.text, mutant.by)


class Copy:
    """A copy of the project in a folder of its own, from which its tests run."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True)
        for name in names.stdout.splitlines():
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, folder / name)
        for package, parent in PACKAGES.items():
            link = folder / parent / package
            if parent != "." and (folder / package).is_dir():
                link.symlink_to(folder / package)

    def test(self, arguments: list[str], seconds: float = SECONDS) -> tuple[int | None, str]:
        """pytest's exit code (None: it took too long) and output for tests and options of it."""
        output = self.folder / "output.txt"
        process = _warm.Process(target=_run_pytest, args=(self.folder, arguments, output))
        process.start()
        process.join(seconds)
        code = process.exitcode
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.join()
        return code, output.read_text(errors="replace")

    def try_mutant(self, mutant: Mutant) -> str:
        """What became of `mutant`: "killed", or what is wrong."""
        path = self.folder / mutant.file
        path.write_text(mutated(mutant, self.root))
        try:
            code, output = self.test(["-x", *mutant.tests])
        finally:
            shutil.copy(self.root / mutant.file, path)
        if code in (0, 1):
            return "killed" if code else "SURVIVED"
        last = (output.strip().splitlines() or ["no output"])[-1]
        return f"no answer in {SECONDS} s" if code is None else f"pytest could not run: {last}"


def _run_pytest(folder: Path, arguments: list[str], output: Path) -> None:
    """In a process of its own: test the copy in `folder`, and end with pytest's exit code."""
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    for name in [each for each in sys.modules if each.split(".")[0] == "shardc"]:
        del sys.modules[name]  # torch imported a part of the shardc that is installed
    sys.path.insert(0, str(folder))
    os.environ |= {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RANK_START": "fork",
        "RANK_TIMEOUT": "200",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",  # its keys do not cover the code of passes
    }
    sys.dont_write_bytecode = True
    import pytest

    tests = folder / "tests"
    arguments = [given if given.startswith("-") else str(tests / given) for given in arguments]
    code = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(code)


def run(mutants: list[Mutant], root: Path, jobs: int) -> dict[Mutant, str]:
    """Try all of `mutants`, `jobs` at a time, with progress.

    Raises:
        RuntimeError: the tests fail, or test other code than the copy, without any mutant.
    """
    for mutant in mutants:
        mutated(mutant, root)
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for job in range(jobs):
            copies.put(Copy(root, Path(folder) / str(job)))
        _check_without_mutants(mutants, copies)

        def one(mutant: Mutant) -> str:
            copy = copies.get()
            try:
                return copy.try_mutant(mutant)
            finally:
                copies.put(copy)

        verdicts: dict[Mutant, str] = {}
        with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(mutants), unit="mutant") as bar:
            futures = {pool.submit(one, mutant): mutant for mutant in mutants}
            for future in as_completed(futures):
                verdicts[futures[future]] = future.result()
                if future.result() != "killed":
                    bar.write(f"{future.result()}: {futures[future].what}")
                bar.update()
        return verdicts


def _check_without_mutants(mutants: list[Mutant], copies: "queue.Queue[Copy]") -> None:
    """A test that fails anyway notices nothing: all of them must pass first.

    Each file of tests gets a process of its own, as each mutant does: ranks are forked, and a
    device that a test adds must come before the first backward of the process.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    by_file = [list(own) for _, own in groupby(tests, key=lambda test: test.split("::")[0])]
    failures: list[str] = []

    def check(own: list[str]) -> None:
        copy = copies.get()
        try:
            code, output = copy.test(own, seconds=SECONDS + 30 * len(own))
            if code != 0:
                failures.append(output[-4000:])
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(copies.qsize()) as pool:
        done = pool.map(check, by_file)
        list(tqdm(done, f"{len(tests)} tests without any mutant", len(by_file), unit="file"))
    if failures:
        raise RuntimeError("tests fail without any mutant:\n" + "\n".join(failures))


def main() -> int:
    parser = argparse.ArgumentParser(description="Apply small bugs one at a time; tests must fail.")
    parser.add_argument("-k", default="", help="only mutants whose file or description has this")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    arguments = parser.parse_args()
    mutants = [m for m in read_mutants() if arguments.k in m.file or arguments.k in m.what]
    if not mutants:
        parser.error(f"no mutant has {arguments.k!r} in its file or description")
    if arguments.list:
        print(tabulate([(m.file, m.what) for m in mutants], headers=("file", "bug")))
        return 0
    verdicts = run(mutants, ROOT, max(1, min(arguments.j, len(mutants))))
    alive = [(m.file, m.what, verdict) for m, verdict in verdicts.items() if verdict != "killed"]
    if alive:
        print(tabulate(alive, headers=("file", "bug", "verdict")))
    print(f"{len(verdicts) - len(alive)} of {len(verdicts)} mutants killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
