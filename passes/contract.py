"""Contracts of passes: the facts of a graph that a pass needs, gives and ends.

    @contract(needs="one_wait movable", gives="scheduled")
    def schedule(gm, ctx): ...

Facts are words of the table `FACTS`, or words of a user's own pass. `check_order` walks through the
whole pipeline before a compile, and refuses a pass that lacks a fact, by name. A pass without a
contract may stand anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.fx import GraphModule

from shardc.passes.context import PassContext

Pass = Callable[[GraphModule, PassContext], GraphModule]
PairPass = Callable[[GraphModule, GraphModule, PassContext], None]
"""A pass over forward and backward together, right after the partitioner: it edits both."""
AnyPass = Pass | PairPass
_P = TypeVar("_P", bound=AnyPass)

FACTS = {
    "marks": "modules read parameters by marks",
    "movable": "nodes may be reordered as their inputs allow",
    "gathers": "a gather brings the parameters of a bucket",
    "segments": "inputs that are segments are marked",
    "tags": "gathered parameters are tagged: saved for the backward, or computed again",
    "one_wait": "a gather has one wait",
    "scheduled": "collectives start and are waited for where the timeline puts them",
    "labels": "collectives have labels",
}
_AT_FIRST = ("marks", "movable")


@dataclass(frozen=True)
class Contract:
    """The facts that a pass needs, gives and ends."""

    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


def contract(needs: str = "", gives: str = "", ends: str = "") -> Callable[[_P], _P]:
    """Declare the facts of a pass, in words with spaces between them."""

    def declare(step: _P) -> _P:
        facts = (tuple(words.split()) for words in (needs, gives, ends))
        step.contract = Contract(*facts)  # type: ignore[union-attr]
        return step

    return declare


def contract_of(step: AnyPass) -> Contract:
    """The contract of a pass, also of a `partial`; empty if the pass declares none."""
    declared = getattr(getattr(step, "func", step), "contract", None)
    return declared if isinstance(declared, Contract) else Contract()


def name_of(step: AnyPass) -> str:
    """The name of a pass in dumps and errors; settings bound by `partial` do not change it."""
    return str(getattr(getattr(step, "func", step), "__name__", type(step).__name__))


def check_order(stages: Iterable[Sequence[AnyPass]]) -> None:
    """Check that each pass of the stages, in order, finds the facts that it needs.

    Raises:
        ValueError: a fact is missing. The message names the pass, the fact, and the pass to put
            before or behind it.
    """
    steps = [step for stage in stages for step in stage]
    there, ended = set(_AT_FIRST), dict[str, AnyPass]()
    for place, step in enumerate(steps):
        terms = contract_of(step)
        for fact in terms.needs:
            if fact not in there:
                raise ValueError(_refusal(step, fact, ended.get(fact), steps[place + 1 :]))
        there = (there | set(terms.gives)) - set(terms.ends)
        ended |= dict.fromkeys(terms.ends, step)


def _refusal(step: AnyPass, fact: str, ended: AnyPass | None, later: Sequence[AnyPass]) -> str:
    means = f" ({FACTS[fact]})" if fact in FACTS else ""
    text = f"the pass {name_of(step)} needs '{fact}'{means}"
    if ended is not None:
        return f"{text}, which {name_of(ended)} before it ends: put {name_of(step)} before that"
    giver = next((other for other in later if fact in contract_of(other).gives), None)
    if giver is None:
        return f"{text}, and no pass of the pipeline gives that"
    return f"{text}, and {name_of(giver)}, which gives that, comes later: put it first"
