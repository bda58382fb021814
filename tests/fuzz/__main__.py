"""`make fuzz CASES=200 SEED=0`: run random cases, and print each failure, shrunk, as a script.

A case (`case.py`) is drawn from its seed and number (`draw.py`, where what torch or the project
refuses is listed), made into a program that trains a model unsharded and sharded and compares the
two (`script.py`), and run on the rank processes of the tests (`run.py`).
"""

import argparse
import sys
import time
import zlib
from pathlib import Path

import ranks
from tqdm import tqdm

from fuzz.case import Case, from_json, to_json
from fuzz.draw import draw
from fuzz.run import TIMEOUT, failure_of
from fuzz.script import script
from fuzz.shrink import shrink

FRESH = 150
"""Cases after which the rank processes are replaced, so that what torch keeps cannot pile up."""


def main() -> int:
    given = _arguments()
    if given.case:
        numbered = [(0, from_json(given.case))]
    else:
        numbers = range(given.first, given.first + given.cases)
        drawn = ((number, draw(given.seed, number)) for number in numbers)
        numbered = [(n, case) for n, case in drawn if given.way in ("", case.way)]
    failed = 0
    begun = time.monotonic()
    with tqdm(numbered, unit="case", smoothing=0.05) as bar:
        for count, (number, case) in enumerate(bar):
            if count % FRESH == FRESH - 1:
                ranks.stop_all()
            error = failure_of(case, given.timeout)
            if error is not None:
                failed += 1
                bar.set_postfix(failed=failed)
                bar.write(f"\ncase {number} of seed {given.seed} failed: {to_json(case)}\n{error}")
                _report(case, error, given, bar)
                if failed == given.stop_after:
                    break
    ranks.stop_all()
    print(
        f"{count + 1} cases of seed {given.seed}, {failed} failed, {len(ranks.reruns)} run again "
        f"after a crash of gloo, {time.monotonic() - begun:.0f} s"
    )
    return min(failed, 1)


def _report(case: Case, error: str, given: argparse.Namespace, bar: tqdm) -> None:
    small = case
    if given.shrink:
        small = shrink(case, lambda c: failure_of(c, given.timeout) is not None, given.shrink)
        error = failure_of(small, given.timeout) or "it does not fail again"
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"case_{zlib.crc32(to_json(small).encode()):08x}.py"
    path.write_text(script(small))
    bar.write(
        f"{script(small)}\nshrunk, in {path}; again with make fuzz CASE='{to_json(small)}'\n{error}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--way", default="", help="run only the cases that run so")
    parser.add_argument("--case", help="one case, as it was printed")
    parser.add_argument("--shrink", type=int, default=40, help="runs to shrink a failure, or 0")
    parser.add_argument("--stop-after", type=int, default=5, help="failures after which to stop")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for a case")
    parser.add_argument("--out", default="build/fuzz", help="where scripts of failures go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
