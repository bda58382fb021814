"""Random cases, most of them cheap to run."""

import random
from collections.abc import Callable, Iterable

from fuzz.around import ADDED, AROUND, GRADIENTS, REPLACED
from fuzz.case import PRECISIONS, Block, Case, Micro, Step, Unit, all_blocks, paths
from fuzz.kinds import KINDS, LINEAR, RECOMPUTE
from fuzz.training import MICRO, OPTIMIZERS, THEN, WAITS


def draw(seed: int, number: int) -> Case:
    """Case `number` of the sequence that `seed` begins; those of LIMITS are passed over."""
    chance = random.Random(f"{seed}/{number}")
    while True:
        case = _case(chance)
        if why_not(case) is None:
            return case


def _weighted(chance: random.Random, **weights: float) -> str:
    names = [name.replace("_", " ") for name in weights]
    return chance.choices(names, list(weights.values()))[0]


def _case(chance: random.Random) -> Case:
    world = chance.choices([1, 2, 3, 4], [3, 11, 2, 4])[0]
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    way = _weighted(chance, uncompiled=68, eager=14, blocks=5, in_place=5, mixed=6, inductor=2)
    precision = "float64" if chance.random() < 0.7 else chance.choice(list(PRECISIONS))
    plain = PRECISIONS[precision][1] == ""
    small = way == "inductor"
    count = chance.choice([1, 2, 2, 3, 3, 4] if not small else [1, 2])
    blocks = tuple(_block(chance, depth=0, plain=plain) for _ in range(count))
    root = None if plain and chance.random() < 0.06 else _unit(chance)
    made = _weighted(chance, calls=64, policy=20, auto=6, apart=10) if root else "calls"
    replicas = chance.choice(divisors) if chance.random() < 0.3 else 0
    return Case(
        world=world,
        replicas=replicas,
        hierarchical=world == 4 and not replicas and chance.random() < 0.4,
        width=chance.randint(3, 9),
        blocks=blocks,
        way=way,
        dynamic=chance.choice([None, None, None, True, False]),
        precision=precision,
        root=root,
        made=made,
        start=chance.choice(["meta", "sync"]) if chance.random() < 0.1 else "",
        offload=chance.random() < 0.08,
        split=chance.random() < 0.2,
        tied=chance.random() < 0.1,
        optimizer=chance.choice(list(OPTIMIZERS)),
        steps=tuple(_step(chance, way, last=number == 2) for number in range(3)),
        seed=chance.randint(0, 99),
        whole=way != "mixed" and chance.random() < 0.1,  # a graph has one of the two ways
    )


def _block(chance: random.Random, depth: int, plain: bool) -> Block:
    nest = chance.random() < (0.2 if depth < 2 else 0)
    kind = "nest" if nest else chance.choice(list(KINDS))
    if not nest and chance.random() < 0.25:
        kind = chance.choice(LINEAR)
    count = chance.randint(1, 3)
    return Block(
        kind=kind,
        size=chance.randint(1, 7),
        ref=chance.randint(0, 3),
        copies=chance.choice([1, 1, 1, 1, 2, 3]),
        children=tuple(_block(chance, depth + 1, plain) for _ in range(count)) if nest else (),
        recompute=chance.choice(list(RECOMPUTE)) if chance.random() < 0.25 else "",
        unit=_unit(chance) if chance.random() < (0.6 if depth == 0 else 0.25) else None,
        frozen=chance.random() < 0.06,
        ignored=plain and chance.random() < 0.03,
        breaks=chance.random() < 0.06,
        gives=chance.choice(["tuple", "dict"]) if chance.random() < 0.06 else "",
        hooked=chance.random() < 0.05,
    )


def _unit(chance: random.Random) -> Unit:
    reshard = chance.choice([None, None, True, False, 2, 1])
    return Unit(reshard=reshard, together=chance.random() < 0.12)


def _step(chance: random.Random, way: str, last: bool) -> Step:
    count, waits = chance.choice([1, 1, 1, 2, 3]), [*WAITS, "sync", "no_sync"]
    return Step(
        micro=tuple(_micro(chance, way) for _ in range(count)),
        waits=chance.choice(waits) if count > 1 and chance.random() < 0.6 else "",
        clip=chance.random() < 0.3,
        keep_zeros=chance.random() < 0.15,
        then=chance.choice(list(THEN)) if chance.random() < 0.25 else "",
        gradients=_some(chance, GRADIENTS, [0, 0, 0, 1, 1]),
        around=_some(chance, (*AROUND, *REPLACED), [0, 1] if last else [0, 1, 1, 2, 3]),
    )


