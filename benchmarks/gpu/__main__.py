"""Everything that only a GPU can say, in parts that each fit ten minutes: `make gpu`.

    python benchmarks/gpu smoke numerics        # these parts; all of them without names

It needs one GPU, torch and this checkout; nothing is installed. A part is a list of cases. Each
case is a process of its own, so a crash costs one case. What a case gave is kept in
`build/gpu/PART.json`: called again, the kit goes on where it was cut off.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(PROJECT / "benchmarks")]
PARTS = ("smoke", "numerics", "hazards", "speed", "memory", "profiles", "suite")
CASE_SECONDS = 420


def main() -> None:
    """Run the cases that have no result yet, and print a table for each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--limit", type=float, default=560, help="seconds in all (default 560)")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--tiny", action="store_true", help="small models, to try the kit itself")
    parser.add_argument("--folder", type=Path, default=PROJECT / "build/gpu", help="of the results")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print("RESULT", json.dumps(_part(args.case[0])[args.case[1]](args.tiny)))
        return
    if unknown := set(args.parts) - set(PARTS):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    until = time.monotonic() + args.limit
    failed = False
    for name in args.parts or PARTS:
        results = _run(name, args, until)
        rows = [{"case": case, **result} for case, result in results.items()]
        print(f"\n{name}\n{tabulate(rows, headers='keys', floatfmt='.4g')}", flush=True)
        failed |= any("error" in result for result in results.values())
        left = len(_part(name)) - len(results)
        if left:
            print(f"{left} cases are left: call it again")
    raise SystemExit(failed)


def _part(name: str) -> Mapping[str, Any]:
    """The cases of a part: functions by name, called with whether models are tiny."""
    cases: Mapping[str, Any] = importlib.import_module(f"part_{name}").CASES
    return cases


def _run(name: str, args: argparse.Namespace, until: float) -> dict[str, dict[str, Any]]:
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{name}.json"
    results = json.loads(path.read_text()) if path.exists() and not args.again else {}
    wanted = [case for case in _part(name) if case not in results or "error" in results[case]]
    with tqdm(wanted, desc=name, unit="case", leave=False) as progress:
        for case in progress:
            progress.set_postfix_str(case)
            seconds = min(CASE_SECONDS, until - time.monotonic())
            if seconds < 20:
                break
            results[case] = _run_case(name, case, args.tiny, seconds, args.folder)
            path.write_text(json.dumps(results, indent=1))
    return results


def _run_case(part: str, case: str, tiny: bool, seconds: float, folder: Path) -> dict[str, Any]:
    """What a case gives, or its error; what it prints is kept beside the results."""
    command = [sys.executable, str(HERE), "--case", part, case, *(["--tiny"] if tiny else [])]
    log = folder / f"{part}-{case.replace(' ', '_').replace('/', '_')}.log"
    start = time.monotonic()
    with log.open("w") as file:
        try:
            subprocess.run(
                command, stdout=file, stderr=file, timeout=seconds, env=_environment(), check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no end in {seconds:.0f} s: {log}"}
    printed = log.read_text(errors="replace")
    found = [line[7:] for line in printed.splitlines() if line.startswith("RESULT ")]
    if not found:
        last = printed.strip().splitlines()[-1:] or ["no output"]
        return {"error": f"{last[0][:150]}: {log}"}
    result: dict[str, Any] = json.loads(found[-1])
    return {**result, "s": round(time.monotonic() - start)}


def _environment() -> dict[str, str]:
    """The variables under which `shardc` is this checkout, also where it is not installed."""
    sys.path.append(str(PROJECT / "tests/cuda"))
    from install import lay_out

    found = [str(lay_out(PROJECT / "build/cuda")), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


if __name__ == "__main__":
    main()
