"""Compare graphs and plans of the cases with those that are kept, or keep the new ones.

    make golden                        # prints the differences; status 1 where there are any
    make golden GOLDEN_ARGS=--write    # then `git diff` shows them
    PYTHONPATH=tests python -m golden "tied weights" resharded    # some cases

A case's text has a line for each pass, then each graph that is compiled, an op a line, and its
plan. Numbers of graphs count from 0 in each case. Texts are those of torch 2.13.
"""

import argparse
import difflib
import os
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from golden import KEPT, cases, texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(cases.CASES), help="default: all")
    parser.add_argument("--write", action="store_true", help="keep the texts of this tree")
    parser.add_argument("--to", type=Path, help="write the texts to a folder, compare nothing")
    given = parser.parse_args()
    made = texts_of(given.cases)
    if given.write or given.to:
        folder = given.to or KEPT
        folder.mkdir(exist_ok=True)
        for name, text in made.items():
            (folder / name).write_text(text)
        return 0
    kept = {name: (KEPT / name).read_text() for name in made if (KEPT / name).exists()}
    differ = [name for name, text in made.items() if text != kept.get(name)]
    for name in differ:
        old, new = kept.get(name, "").splitlines(), made[name].splitlines()
        print("\n".join(difflib.unified_diff(old, new, f"kept/{name}", f"now/{name}", lineterm="")))
    print(f"{len(made)} texts, {len(differ)} differ")
    return min(len(differ), 1)


def texts_of(names: list[str]) -> dict[str, str]:
    """The texts of these cases, by the names of their files."""
    made = {}
    for name in tqdm(names, unit="case", leave=False):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SHARDC_DUMP"] = folder
            report = cases.CASES[name]()
            stem = name.replace(" ", "_")
            made[f"{stem}.txt"] = texts.of_dump(Path(folder, "rank0"))
        if name in cases.REPORTS:
            made[f"{stem}.json"] = texts.of_report(report)
    return made


if __name__ == "__main__":
    sys.exit(main())
