"""Fixed cases of the fuzzer, among them some that once failed; and the fuzzer itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from fuzz.case import Block, Case, Micro, Step, Unit, from_json, mesh_shape, to_json
from fuzz.draw import draw, why_not
from fuzz.run import failure_of
from fuzz.script import script
from fuzz.shrink import shrink

CASES = [
    from_json(line)
    for line in Path(__file__).with_name("fuzz").joinpath("cases.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_case(number):
    error = failure_of(CASES[number])
    assert error is None, f"{to_json(CASES[number])}\n{error}"


def test_a_case_is_the_same_each_time_and_survives_as_text():
    for number in range(50):
        case = draw(3, number)
        assert case == draw(3, number) == from_json(to_json(case)) and why_not(case) is None
        compile(script(case), "case", "exec")
    assert len({to_json(draw(3, number)) for number in range(50)}) == 50


def test_a_failing_case_is_shrunk_to_what_makes_it_fail():
    def fails(case):
        return any(block.kind == "mlp" and block.unit for block in case.blocks) and case.world > 1

    case = next(case for case in (draw(0, n) for n in range(1000)) if fails(case))
    small = shrink(case, fails, 1000)
    assert small.blocks == (Block("mlp", unit=Unit()),)
    assert small.steps == (Step(),) and small.way == "uncompiled" and small.world == 2


def test_operations_of_a_failing_case_are_dropped():
    def fails(case):
        return any("rows" in step.around for step in case.steps)

    case = next(case for case in (draw(0, n) for n in range(1000)) if fails(case))
    assert shrink(case, fails, 1000) == Case(steps=(Step(around=("rows",)),))


def test_a_gradient_that_is_wrong_is_told():
    case = Case(steps=(Step((Micro(), Micro())),))
    right = "call = caller(ours)"
    wrong = script(case).replace(right, f"{right}\n    ours.set_gradient_divide_factor(3)")
    with pytest.raises(AssertionError, match=r"step 0, gradient of b0\.lin\.weight: off by"):
        ranks.run_on_ranks(
            case.world, "fuzz.run", "run_text", {"text": wrong, "shape": mesh_shape(case)}
        )


def test_the_script_of_a_case_runs_alone(tmp_path):
    path = tmp_path / "case.py"
    path.write_text(script(Case(world=1, steps=(Step(),))))
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, env=outside)
    assert run.returncode == 0 and run.stdout == "equal\n", run.stderr
