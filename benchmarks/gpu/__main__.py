"""Everything that only a GPU can say, in parts that each fit ten minutes: `make gpu`.

    python benchmarks/gpu smoke numerics        # these parts; all of them without names

It needs one GPU, torch and this checkout; nothing is installed. A part is a list of cases. Each
case is a process of its own, so a crash costs one case. What a case gave is kept in
`build/gpu/PART.json`: called again, the kit goes on where it was cut off, then tries again what
failed. What this Python lacks is said first, and the parts that need it are left out.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(PROJECT / "benchmarks")]
PARTS = (
    "smoke", "numerics", "hazards", "around", "whole", "speed", "memory", "profiles", "suite",
)  # fmt: skip
NEEDS = {"": ("torch", "numpy", "tabulate", "tqdm"), "suite": ("pytest", "hypothesis")}
"""Modules that every part imports (shardc itself does), and that one part imports beside them."""
CASE_SECONDS = {"speed": 420, "whole": 420, "memory": 240, "suite": 420}
"""How long a case of a part may take; of the others: 180."""
TIMED = ("speed", "whole", "profiles")
"""Parts whose cases run alone."""
LEAST_SECONDS = 20
"""No case is started that has less."""


def main() -> None:
    """Run the cases that have no result yet, and print a table for each part."""
    args = _arguments()
    if args.case:
        print("RESULT", json.dumps(_part(args.case[0])[args.case[1]](args.tiny)))
        return
    if problem := _problem():
        raise SystemExit(problem)
    sys.path.append(_source())  # a part names its cases
    from tabulate import tabulate  # not before it is known to be there

    until = time.monotonic() + args.limit
    failed = False
    for name in args.parts or PARTS:
        if lacking := _lacking(name):
            print(f"\n{name}: left out, this Python lacks {', '.join(lacking)}", flush=True)
            failed = True
            continue
        results, left = _run(name, args, until)
        rows = [{"case": case, **result} for case, result in results.items()]
        print(f"\n{name}\n{tabulate(rows, headers='keys', floatfmt='.4g')}", flush=True)
        failed |= any("error" in result for result in results.values())
        if left:
            print(f"{left} cases are left: call it again")
    raise SystemExit(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--only", default="", help="cases with this text in their names")
    parser.add_argument("--limit", type=float, default=560, help="seconds in all (default 560)")
    jobs = max(1, (os.cpu_count() or 1) // 4)
    text = f"cases at once where nothing is timed (default {jobs})"
    parser.add_argument("--jobs", type=int, default=jobs, help=text)
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the kit itself")
    parser.add_argument("--folder", type=Path, default=PROJECT / "build/gpu", help="of the results")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    return args


def _lacking(part: str) -> list[str]:
    return [name for name in NEEDS.get(part, ()) if importlib.util.find_spec(name) is None]


def _problem() -> str:
    """Why nothing can run here, or an empty text."""
    if lacking := _lacking(""):
        return f"{sys.executable} lacks {', '.join(lacking)}, which shardc imports: install them"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} finds no CUDA device"
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    return ""


def _part(name: str) -> Mapping[str, Any]:
    """The cases of a part: functions by name, called with whether models are tiny."""
    cases: Mapping[str, Any] = importlib.import_module(f"part_{name}").CASES
    return cases


def _run(
    name: str, args: argparse.Namespace, until: float
) -> tuple[dict[str, dict[str, Any]], int]:
    """All results of a part so far, and how many cases are left."""
    from tqdm import tqdm

    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{name}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    named = _part(name)
    cases = [case for case in named if args.only in ({case} if args.only in named else case)]
    if args.again:
        results = {case: result for case, result in results.items() if case not in cases}
    missing = [case for case in cases if case not in results]
    wanted = missing + [case for case in cases if "error" in results.get(case, {})]
    with tqdm(total=len(wanted), desc=name, unit="case", leave=False) as progress:
        for case, result in _ended(name, wanted, args, until):
            progress.set_postfix_str(case)
            progress.update()
            results[case] = result
            path.write_text(json.dumps(results, indent=1))
    return results, sum(case not in results for case in cases)


def _ended(
    part: str, cases: list[str], args: argparse.Namespace, until: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cases and their results, as they end; not those that the time was too short for."""
    longest = CASE_SECONDS.get(part, 180)
    over = Event()

    def run(case: str) -> dict[str, Any] | None:
        seconds = until - time.monotonic()
        if seconds < LEAST_SECONDS or over.is_set():
            return None
        result = _run_case(part, case, args.tiny, min(longest, seconds), args.folder)
        if result is None and seconds < longest:
            over.set()  # it had less time than it may take: it comes first in the next call
        elif result is None:
            return {"error": f"no end in {longest} s: {_log(part, case, args.folder)}"}
        return result

    with ThreadPoolExecutor(1 if part in TIMED else args.jobs) as pool:
        futures = {pool.submit(run, case): case for case in cases}
        for future in as_completed(futures):
            if result := future.result():
                yield futures[future], result


def _log(part: str, case: str, folder: Path) -> Path:
    return folder / f"{part}-{case.replace(' ', '_').replace('/', '_')}.log"


def _run_case(
    part: str, case: str, tiny: bool, seconds: float, folder: Path
) -> dict[str, Any] | None:
    """What a case gives, or its error; None if it did not end.

    What it prints is kept beside the results.
    """
    command = [sys.executable, str(HERE), "--case", part, case, *(["--tiny"] if tiny else [])]
    log = _log(part, case, folder)
    start = time.monotonic()
    with log.open("w") as file:
        variables = _environment(part, folder)
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=variables, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_all(process)
    printed = log.read_text(errors="replace")
    found = [line[7:] for line in printed.splitlines() if line.startswith("RESULT ")]
    if not found:
        return {"error": f"{_end_of(printed, process.returncode)[:150]}: {log}"}
    result: dict[str, Any] = json.loads(found[-1])
    return {**result, "s": round(time.monotonic() - start)}


def _end_of(printed: str, code: int) -> str:
    """Why a case has no result, in a line."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return (printed.strip().splitlines() or ["no output"])[-1]


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """End a case with the ranks that it has started, which would keep the GPU's memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def _source() -> str:
    """Where Python finds this checkout as `shardc`, also where it is not installed."""
    sys.path.append(str(PROJECT / "tests/cuda"))
    from install import lay_out

    return str(lay_out(PROJECT / "build/cuda"))


def _environment(part: str, folder: Path) -> dict[str, str]:
    """The variables of a case; those that run beside each other have a thread each."""
    found = os.pathsep.join([_source(), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": found, "SHARDC_KIT_FOLDER": str(folder.resolve())}
    one = {} if part in TIMED else {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours, **one}


if __name__ == "__main__":
    main()