def _some(chance: random.Random, names: Iterable[str], counts: list[int]) -> tuple[str, ...]:
    return tuple(chance.sample(list(names), chance.choice(counts)))


def _micro(chance: random.Random, way: str) -> Micro:
    kinds = [kind for kind in MICRO if kind != "penalty" or way == "uncompiled"]
    return Micro(
        rows=chance.choice([2, 2, 3, 5]),
        ragged=chance.random() < 0.1,
        kind="plain" if chance.random() < 0.6 else chance.choice(kinds),
        flag=chance.random() < 0.3,
        added=chance.choice(list(ADDED)) if chance.random() < 0.12 else "",
    )


# -- what is not to be drawn ----------------------------------------------------------------------


def _is_compiled(case: Case) -> bool:
    return case.way != "uncompiled"


def _any(case: Case, test: Callable[[Block], bool]) -> bool:
    return any(test(block) for block in all_blocks(case.blocks))


def _does(case: Case, name: str) -> bool:
    return any(name in step.around for step in case.steps)


def _always_trains(block: Block) -> bool:
    """Whether each call reads a trained parameter of `block` outside of reentrant checkpoints."""
    if block.recompute == "reentrant" or block.frozen:
        return False
    inside = map(_always_trains, block.children)
    return any(inside) if block.children else block.kind not in ("maybe", "outside")


def _shares(block: Block) -> bool:
    """Whether `block` reads weights of others."""
    return block.kind in ("tied", "outside")


def _ties(case: Case) -> bool:
    return case.tied or _any(case, lambda block: block.kind == "tied")


def _walks(block: Block) -> bool:
    """Whether `block` goes through its parameters in its forward."""
    return block.kind in ("penalized", "named")


def _is_all(block: Block, flag: str) -> bool:
    """Whether `flag` is set for everything in `block`."""
    inside = bool(block.children) and all(_is_all(child, flag) for child in block.children)
    return getattr(block, flag) or inside


def _is_sharded(block: Block, inside: bool) -> bool:
    """Whether something in `block`, which may be `inside` a unit, is left to shard."""
    inside = inside or block.unit is not None
    if block.ignored or not block.children:
        return inside and not block.ignored
    return any(_is_sharded(child, inside) for child in block.children)


