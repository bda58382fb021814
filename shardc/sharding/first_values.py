"""First values: the values with which ranks come to `fully_shard`, equal or not, or on meta.

As with FSDP2, each rank cuts its own values. Ranks with different seeds would train a patchwork of
values, and a rank on meta has no values. Both are legal where values are loaded afterwards. So
`fully_shard` notes both cases, and the first use of the model reports them
(`runtime/checks/meta.py`). The note travels with the plan of the buckets, without a message of its
own.

Ranks of one copy of the model compare the first, middle and last element of each parameter. The
comparison reads a few bytes, and does not see a difference elsewhere in a parameter.
`check_same_values` compares everything.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.groups.ranks import Ranks
from shardc.runtime.tensor.tensor_parallel import local_value
from shardc.sharding.materialize import generator_fact
from shardc.sharding.unit_plan import UnitPlan

_GROUPS = 64
"""About how many groups of parameters are compared, so that a note has a few hundred bytes."""


@dataclass(frozen=True)
class FirstValues:
    """First values that differ between ranks, by the place of a unit in the plan.

    Attributes:
        mixed: units that have values on some ranks and are on meta on others.
        differing: the first parameter of a unit with unequal values on the ranks that have values.
    """

    mixed: frozenset[int] = frozenset()
    differing: Mapping[int, str] = field(default_factory=dict)


def values_note(plans: Sequence[UnitPlan], ranks: Ranks, init: bool, device: torch.device) -> str:
    """This rank's note for `compare_values`.

    Args:
        init: whether this rank has a `param_init_fn`.
        device: the device of the generator that the `param_init_fn` draws from.
    """
    copy = 0 if ranks.replicas is None else compat.resolve_group(ranks.replicas).rank()
    on_meta = [any(param.is_meta for param in plan.params.values()) for plan in plans]
    draws = init and any(on_meta)
    said = {
        "kinds": "".join("m" if each else "v" for each in on_meta),
        "init": init,
        "random": generator_fact(device) if draws and ranks.copies > 1 else "",
        "ends": [_digest(group.values()) for _, group in _groups(plans)],
    }
    # Copies of the model may start unequal; a `param_init_fn` draws equal values in all copies.
    return json.dumps({**said, "copy": 0 if draws else copy}, sort_keys=True)


def compare_values(notes: Iterable[str], plans: Sequence[UnitPlan]) -> FirstValues:
    """Compare the notes of all ranks: the first values that differ, alike on every rank.

    Raises:
        ValueError: a `param_init_fn`, where some ranks have values already.
        RuntimeError: a `param_init_fn` on some ranks only, or different random states.
    """
    said: list[dict[str, Any]] = [json.loads(note) for note in notes]
    kinds = list(zip(*(each["kinds"] for each in said), strict=True))
    mixed = frozenset(place for place, each in enumerate(kinds) if len(set(each)) > 1)
    _check_init(said, bool(mixed))
    differing: dict[int, str] = {}
    for index, (place, group) in enumerate(_groups(plans)):
        for copy in {each["copy"] for each in said}:
            there = [s for s in said if s["copy"] == copy and s["kinds"][place] == "v"]
            if len({each["ends"][index] for each in there}) > 1:
                name, *others = group
                more = f" or one of the {len(others)} behind it" if others else ""
                differing.setdefault(place, f"'{name}'{more}")
    return FirstValues(mixed, differing)


def _check_init(said: Sequence[Mapping[str, Any]], mixed: bool) -> None:
    inits, states = {each["init"] for each in said}, {each["random"] for each in said}
    what = "ranks disagree on the parameters given to fully_shard"
    if mixed and True in inits:
        raise ValueError(
            f"{what}: some have values and others are on meta, and the param_init_fn would draw "
            "values on those only. Give sync_module_states=True to start from rank 0 of the mesh, "
            "or build the model on meta on all ranks"
        )
    if len(inits) > 1 and any("m" in each["kinds"] for each in said):
        raise RuntimeError(f"{what}: they are on meta, and only some ranks give a param_init_fn")
    if len(states) > 1:
        raise RuntimeError(f"{what}: {' and '.join(sorted(states))}")


def _groups(plans: Sequence[UnitPlan]) -> list[tuple[int, dict[str, nn.Parameter]]]:
    """The parameters of all units in groups: the unit's place, and the parameters by name."""
    size = max(1, -(-sum(len(plan.params) for plan in plans) // _GROUPS))
    found = []
    for place, plan in enumerate(plans):
        named = list(plan.params.items())
        found += [(place, dict(named[at : at + size])) for at in range(0, len(named), size)]
    return found


@torch.no_grad()
def _digest(params: Iterable[nn.Parameter]) -> str:
    """The digest of the first, middle and last elements of parameters that are not on meta."""
    ends = [_ends(local_value(param)) for param in params if not param.is_meta]
    data = torch.cat(ends).cpu().numpy().tobytes() if ends else b""
    return hashlib.sha256(data).hexdigest()[:6]


def _ends(value: Tensor) -> Tensor:
    """The bytes of a tensor's first, middle and last element; of an empty tensor, no bytes."""
    flat, count = value.detach().reshape(-1), value.numel()
    places = [0, count // 2, count - 1] if count else []
    return flat[torch.tensor(places, dtype=torch.int64, device=flat.device)].view(torch.uint8)
