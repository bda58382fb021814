"""The list of small bugs fits the code, and a run of it tells those that tests notice."""

import subprocess
import sys
from collections import Counter

import pytest

sys.path.insert(0, __file__.rpartition("/")[0] + "/mutants")
import run

MUTANTS = run.read_mutants()


def test_there_are_many_and_each_is_described_once():
    assert len(MUTANTS) >= 120
    assert max(Counter(mutant.what for mutant in MUTANTS).values()) == 1
    assert {mutant.file.split("/")[0] for mutant in MUTANTS} == set(run.PACKAGES)


def test_each_fits_the_code_and_names_tests():
    unfit = []
    for mutant in MUTANTS:
        try:
            compile(run.mutated(mutant, run.ROOT), mutant.file, "exec")
        except (OSError, SyntaxError, ValueError) as error:
            unfit.append(f"{mutant.what}: {error}")
        unfit += [f"{mutant.what}: there is no {test}" for test in _missing(mutant.tests)]
    assert not unfit, "\n".join(unfit)


def _missing(tests):
    for test in tests:
        file, _, name = test.partition("::")
        path = run.ROOT / "tests" / file
        if not path.exists() or f"def {name.partition('[')[0] or 'test_'}" not in path.read_text():
            yield test


def test_a_text_that_is_gone_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"'other': .* must occur once"):
        run.mutated(run.Mutant("other", "a.py", "y = 1", "y = 2", ("test_a.py",)), tmp_path)


def test_a_run_tells_killed_from_alive(tmp_path):
    (tmp_path / "shardc").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "shardc" / "__init__.py").write_text("def sign(x):\n    return (x > 0) - (x < 0)\n")
    (tmp_path / "tests" / "test_sign.py").write_text(
        "from shardc import sign\n\ndef test_sign():\n    assert sign(2) == 1\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    noticed = run.Mutant("larger", "shardc/__init__.py", "(x > 0)", "(x > 5)", ("test_sign.py",))
    missed = run.Mutant("smaller", "shardc/__init__.py", "- (x < 0)", "", ("test_sign.py",))
    broken = run.Mutant("no syntax", "shardc/__init__.py", "def", "dof", ("test_sign.py",))
    verdicts = run.run([noticed, missed, broken], tmp_path, jobs=2)
    assert verdicts[noticed] == "killed" and verdicts[missed] == "SURVIVED"
    assert verdicts[broken].startswith("pytest could not run")
    assert "(x > 0) - (x < 0)" in (tmp_path / "shardc" / "__init__.py").read_text()
