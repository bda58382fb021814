"""The reads of a Dynamo graph: ranks agree on its buckets and slots, and each call of the compiled
code tells the buckets."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.backend.graph_plan import CompilePlan, distinct_labels
from shardc.backend.recomputed import note_readings
from shardc.runtime import compat
from shardc.runtime.layout.spec import Reduction
from shardc.runtime.unit.accumulate import flush_when_done, waiting_sums
from shardc.runtime.unit.backward_pass import tell_backward
from shardc.runtime.unit.bucket import Bucket, bucket_of
from shardc.runtime.unit.regather import saving_themselves
from shardc.runtime.watch.agreement import Statement, rounds
from shardc.runtime.watch.progress import progress


@dataclass(frozen=True)
class Read:
    """The read of one bucket by a graph: the input that is the segment, and the slots.

    `elsewhere` are slots that only other ranks read: their gradient is zero here, not None.
    `label` is the name of the bucket that the graph was compiled for.
    """

    position: int
    label: str
    slots: frozenset[int]
    elsewhere: frozenset[int]


def agree_on_reads(plan: CompilePlan) -> tuple[list[Read], dist.ProcessGroup | None, bool]:
    """Agree on the buckets that a graph reads, and their order; slots may differ and are united.

    The same buckets read in another mode (gradients wait, no gradients) make another graph, and all
    ranks come to it together. Equal buckets of equal modules make the same graph: where equal
    blocks, or copies of a model, run one graph, a rank may compile it anew while the others do not.
    The union of the slots counts for all of these blocks.

    Returns:
        The reads of this rank; the group whose ranks compared now and so compile together, or None
        where none did, or where the buckets are of several groups; and whether this rank may be the
        only one that compiles, because no group compared now.
    """
    by_group: dict[str, list[tuple[int, Bucket, frozenset[int]]]] = {}
    for position, bucket in plan.buckets.items():
        read = (position, bucket, plan.slots[position])
        by_group.setdefault(bucket.ranks.everyone, []).append(read)
    reads, together = [], set[dist.ProcessGroup]()
    for group, members in by_group.items():
        ranks = compat.resolve_group(group)
        before = rounds(ranks)
        facts = [_reading(bucket) for _, bucket, _ in members]
        note = json.dumps([sorted(slots) for *_, slots in members])
        first = min(bucket.origin for _, bucket, _ in members)
        kept_as = [_reading(bucket, bucket.origin - first) for _, bucket, _ in members]
        stated = Statement("the buckets that a graph reads", facts, note, kept_as=kept_as)
        notes = plan.agreements.agree(group, stated)
        for index, (position, _, slots) in enumerate(members):
            union = frozenset(slot for other in notes for slot in json.loads(other)[index])
            reads.append(Read(position, plan.labels[position], slots, union - slots))
        if rounds(ranks) > before:
            together.add(ranks)
    one = next(iter(together)) if len(together) == len(by_group) == 1 else None
    return reads, one, not together


def _reading(bucket: Bucket, place: int | None = None) -> str:
    """A bucket, and the modes in which it is read. With `place`: any equal bucket there."""
    modes = list(bucket.key.reading_code().extras)
    if not torch.is_grad_enabled():
        modes.append("no gradients")
    text = str(bucket)
    if place is not None:
        holders = [f"{type(m).__module__}.{type(m).__qualname__}" for m in bucket.owner.modules]
        text = f"bucket +{place} of {' '.join(holders)} of {bucket.content}"
    return f"{text}, with {' and '.join(modes)}" if modes else text


# -- around each call of the compiled code -------------------------------------------------------


def telling_buckets(
    compiled: Callable[..., Any], reads: list[Read], given: Sequence[int] = ()
) -> Callable[..., Any]:
    """Wrap compiled code: the backward of each call tells buckets the slots it differentiates.

    The last results of the code are whole buckets, for their buckets to hold; `given` has the
    inputs that are their segments.
    """
    if not reads:
        return compiled

    def run(*args: Any) -> Any:
        buckets = [(bucket_of(args[read.position]), read) for read in reads]
        names = _other_names(buckets)
        progress.next_names = names
        updates = [bucket.updates() for bucket, _ in buckets]
        reductions = [read_from.key.reading_code().reduction for read_from, _ in buckets]
        note_readings(read_from.key for read_from, _ in buckets)
        for read_from in dict.fromkeys(read_from for read_from, _ in buckets):
            read_from.owner.await_updates()
            read_from.gathered.renew()
            read_from.gathered.note_graph()
        with saving_themselves(waiting_sums(read_from for read_from, _ in buckets)):
            outputs = compiled(*args)
        if given:
            outputs, whole = outputs[: -len(given)], outputs[-len(given) :]
            for position, full in zip(given, whole, strict=True):
                bucket = bucket_of(args[position])
                bucket.gathered.keep(full, bucket.version)
        if torch.is_grad_enabled():
            nodes = {out.grad_fn for out in outputs if isinstance(out, Tensor)}
            lent = [read_from.gradients.lend() for read_from, _ in buckets]
            state = list(zip(buckets, updates, reductions, lent, strict=True))
            begin = functools.partial(_begin_backward, [], names, state)
            for node in nodes:
                if node is not None:
                    node.register_prehook(begin)
        return outputs

    return run


_Lent = tuple[Tensor | None, Tensor | None]


@torch.compiler.disable  # compiled autograd would trace it
def _begin_backward(
    begun: list[bool],
    names: dict[str, str],
    state: list[tuple[tuple[Bucket, Read], int, Reduction, _Lent]],
    grads: Any,
) -> None:
    """Tell the buckets of a graph, before the first node of its outputs is differentiated.

    `state` has each read of the graph's forward; the number of updates of the bucket before it, the
    reduction in the graph, and the sums that the graph was given.
    """
    if begun:
        return
    begun.append(True)
    compat.when_backward_ends(begun.clear)
    tell_backward([bucket for (bucket, _), *_ in state])
    flush_when_done([bucket for (bucket, _), _, reduction, _ in state if reduction.sync])
    progress.next_names = names
    for (bucket, read), before, reduction, sums in state:
        bucket.gradients.begin_backward(read.slots, read.elsewhere, reduction, sums)
        if bucket.updates() != before:  # a backward that saved the segment must fail
            torch.autograd.graph.increment_version(bucket.segment)
        if bucket.gathered.is_held and not any(bucket.trainable) and not bucket.gathered.opened:
            compat.when_backward_ends(bucket.end_backward)  # no gradient of it arrives


def _other_names(buckets: list[tuple[Bucket, Read]]) -> dict[str, str]:
    """The labels of a call's buckets, by the labels in the code that equal blocks share."""
    if all(read.label == bucket.label for bucket, read in buckets):
        return {}
    now = distinct_labels({read.position: bucket for bucket, read in buckets})
    return {read.label: now[read.position] for _, read in buckets}
