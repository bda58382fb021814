"""Memory budgets of random models: whether they are kept, and how exact plans are.

    python benchmarks/budgets_kept.py --cases 200

A case draws a model: width, depth, vocabulary, batch, kind of blocks, which of them are
checkpointed, the loss (inside of the model, outside, in chunks, in checkpointed chunks), a tied
head, `reshard_after_forward`; and a budget between the leanest plan and that in which all stays
gathered and nothing is computed again. A step runs through Inductor, as one rank of an emulated
wire (`wire.py`). Its peak is that of all allocations while graphs run, segments included; a loss
outside of the model is not part of them.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import peers
import torch
import torch.nn.functional as F
import wire
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.backend.graph_plan import CompilePlan, graph_plans, joint_listeners
from shardc.passes.budget.choose import BudgetTooSmall, choose_kept
from shardc.passes.budget.trial import run_trial
from shardc.passes.context import Kept, PassContext

WORLD = 8
EXACT = 0.02
"""Plans are wished to be within this share of the peak."""


def main() -> None:
    """Run the cases and print a line each, then how many budgets were kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--cases", type=int, default=200, help="how many (default 200)")
    add("--first", type=int, default=0, help="number of the first one (default 0)")
    add("--seed", type=int, default=0, help="cases are drawn from it and their number (default 0)")
    add("--no-kernels", action="store_true",
        help="compile no C++: kernels do nothing, what is allocated stays the same")  # fmt: skip
    given = parser.parse_args()
    if given.no_kernels:
        AsyncCompile.cpp_pybinding = lambda *_: lambda *_: None
    torch.set_num_threads(1)
    _, mesh = wire.join(WORLD, 0.0005, 0.5e9)
    outcomes: list[Outcome] = []
    for number in range(given.first, given.first + given.cases):
        case, start = Case.drawn(random.Random(f"{given.seed} {number}")), time.monotonic()
        outcomes.append(outcome := measure(case, mesh))
        print(f"{number}: {outcome}, {time.monotonic() - start:.0f} s; {case}", flush=True)
    exact = [outcome.planned / outcome.peak for outcome in outcomes]
    kept = sum(outcome.is_kept for outcome in outcomes)
    near = sum(abs(ratio - 1) <= EXACT for ratio in exact)
    print(
        f"{len(outcomes)} models: {kept} budgets kept, {len(outcomes) - kept} exceeded; planned / "
        f"peak {statistics.median(exact):.3f} ({min(exact):.3f} to {max(exact):.3f}), {near} "
        f"within {EXACT:.0%}; peak / budget at most {max(o.peak / o.budget for o in outcomes):.3f}"
    )


@dataclass(frozen=True)
class Case:
    """A model, its batch and where its budget lies.

    Attributes:
        gated: blocks with RMSNorm and a gated MLP, not those of `peers`.
        checkpointed: the first of so many blocks are computed again.
        loss: "inside" of the model, "outside", "chunks", or "checkpointed chunks" of the batch.
        chunks: how many.
        reshard: `reshard_after_forward` of the blocks.
        share: the budget, 0 as the leanest plan, 1 as that which needs most.
    """

    width: int
    heads: int
    depth: int
    vocab: int
    batch: int
    length: int
    gated: bool
    checkpointed: int
    loss: str
    chunks: int
    tied: bool
    reshard: bool | None
    share: float

    @classmethod
    def drawn(cls, draw: random.Random) -> "Case":
        """A random one."""
        heads, depth = draw.choice((2, 4, 8)), draw.randint(1, 4)
        return cls(
            width=heads * draw.choice((16, 32, 48)),
            heads=heads,
            depth=depth,
            vocab=draw.choice((100, 512, 1000, 2048, 4096, 8192)),
            batch=draw.randint(2, 8),
            length=draw.choice((32, 64, 96, 128)),
            gated=draw.random() < 0.5,
            checkpointed=draw.choice((0, 0, draw.randint(1, depth), depth)),
            loss=draw.choice(("inside", "inside", "outside", "chunks", "checkpointed chunks")),
            chunks=draw.choice((2, 4)),
            tied=draw.random() < 0.4,
            reshard=draw.choice((None, None, True, False)),
            share=draw.choice((0.0, *(round(draw.random(), 2) for _ in range(5)))),
        )

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Outcome:
    """Bytes of the budget, of the plan and of the measured peak."""

    budget: int
    planned: int
    peak: int

    @property
    def is_kept(self) -> bool:
        """Whether the peak is within the budget."""
        return self.peak <= self.budget

    def __str__(self) -> str:
        return (
            f"{'kept' if self.is_kept else 'EXCEEDED'}, budget {self.budget / 1e6:.2f} MB, peak "
            f"{self.peak / self.budget:.3f} of it, planned / peak {self.planned / self.peak:.3f}"
        )


