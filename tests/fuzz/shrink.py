"""Make a failing case smaller: put defaults back and leave parts out, while it still fails."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.case import Block, Case, default

Part = Any


def smaller(value: Part) -> Iterator[Part]:
    """Variants of a case or of a part of one that are simpler, the simplest first."""
    for item in dataclasses.fields(value):
        now, simplest = getattr(value, item.name), default(item)
        for new in _variants(now, simplest):
            yield dataclasses.replace(value, **{item.name: new})


def _variants(now: Any, simplest: Any) -> Iterator[Any]:
    if isinstance(now, tuple):
        if not simplest and now:
            yield simplest
        yield from _shorter(now)
    elif now != simplest:
        yield simplest
        if isinstance(now, int) and isinstance(simplest, int) and abs(now - simplest) > 1:
            yield (now + simplest) // 2
        if dataclasses.is_dataclass(now):
            yield from smaller(now)


def _shorter(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for index, item in enumerate(items):
        before, after = items[:index], items[index + 1 :]
        if before or after:
            yield before + after
        if isinstance(item, Block) and item.children:
            yield before + item.children + after
    for index, item in enumerate(items):
        for new in smaller(item) if dataclasses.is_dataclass(item) else ():
            yield (*items[:index], new, *items[index + 1 :])


def is_whole(case: Case) -> bool:
    """Whether the parts fit together."""

    def fine(block: Block) -> bool:
        return (block.kind == "nest") == bool(block.children) and all(map(fine, block.children))

    fits = not case.replicas or case.world % case.replicas == 0
    fits = fits and not (case.hierarchical and (case.replicas or case.world != 4))
    return all(map(fine, case.blocks)) and fits


def shrink(case: Case, fails: Callable[[Case], bool], tries: int) -> Case:
    """The smallest case found with at most `tries` runs of `fails`."""
    seen = {case}
    progress = True
    while progress and tries:
        progress = False
        for new in smaller(case):
            if new in seen or not is_whole(new):
                continue
            seen.add(new)
            tries -= 1
            if fails(new):
                case, progress = new, True
                break
            if not tries:
                break
    return case
