"""A case of the fuzzer: a model, how it is sharded, how it runs and what is trained, as pure data.

Every field has its simplest value as default, so that a case is shrunk by putting defaults back.
hypothesis was not taken for drawing and shrinking: its first example is always the simplest one,
choices have no weights, case 137 cannot be drawn without the 136 before it, and its shrinker needs
hundreds of runs, of seconds each.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

PRECISIONS = {
    # name: (dtype of the model, policy, tolerance of every comparison)
    "float64": ("torch.float64", "", 1e-9),  # only sums in another order
    "float32": ("torch.float32", "", 1e-3),  # steps multiply what is rounded
    "param32": ("torch.float64", "torch.float32", 1e-3),
    "reduce32": ("torch.float64", "None, torch.float32", 1e-5),
    "param32 reduce64": ("torch.float64", "torch.float32, torch.float64", 1e-3),
    "param32 output64": ("torch.float64", "torch.float32, None, torch.float64", 1e-3),
    "bfloat16": ("torch.float32", "torch.bfloat16, torch.float32", 0.15),
}


@dataclass(frozen=True)
class Unit:
    """A block that is given to `fully_shard`.

    Attributes:
        reshard: `reshard_after_forward`; a number that does not divide the ranks counts as None.
        together: one unit with the block after it.
    """

    reshard: bool | int | None = None
    together: bool = False


@dataclass(frozen=True)
class Block:
    """One part of a model; it takes and gives `(rows, width)`.

    Attributes:
        kind: a name in `kinds.KINDS`, or "nest" for one that has `children`.
        size: of what is inside; every kind makes of it what it needs.
        ref: which of the linear layers before it a "tied" or "outside" block uses, modulo.
        copies: how many of it follow each other, in a ModuleList.
        recompute: how the caller checkpoints it: a name in `kinds.RECOMPUTE`, or "".
        breaks: the graph breaks before it.
        gives: what its output is inside of: "tuple", "dict" or "".
        hooked: hooks of the user before and after its forward change what it takes and gives.
    """

    kind: str = "linear"
    size: int = 3
    ref: int = 0
    copies: int = 1
    children: tuple["Block", ...] = ()
    recompute: str = ""
    unit: Unit | None = None
    frozen: bool = False
    ignored: bool = False
    breaks: bool = False
    gives: str = ""
    hooked: bool = False


@dataclass(frozen=True)
class Micro:
    """One forward with its backward.

    Attributes:
        rows: of the batch.
        ragged: a rank's batch has as many rows more as its number says.
        kind: a name in `training.MICRO`.
        flag: what blocks that choose go by.
        added: what is added to the loss: a name in `around.ADDED`, or "".
    """

    rows: int = 2
    ragged: bool = False
    kind: str = "plain"
    flag: bool = False
    added: str = ""


@dataclass(frozen=True)
class Step:
    """Micro-batches, then a step of the optimizer.

    Attributes:
        waits: what all micro-batches but the last leave out: a name in `training.WAITS`,
            "no_sync", or "".
        then: what is done with the model after the step: a name in `training.THEN`, or "".
        gradients: what is done with gradients before the optimizer's step: of `around.GRADIENTS`.
        around: what is done after the step: names in `around.AROUND` and `around.REPLACED`.
    """

    micro: tuple[Micro, ...] = (Micro(),)
    waits: str = ""
    clip: bool = False
    keep_zeros: bool = False
    then: str = ""
    gradients: tuple[str, ...] = ()
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        world: ranks.
        replicas: of a 2-D mesh, its first dim; 0 for a 1-D mesh. Must divide `world`.
        hierarchical: four ranks as two nodes; not with a 2-D mesh.
        way: a name in `training.WAYS`.
        precision: a name in PRECISIONS.
        root: the model itself is a unit, its `reshard_after_forward` as in `Unit`.
        made: how units are made: by "calls" of `fully_shard`, by a "policy" given to it, by its
            own choice ("auto"), or so as for a GPU, with vectors in the outermost unit ("apart").
        start: where the sharded model's values come from: "meta" (built without, then loaded),
            "sync" (from rank 0), or "" (the same on all ranks).
        split: units are split into several buckets where they can.
        tied: two linear layers are tied after the model was sharded.
        whole: `compile_step` is compared with the separate step, bit for bit, in place of `steps`.
    """

    world: int = 2
    replicas: int = 0
    hierarchical: bool = False
    width: int = 4
    blocks: tuple[Block, ...] = (Block(),)
    way: str = "uncompiled"
    dynamic: bool | None = None
    precision: str = "float64"
    root: Unit | None = field(default_factory=Unit)
    made: str = "calls"
    start: str = ""
    offload: bool = False
    split: bool = False
    tied: bool = False
    optimizer: str = "sgd"
    steps: tuple[Step, ...] = (Step(), Step(), Step())
    seed: int = 0
    whole: bool = False


def all_blocks(blocks: tuple[Block, ...]) -> Iterator[Block]:
    """`blocks` and everything inside them, each before its children."""
    for block in blocks:
        yield block
        yield from all_blocks(block.children)


def paths(blocks: tuple[Block, ...], prefix: str = "") -> Iterator[tuple[str, Block]]:
    """Every block with where it is found, inner ones first; each copy apart."""
    for index, block in enumerate(blocks):
        name = f"{prefix}b{index}"
        for path in [f"{name}[{i}]" for i in range(block.copies)] if block.copies > 1 else [name]:
            yield from paths(block.children, path + ".")
            yield path, block


def tolerance_of(case: Case) -> float:
    """What every comparison may be off by, as a share of the largest value."""
    low = any(block.kind == "low" for block in all_blocks(case.blocks))
    return max(PRECISIONS[case.precision][2], 1e-5 if low else 0.0)


def mesh_shape(case: Case) -> tuple[int, ...]:
    """Of the mesh, (replicate, shard) or (shard,)."""
    return (case.replicas, case.world // case.replicas) if case.replicas else (case.world,)


def to_json(case: Any) -> str:
    """One line; what has its default value is left out."""
    return json.dumps(_plain(case))


def from_json(text: str) -> Case:
    """What `to_json` was given."""
    return _made(Case, json.loads(text))


def default(item: dataclasses.Field[Any]) -> Any:
    """The simplest value of a field."""
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        items = ((item.name, getattr(value, item.name), default(item)) for item in fields(value))
        return {name: _plain(now) for name, now, simplest in items if now != simplest}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


_PARTS = {"blocks": Block, "children": Block, "unit": Unit, "root": Unit, "micro": Micro,
          "steps": Step}  # fmt: skip


def _made(kind: type, data: dict[str, Any]) -> Any:
    given = {}
    for name, value in data.items():
        part = _PARTS.get(name)
        if part is not None and isinstance(value, list):
            value = tuple(_made(part, item) for item in value)
        elif part is not None and value is not None:
            value = _made(part, value)
        elif isinstance(value, list):
            value = tuple(value)
        given[name] = value
    return kind(**given)
