"""Records made by hand: a training step of a transformer, as a report would have it.

Blocks are gathered one ahead, in the forward and again in the backward, and their gradients are
reduced behind; one block is larger than the others, so that compute stands still for it.
"""

from dataclasses import dataclass, field

from shardc.reports.record import KINDS, BucketRow, CollectiveRow, Finding, MemoryPoint, Op, Record

GIB = 1 << 30
MS = 1e-3
WIRE = 12 * MS
"""Seconds a GiB is on the wire."""
BLOCK, LARGE_BLOCK, ROOT = 0.42, 0.95, 0.3
"""GiB of their buckets, gathered."""
OPS = (
    ("rms_norm", "norm1", 0.08), ("mm", "attention.qkv", 0.9), ("rope", "attention", 0.1),
    ("sdpa", "attention", 1.1), ("mm", "attention.out", 0.5), ("add", "", 0.06),
    ("rms_norm", "norm2", 0.08), ("mm", "mlp.gate", 1.2), ("mm", "mlp.up", 1.2),
    ("silu", "mlp", 0.15), ("mm", "mlp.down", 1.2), ("add", "", 0.06),
)  # fmt: skip
"""Of a block: op, where in the block, milliseconds."""
_LAST = "embedding_dense_backward embed"


@dataclass
class _Step:
    """A step under way: the clock, when the wire is free, and GiB held by kind."""

    ranks: int
    detail: int
    phase: str = "forward"
    clock: float = 0.0
    wire: float = 0.0
    held: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    ops: list[Op] = field(default_factory=list)
    collectives: list[CollectiveRow] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)

    def hold(self, where: str, **more: float) -> None:
        """From now on so much more is held of some kinds."""
        for kind, gib in more.items():
            self.held[kind] += gib
        parts = tuple(round(GIB * gib) for gib in self.held.values())
        self.memory.append(MemoryPoint(self.clock, parts, where))

    def compute(self, name: str, module: str, ms: float, **more: float) -> None:
        """An op, after which so much more is held."""
        for _ in range(self.detail):
            self.ops.append(Op(self.phase, name, module, self.clock, ms * MS / self.detail))
            self.clock += ms * MS / self.detail
            share = {kind: gib / self.detail for kind, gib in more.items()}
            self.hold(f"{name} {module}".strip(), **share)

    def send(self, kind: str, bucket: str, gib: float, before: str) -> int:
        """Start a collective: its index, for `wait`."""
        start = max(self.wire, self.clock)
        self.wire = start + gib * WIRE
        row = (self.phase, kind, (bucket,), self.ranks, round(gib * GIB), before, "")
        self.collectives.append(CollectiveRow(*row, self.clock, start, self.wire, 0.0, 0.0))
        return len(self.collectives) - 1

    def wait(self, index: int, needed_by: str) -> None:
        """Come to the wait for a collective."""
        row = self.collectives[index]
        exposed = max(0.0, row.end - self.clock)
        values = {**vars(row), "needed_by": needed_by, "waited": self.clock, "exposed": exposed}
        self.collectives[index] = CollectiveRow(**values)
        self.clock += exposed


def training_step(blocks: int = 8, detail: int = 1, ranks: int = 8) -> Record:
    """A step of `blocks` blocks, in which each op is `detail` ops."""
    names = [f"layers.{index}" for index in range(blocks)]
    step = _Step(ranks, detail)
    step.hold("start", segments=0.5, optimizer=1.0, activations=0.1)
    root = step.send("all_gather", "(root)", ROOT, "embedding embed")
    step.hold("all_gather (root)", gathered=ROOT)
    step.wait(root, "embedding embed")
    step.compute("embedding", "embed", 0.2, activations=0.02)
    _forward(step, names)
    step.compute("mm", "head", 2.5, activations=0.4)
    step.phase = "backward"
    step.compute("mm", "head", 5.0, activations=-0.4, gradients=ROOT, gathered=-ROOT)
    root = step.send("reduce_scatter", "(root)", ROOT, f"add {names[-1]}")
    _backward(step, names[::-1])
    step.compute("embedding_dense_backward", "embed", 0.3)
    step.wait(root, f"adamw {names[0]}")
    step.phase = "optimizer"
    for name in [*names, "(root)"]:
        step.compute("adamw", name, 0.25)
    step.hold("zero_grad", gradients=-step.held["gradients"])
    return _record(step, names)


def _gather(step: _Step, names: list[str], index: int, before: str) -> int:
    gib = LARGE_BLOCK if index == 5 else BLOCK
    return step.send("all_gather", names[index], gib, before)


def _forward(step: _Step, names: list[str]) -> None:
    ahead = _gather(step, names, 0, f"rms_norm {names[0]}.norm1")
    for index, name in enumerate(names):
        step.hold(f"all_gather {name}", gathered=BLOCK)
        step.wait(ahead, f"rms_norm {name}.norm1")
        if index + 1 < len(names):
            ahead = _gather(step, names, index + 1, f"rms_norm {name}.norm1")
        for op, module, ms in OPS:
            step.compute(op, f"{name}.{module}".rstrip("."), ms, activations=ms * 0.06)
        step.hold(f"reshard {name}", gathered=-BLOCK)


def _backward(step: _Step, names: list[str]) -> None:
    ahead, reduced = _gather(step, names, 0, f"add {names[0]}"), []
    for index, name in enumerate(names):
        step.hold(f"all_gather {name}", gathered=BLOCK)
        step.wait(ahead, f"add {name}")
        if index + 1 < len(names):
            ahead = _gather(step, names, index + 1, f"add {name}")
        for op, module, ms in OPS[::-1]:
            step.compute(op, f"{name}.{module}".rstrip("."), 2 * ms, activations=-ms * 0.06)
        step.hold(f"reshard {name}", gathered=-BLOCK, gradients=BLOCK)
        following = f"add {names[index + 1]}" if index + 1 < len(names) else _LAST
        for earlier in reduced:
            step.wait(earlier, following)
            step.hold("reduce_scatter", gradients=-BLOCK * (1 - 1 / step.ranks))
        reduced = [step.send("reduce_scatter", name, BLOCK, following)]
    step.wait(reduced[0], _LAST)
    step.hold("reduce_scatter", gradients=-BLOCK * (1 - 1 / step.ranks))


def _record(step: _Step, names: list[str]) -> Record:
    block = (9, 225_443_840, "float32", "bfloat16", round(BLOCK * GIB), 0.0003)
    root = (3, 131_073_024, "float32", "bfloat16", round(ROOT * GIB), 0.012)
    segments = [round(2 * gib * GIB / step.ranks) for gib in (BLOCK, ROOT)]
    buckets = [BucketRow(n, n, *block, segments[0], trained=True, reshard=True) for n in names]
    buckets.append(BucketRow("(root)", "(root)", *root, segments[1], trained=True, reshard=False))
    late = max(step.collectives, key=lambda row: row.exposed)
    finding = Finding(
        "exposed gather",
        f"The all-gather of {late.buckets[0]} makes compute wait {late.exposed / MS:.2f} ms.",
        "Split the unit, so that its first op waits for a smaller bucket, or gather further "
        'ahead: options={"prefetch": 2}.',
    )
    return Record(
        model="Transformer",
        world_size=step.ranks,
        copies=1,
        profile="h100-nvlink",
        settings={"reshard_after_forward": "all but the root", "precision": "bfloat16"},
        buckets=tuple(buckets),
        collectives=tuple(step.collectives),
        ops=tuple(step.ops),
        memory=tuple(step.memory),
        findings=(finding,),
    )
