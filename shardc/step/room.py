"""The memory that budgets of compiled graphs leave for buckets that a step keeps gathered.

A graph was planned to stay within its budget by itself. A bucket that stays gathered around it
takes its bytes in addition, except where the graph holds the bucket anyway.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardc.backend.graph_plan import GraphPlan, graph_plans
from shardc.passes.context import Budget
from shardc.runtime.checks.words import format_bytes, some
from shardc.runtime.unit.bucket import Bucket


@dataclass(frozen=True)
class Room:
    """The graphs of a step that were compiled within a memory budget.

    Attributes:
        graphs: their plans, each with its budget.
        gradients: bytes of the gradients that an update reads.
        waiting: bytes of gradients of earlier micro-batches, which are there while graphs run.
    """

    graphs: tuple[tuple[GraphPlan, Budget], ...]
    gradients: int
    waiting: int = 0

    @staticmethod
    def beside(buckets: Sequence[Bucket], waiting: int = 0) -> "Room":
        """The room beside the graphs that read some of `buckets`, and beside gradients that wait.

        Of graphs that read the same buckets, those count that have the budget of the last one.
        """
        own, latest = set(buckets), dict[frozenset[Bucket], object]()
        found = list[tuple[frozenset[Bucket], GraphPlan]]()
        for plan in graph_plans:
            alive = (reference() for reference in plan.buckets)
            read = frozenset(bucket for bucket in alive if bucket is not None)
            if read & own:
                found.append((read, plan))
                latest[read] = plan.options.memory_budget
        plans = [plan for read, plan in found if plan.options.memory_budget == latest[read]]
        graphs = tuple((plan, plan.budget) for plan in plans if plan.budget is not None)
        return Room(graphs, waiting_bytes(buckets), waiting)

    def left(self, kept: Iterable[Bucket] = (), renewed: Iterable[Bucket] = ()) -> int | None:
        """The bytes that are left if buckets stay gathered; None without a budget.

        Args:
            kept: the buckets that stay gathered.
            renewed: those of them that are gathered again at the end of the step, beside their old
                values.
        """
        peaks = self._peaks(kept, renewed)
        return min((budget.room - peak for budget, peak in peaks), default=None)

    def has(self, kept: Iterable[Bucket], renewed: Iterable[Bucket] = ()) -> bool:
        """Whether there is room for buckets that stay gathered."""
        left = self.left(kept, renewed)
        return left is None or left >= 0

    def words(
        self,
        left: int,
        out: Mapping[str, Sequence[Bucket]],
        kept: Sequence[Bucket],
        ahead: bool = False,
    ) -> str:
        """Why buckets do not stay gathered, and the way out.

        Args:
            left: the bytes that are left on the rank with the fewest.
            out: the buckets that do not, by the name of their unit or their own.
            kept: the buckets that stay gathered.
            ahead: whether buckets are gathered at the end of the step.
        """
        every = [bucket for buckets in out.values() for bucket in buckets]
        beside = " and the gradients of earlier micro-batches" if self.waiting else ""
        text = (
            f"within memory_budget, compiled graphs{beside} leave {format_bytes(max(0, left))} at "
            f"their planned peak, so these do not stay gathered: {some(list(out), 3)} "
            f"({format_bytes(sum(map(gathered_bytes, every)))})"
        )
        if not self.graphs:
            return text
        needs = {f"{name} alone": self._needed(buckets, ahead) for name, buckets in out.items()}
        if kept:
            needs = {"all of them": self._needed([*kept, *every], ahead)}
        name = min(needs, key=lambda name: needs[name][0])
        least, budget = needs[name]
        return (
            f"{text}; {name} would fit into memory_budget={budget.shown(least)} (of {budget} now), "
            "or use smaller units or a smaller batch"
        )

    def _needed(self, kept: Sequence[Bucket], ahead: bool) -> tuple[int, Budget]:
        """The least budget with room for buckets, and the budget that there is."""
        peaks = self._peaks(kept, kept if ahead else ())
        return max(((b.needed(peak), b) for b, peak in peaks), key=lambda each: each[0])

    def _peaks(self, kept: Iterable[Bucket], renewed: Iterable[Bucket]) -> list[tuple[Budget, int]]:
        """The budget of each graph, and the bytes that the graph would hold at its peak."""
        held = Counter[str]()
        for bucket in kept:
            held[bucket.label] += gathered_bytes(bucket)
        again = sum(map(gathered_bytes, renewed))
        update = self.gradients + 2 * again if again else 0
        return [
            (budget, max(update, self.waiting + max(plan.liveness.live_with(held), default=0)))
            for plan, budget in self.graphs
        ]


def waiting_bytes(buckets: Iterable[Bucket], reduce_once: bool = False) -> int:
    """The bytes of the gradients of earlier micro-batches, which wait to be reduced or updated."""
    return sum(
        bucket.layout.numel * (bucket.key.code.reduction.dtype or bucket.segment.dtype).itemsize
        if reduce_once
        else bucket.segment.nbytes
        for bucket in buckets
        if any(bucket.trainable)
    )


def gathered_bytes(bucket: Bucket) -> int:
    """The bytes of a bucket, gathered."""
    return bucket.layout.numel * bucket.key.code.compute_dtype.itemsize