LIMITS: dict[str, Callable[[Case], bool]] = {
    # what torch refuses, sharded or not
    "nothing to train": lambda case: all(_is_all(block, "frozen") for block in case.blocks),
    "torch: double backward through fused attention": lambda case: (
        any(m.kind == "penalty" for s in case.steps for m in s.micro)
        and _any(case, lambda b: b.kind == "attention")
    ),
    "output_dtype of inner units, whose followers compute in param_dtype": lambda case: (
        "output" in case.precision
        and (case.made in ("auto", "apart") or _any(case, lambda b: b.unit is not None))
    ),
    "torch: a checkpoint without states of unused parameters is not loaded": lambda case: (
        any(step.then == "reload" for step in case.steps)
        and (
            _any(case, lambda b: b.kind in ("choice", "maybe", "unused", "outside"))
            or any("none" in step.gradients for step in case.steps)
        )
    ),
    "torch: buffers are not cast with the parameters": lambda case: (
        bool(PRECISIONS[case.precision][1])
        and _any(case, lambda b: b.kind in ("spectral_norm", "batchnorm"))
    ),
    "rounding that many layers multiply": lambda case: (
        (bool(PRECISIONS[case.precision][1]) or _any(case, lambda b: b.kind == "low"))
        and sum(1 for _ in paths(case.blocks)) > 16
    ),
    "values of what is not sharded are not synced": lambda case: (
        case.start == "sync" and (not case.root or _any(case, lambda b: b.ignored))
    ),
    "plain parameters stay on meta": lambda case: (
        case.start == "meta" and (not case.root or _any(case, lambda b: b.ignored))
    ),
    "nothing to shard": lambda case: (
        not any(_is_sharded(block, inside=case.root is not None) for block in case.blocks)
    ),
    "nothing to shard: ignored weights are those of units": lambda case: _any(
        case, lambda b: b.ignored and any(map(_shares, all_blocks((b,))))
    ),
    "torch: a compiled checkpoint counts a batch once, an uncompiled one twice": lambda case: (
        _is_compiled(case)
        and _any(
            case,
            lambda b: bool(b.recompute) and any(c.kind == "batchnorm" for c in all_blocks((b,))),
        )
    ),
    "torch: selective checkpoints refuse changes in place": lambda case: _any(
        case,
        lambda b: (
            b.recompute == "selective"
            and any(c.kind in ("inplace", "counted", "lstm") for c in all_blocks((b,)))
        ),
    ),
    "torch: a second backward through a selective checkpoint": lambda case: (
        any(m.kind in ("penalty", "retained") for s in case.steps for m in s.micro)
        and _any(case, lambda b: b.recompute == "selective")
    ),
    "torch: reentrant checkpoints differentiate no outputs in a dict": lambda case: _any(
        case, lambda b: b.recompute == "reentrant" and b.gives == "dict"
    ),
    "torch: no parameter outside of reentrant checkpoints is trained": lambda case: (
        case.whole and not any(map(_always_trains, case.blocks))
    ),
    "torch: double backward through reentrant checkpoints": lambda case: (
        any(m.kind == "penalty" for s in case.steps for m in s.micro)
        and _any(case, lambda b: b.recompute == "reentrant")
    ),
    # what docs/limits.md says
    "weights that are not sharded beside those that are are not tied": lambda case: (
        case.tied and (case.root is None or _any(case, lambda b: b.ignored))
    ),
    "torch: assigned values untie weights": lambda case: _does(case, "assign") and _ties(case),
    "what is built anew is not tied, and its optimizer has one group": lambda case: (
        any(step.then == "reload" for step in case.steps) and (case.tied or _does(case, "group"))
    ),
    "torch: a checkpoint recomputes with the model's own values": lambda case: (
        _does(case, "trained call") and _any(case, lambda b: bool(b.recompute))
    ),
    "what takes the place of an ignored parameter is not ignored": lambda case: (
        (_does(case, "assign") or _does(case, "assigned parameter"))
        and _any(case, lambda b: b.ignored)
    ),
    "named_parameters() in a forward without gradients gives those that are stored": lambda case: (
        bool(PRECISIONS[case.precision][1]) and _any(case, lambda b: b.kind == "named")
    ),
    "compiled code that walks through weights which several modules share": lambda case: (
        _is_compiled(case) and _ties(case) and _any(case, _walks)
    ),
    "a recomputed forward that walks through weights which are tied across units": lambda case: (
        _ties(case)
        and _any(case, lambda b: bool(b.recompute) and any(map(_walks, all_blocks((b,)))))
    ),
    "a compiled block that a checkpoint recomputes once what was held is freed": lambda case: (
        _is_compiled(case)
        and any(step.waits == "keep" for step in case.steps)
        and any(m.kind.startswith("two") for step in case.steps for m in step.micro)
        and _any(case, lambda b: b.recompute in ("non-reentrant", "selective", "wrapper"))
    ),
    "another dtype beside mixed precision": lambda case: (
        _does(case, "double") and case.precision != "float32"
    ),
    "a unit's weight that a module outside of any unit reads": lambda case: (
        case.root is None and not all(block.unit for block in case.blocks) and _any(case, _shares)
    ),
    "a compiled and an uncompiled forward before one backward, while gradients wait": lambda case: (
        case.way == "mixed"
        and any(s.waits and any(m.kind == "two" for m in s.micro) for s in case.steps)
    ),
    "a last micro-batch without any parameter, while gradients wait": lambda case: (
        any(step.waits and not step.micro[-1].flag for step in case.steps)
        and all(b.kind in ("maybe", "nest", "outside") or b.frozen for b in all_blocks(case.blocks))
    ),
    "torch: a compiled forward of a batch norm before the backward of an uncompiled one": (
        lambda case: (
            case.way == "mixed"
            and any(micro.kind.startswith("two") for step in case.steps for micro in step.micro)
            and _any(case, lambda block: block.kind == "batchnorm")
        )
    ),
    "a retained graph's second backward, compiled, where gradients waited": lambda case: (
        _is_compiled(case)
        and any(s.waits and any(m.kind == "retained" for m in s.micro) for s in case.steps)
    ),
}


def why_not(case: Case) -> str | None:
    """The name of what keeps `case` from being drawn."""
    return next((name for name, applies in LIMITS.items() if applies(case)), None)
