"""The reason of a recompile, in words: Dynamo names the guard that failed.

Guards of shardc compare the signature of the code that unshards a bucket. Two signatures differ
where a setting, or the state of the unit, has changed.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from torch.fx import GraphModule

from shardc.passes.nodes import graph_modules
from shardc.passes.rewrite.insert_unshard import is_mark
from shardc.runtime.layout.spec import Reduction, UnshardSpec, spec_of

_SWITCHED: dict[str, tuple[str, str]] = {
    "sync": ("gradient sync was switched on", "gradient sync was switched off"),
    "all_reduce": (
        "all-reduce over copies was switched on", "all-reduce over copies was switched off",
    ),
    "pending": ("gradients wait to be reduced", "no gradients wait to be reduced any more"),
    "partial": (
        "gradients wait to be reduced over copies",
        "no gradients wait to be reduced over copies any more",
    ),
    "held": ("a unit was gathered by unshard()", "a unit that was gathered was freed"),
    "kept": ("a unit stays gathered after its backward", "a unit is freed after its backward"),
    "reshard_after_forward": (
        "reshard_after_forward was switched on", "reshard_after_forward was switched off",
    ),
}  # fmt: skip
"""Words for a field of a spec that became true, and for one that became false."""

_CHANGED = {
    "trainable": "parameters were frozen or unfrozen",
    "param_dtype": "the dtype of computation was changed",
    "dtype": "the dtype of parameters or gradients was changed",
    "predivide": "the gradient divide factor was changed",
    "postdivide": "the gradient divide factor was changed",
    "divide_later": "the gradient divide factor was changed",
    "device": "parameters were moved",
    "hints": "the units to prefetch, or the limit on reductions, were changed",
    "outside": "several graphs read a unit now, or one does again",
    "recut": "reshard_after_forward was changed",
    "gather": "set_custom_all_gather was called",
    "scatter": "set_custom_reduce_scatter was called",
    "function": "set_custom_reduce was called",
    "hook": "the all-reduce hook was changed",
    "memory": "where buffers of collectives come from was changed",
    "shapes": "a unit was given other parameters",
}
"""Words for any other field of a spec that changed."""

_GUARDS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (
        r"tensor '(?P<name>[^']*)' size mismatch at index (?P<dim>\d+)\. expected (?P<was>\d+), "
        r"actual (?P<now>\d+)",
        lambda m: f"dim {m['dim']} of {_named(m['name'])} is {m['now']} instead of {m['was']}",
    ),
    (
        r"tensor '(?P<name>[^']*)' requires_grad mismatch\. expected requires_grad=(?P<was>\d)",
        lambda m: (
            f"{_named(m['name'])} {'needs no' if m['was'] == '1' else 'needs a'} gradient now"
        ),
    ),
    (
        r"tensor '(?P<name>[^']*)' (?P<what>dtype|rank|stride) mismatch[^.]*\. expected (?P<was>"
        r"[^,]*), actual (?P<now>\S+)",
        lambda m: f"{_named(m['name'])} has {m['what']} {m['now']} instead of {m['was']}",
    ),
    (r"\bgrad_mode\b", lambda m: "gradients were switched on or off (no_grad)"),
    (r"\bautocast\b", lambda m: "autocast was switched on or off"),
    (r"\.training\b", lambda m: "train() or eval() was called"),
    (
        r"^(?P<name>[\w.\[\]'\"]+) == (?P<was>\S.{0,80}?)\s*(#|$)",
        lambda m: f"{_named(m['name'])} is no longer {m['was']}",
    ),
)
"""Patterns of torch's guards that name the values compared, and words for each."""

_SIGNATURE = re.compile(r"bucket\.key\._(?:train|eval)(?:\[0\])? == \(?'(?P<signature>\w+)'")


def why_again(reason: str, gm: GraphModule) -> str:
    """Dynamo's reason to compile `gm` again, in words; "" where it gave none.

    Only the first guard is told, a guard of the graph that was compiled last.
    """
    first = next(iter(reason.strip().splitlines()), "")
    guard = re.sub(r"^\d+/\d+: ", "", first)
    known = _SIGNATURE.search(guard)
    if known is not None:
        changes = list(dict.fromkeys(_changes(spec_of(known["signature"]), gm)))
        if len(changes) > 1 and _CHANGED["outside"] in changes:  # it follows from the other changes
            changes.remove(_CHANGED["outside"])
        return "; ".join(changes) or "a unit's settings were changed"
    for pattern, words in _GUARDS:
        found = re.search(pattern, guard)
        if found is not None:
            return words(found)
    return " ".join(guard.partition("  #")[0].split())[:200]


def _changes(before: UnshardSpec, gm: GraphModule) -> Iterator[str]:
    """The changes from the code compiled for a bucket to the code of a bucket like it now."""
    nodes = itertools.chain.from_iterable(body.graph.nodes for body in graph_modules(gm))
    now = [spec_of(str(node.args[1])) for node in nodes if is_mark(node)]
    alike = [spec for spec in now if spec != before and spec.pieces == before.pieces] or now
    for name, old, new in _differing(before, alike[0]) if alike else ():
        if name in _SWITCHED and isinstance(new, bool) and isinstance(old, bool):
            yield _SWITCHED[name][0 if new else 1]
        else:
            yield _CHANGED.get(name, f"{name} was {old} and is {new}")


def _differing(before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two specs differ, the fields of their reductions included."""
    for field in fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, Reduction) and old.sync != new.sync:
            yield "sync", old.sync, new.sync  # the other fields follow from it
        elif isinstance(old, Reduction):
            yield from _differing(old, new)
        elif old != new:
            yield field.name, old, new


def _named(source: str) -> str:
    """A guard's source as the user's code names it: `self.limit` for `L['self'].limit`."""
    return re.sub(r"\bL\['(\w+)'\]", r"\1", source)