def measure(case: Case, mesh: DeviceMesh) -> Outcome:
    """Compile a case for its budget, and measure a step."""
    torch.manual_seed(0)
    model = Model(case)
    for block in model.blocks:
        shardc.fully_shard(block, mesh=mesh, reshard_after_forward=case.reshard)
    shardc.fully_shard(model, mesh=mesh)
    tokens = torch.randint(case.vocab, (case.batch, case.length))
    torch._dynamo.reset()
    graph_plans.clear()
    budgets: list[int] = []

    def draw(gm: torch.fx.GraphModule, ctx: PassContext, plan: CompilePlan) -> None:
        budgets.append(nbytes := _drawn(gm, ctx, case.share))
        assert ctx.budget is not None
        object.__setattr__(ctx, "budget", replace(ctx.budget, nbytes=nbytes))  # of a graph, frozen
        plan.options = replace(plan.options, memory_budget=nbytes)

    options = {"optimizer_states": 0, "memory_budget": 1}
    step = torch.compile(model, backend="shardc", fullgraph=True, options=options)

    def run() -> None:
        out = step(tokens)
        if case.loss == "outside":
            out = loss_of(out, tokens)
        out.backward()

    with _listening(draw):
        run()
    run()
    model.zero_grad()
    static = sum(parameter.to_local().nbytes for parameter in model.parameters())
    peak = static + tokens.nbytes + _peak_of_graphs(run)
    return Outcome(budgets[0], max(plan.peak for plan in graph_plans), peak)


def _drawn(gm: torch.fx.GraphModule, ctx: PassContext, share: float) -> int:
    """A budget between the least that would do and that in which all stays, in bytes."""
    assert ctx.budget is not None
    whole = Kept(ctx.open_positions, ctx.open_positions)
    most = ctx.budget.needed(run_trial(gm, ctx, whole).peak)
    try:
        choose_kept(gm, ctx)
    except BudgetTooSmall as error:
        return error.least + int(share * max(most - error.least, 0))
    raise AssertionError("a budget of one byte is enough")


@contextmanager
def _listening(look: Callable[..., None]) -> Iterator[None]:
    joint_listeners.append(look)
    try:
        yield
    finally:
        joint_listeners.remove(look)


def _peak_of_graphs(run: Callable[[], None]) -> int:
    """The most bytes that are there while a compiled graph runs, beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    calls = [e for e in events if e.name().startswith("## Call CompiledFxGraph")]
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in calls]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for at, nbytes in changes:
        held += nbytes
        if any(start <= at <= end for start, end in spans):
            peak = max(peak, held)
    return peak


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """`logits: (batch, length, vocab)`, `targets: (batch, length)` -> the mean of losses `()`."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GatedBlock(nn.Module):
    """A pre-norm block with RMSNorm and a gated MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x: (batch, length, dim)` -> the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        heads = (each.transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class Model(nn.Module):
    """Embedding, blocks, norm and head of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        block = GatedBlock if case.gated else peers.Block
        self.case = case
        self.embedding = nn.Embedding(case.vocab, case.width)
        self.blocks = nn.ModuleList(block(case.width, case.heads) for _ in range(case.depth))
        self.norm = nn.RMSNorm(case.width) if case.gated else nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocab, bias=False)
        if case.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens: (batch, length)` -> the loss `()`, or logits `(batch, length, vocab)`."""
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            again = number < self.case.checkpointed
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        x = self.norm(x)
        if self.case.loss == "outside":
            logits: Tensor = self.head(x)
            return logits
        if self.case.loss == "inside":
            return loss_of(self.head(x), tokens)
        parts = zip(x.chunk(self.case.chunks), tokens.chunk(self.case.chunks), strict=True)
        return torch.stack([self._loss_of_chunk(*part) for part in parts]).mean()

    def _loss_of_chunk(self, x: Tensor, targets: Tensor) -> Tensor:
        if self.case.loss == "chunks":
            return loss_of(self.head(x), targets)
        again = checkpoint(lambda x: loss_of(self.head(x), targets), x, use_reentrant=False)
        assert isinstance(again, Tensor)
        return again


if __name__ == "__main__":
    main()
