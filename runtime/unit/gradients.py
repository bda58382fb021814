"""A bucket's reduced gradient, dealt out to its parameters.

A backward first notes the slots that it differentiates, then computes the gradient of the segment,
a flat tensor. The parameter of each noted slot gets its part as a ShardTensor, through the hooks
that users registered on the parameter. An unused parameter keeps None: with zeros AdamW would decay
it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.telling import warn
from shardc.runtime.comm import host_copies
from shardc.runtime.comm.unshard import reduce, split_full
from shardc.runtime.layout.spec import Reduction
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import wrapped
from shardc.runtime.unit.accumulate import Accumulated
from shardc.runtime.unit.backward_pass import parts_of
from shardc.runtime.unit.params import cut, views
from shardc.runtime.unit.parts import Parts
from shardc.runtime.unit.selection import is_selected, runs_hooks

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket


@dataclass
class _Expected:
    """The gradient that a running backward will compute, by the code of its forward.

    Attributes:
        reduction: the reduction in that code.
        used, elsewhere: the slots that the backward differentiates, here, and on other ranks only.
    """

    reduction: Reduction
    used: set[int] = field(default_factory=set)
    elsewhere: set[int] = field(default_factory=set)


class Gradients:
    """The way of one bucket's gradient from a backward to the parameters.

    Attributes:
        waiting: gradients that wait to be reduced.
        delivers: whether parameters are given their gradients now.
    """

    def __init__(self, bucket: "Bucket") -> None:
        self.bucket = bucket
        self.waiting = Accumulated(bucket)
        # By the number of a backward: a reentrant checkpoint runs one backward inside another.
        self._expected: dict[int, _Expected] = {}
        self.delivers = False
        self._warned = False

    def begin_backward(
        self,
        slots: Iterable[int],
        elsewhere: Iterable[int],
        reduction: Reduction,
        lent: Sequence[Tensor | None],
    ) -> None:
        """Note the slots that the backward of a graph differentiates, before the backward runs.

        Args:
            slots, elsewhere: the slots that the graph reads, here, and on other ranks only.
            reduction: the reduction in the graph.
            lent: the sums that the graph was given, (pending, partial).

        Raises:
            RuntimeError: a graph of the same backward reduces gradients in another way.
        """
        waiting = self.waiting
        before, others_before = waiting.hand_over(*lent)
        both = before.union(slots), others_before.union(elsewhere)
        used, others = ({i for i in each if is_selected(self.bucket, i)} for each in both)
        if not reduction.sync:
            waiting.used |= used
            waiting.elsewhere |= others
        elif used or others:
            expected = self._expect(reduction)
            expected.used |= used
            expected.elsewhere |= others

    def _expect(self, reduction: Reduction) -> _Expected:
        number = compat.backward_number()
        expected = self._expected.get(number)
        if expected is None:
            expected = self._expected[number] = _Expected(reduction)

            def forget() -> None:  # `receive` is not called for a segment without gradient
                self._expected.pop(number, None)

            compat.when_backward_ends(forget)
        elif _completion(expected.reduction) != _completion(reduction):
            raise RuntimeError(
                f"one backward differentiates two forwards of bucket {self.bucket.label!r}, and "
                "set_requires_all_reduce or set_gradient_divide_factor was called between the "
                "forwards: their gradients would be added up and reduced in one way. Call backward "
                "for each loss, or call the setter before both forwards"
            )
        return expected

    def lend(self) -> tuple[Tensor | None, Tensor | None]:
        """Lend gradients that wait, (pending, partial), to the running forward and to no other."""
        waiting = self.waiting
        if waiting.is_empty:
            return None, None
        reduction = self.bucket.key.code.reduction
        lent = (
            waiting.pending if reduction.pending else None,
            waiting.partial if reduction.partial else None,
        )
        if reduction.pending or reduction.partial:
            waiting.take()
        return lent

    def unreduced(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """The unreduced gradient of the full parameter `index`, in this dtype; None if none waits.

        A gradient that waits in this dtype is given as an alias: a write changes the reduced
        gradient.
        """
        waiting, bucket = self.waiting, self.bucket
        if waiting.pending is None or index not in waiting.used:
            return None
        part = split_full(waiting.pending, bucket.key.code)[index].to(dtype)
        return wrapped(part, bucket.placed[index])

    @torch.no_grad()
    def flush(self) -> None:
        """Reduce gradients that wait and that no backward took. Every rank must call it."""
        waiting, layout = self.waiting, self.bucket.layout
        if waiting.is_empty or not self.bucket.settings.sync:
            return
        is_lent = waiting.taken
        waiting.take(False)
        spec = self.bucket.key.code
        if waiting.pending is not None:
            flat = waiting.pending.clone() if is_lent else waiting.pending  # `hand_over` writes
            part = reduce(flat, spec, waiting.partial, self.bucket.segment)
        elif spec.reduction.all_reduce:
            nothing = torch.zeros(
                layout.numel, dtype=spec.reduction.dtype, device=self.bucket.device
            )
            part = reduce(nothing, spec, waiting.partial, self.bucket.segment)
        else:
            return
        used, elsewhere = waiting.used, waiting.elsewhere
        waiting.clear()
        self.deliver(part, spec.reduction, used, elsewhere)

    @torch.no_grad()
    def receive(self, segment: Tensor) -> None:
        """Take the gradient that a backward computed: the hook of the segment.

        Autograd calls it after the last node that has the segment as an input: graphs, whose
        gradients it has added up in `segment.grad`, and eager reads, which give it none.
        """
        part, segment.grad = segment.grad, None
        parts = parts_of(self.bucket)
        if parts is not None:
            parts.is_last = True
        expected = self._expected.pop(compat.backward_number(), None)
        if expected is None:  # nobody noted a graph: the user differentiates the segment
            expected = _Expected(self.bucket.key.code.reduction)
        if part is not None:  # None: read by no graph, or not differentiated
            self.deliver(part, expected.reduction, expected.used, expected.elsewhere)
            self.bucket.end_backward()
        elif parts is not None:
            self.give(parts)

    def deliver(
        self,
        part: Tensor,
        reduction: Reduction,
        used: set[int],
        elsewhere: set[int],
        eager: bool = False,
    ) -> None:
        """Deal the result of a reduction, `(S,)`, out to the parameters that a rank used.

        A gradient on its way to the host is dealt out when the backward ends.

        Args:
            eager: whether an eager read gave the gradient; the backward pass has counted the part.
        """
        parts = parts_of(self.bucket) or Parts(is_last=True)
        if not eager:
            parts.under_way += 1
        arriving = host_copies.arriving(self.bucket.segment, part)
        if not arriving:
            self._deal_out(parts, part, reduction, used, elsewhere)
            return

        def deal_out() -> None:
            first, *others = (arrival.wait() for arrival in arriving)
            for other in others:
                first.add_(other)
            with torch.no_grad():
                self._deal_out(parts, first, reduction, used, elsewhere)

        if compat.in_backward():
            compat.when_backward_ends(deal_out)
        else:
            deal_out()

    def _deal_out(
        self,
        parts: Parts,
        part: Tensor,
        reduction: Reduction,
        used: set[int],
        elsewhere: set[int],
    ) -> None:
        """Add a part whose values are there, or keep it for an all-reduce over copies."""
        settings = self.bucket.settings
        parts.under_way -= 1
        if not reduction.all_reduce:
            self.waiting.used |= used
            self.waiting.elsewhere |= elsewhere
            self.waiting.keep_partial(part)
            self.give(parts)
            return
        if reduction.divide_later != 1:
            part.div_(reduction.divide_later)
        if settings.precision.keep_low_precision_grads:
            _, reduced = settings.dtypes(self.bucket.segment.dtype, evaluating=False)
            part = part.to(reduced)
        parts.add(part, used, elsewhere)
        self.give(parts)

    def give(self, parts: Parts) -> None:
        """Give the parameters the sum of all parts, unless parts are missing.

        In an eager backward ranks do not exchange the slots that they used: if the gradient of a
        slot that this rank did not use is not zero, another rank used the slot.
        """
        taken = parts.take()
        if taken is None:
            return
        whole, used, elsewhere = taken
        bucket, settings = self.bucket, self.bucket.settings
        trained = [
            index
            for index, is_trained in enumerate(bucket.trainable)
            if is_trained and is_selected(bucket, index)
        ]
        grads = views(bucket, whole, trained)
        missing = (elsewhere - used) & set(grads)
        if settings.reduce_unused:
            used = set(grads)
        elif parts.is_eager:
            missing |= _not_zero({i: grads[i] for i in set(grads) - used})
        self._warn_of(missing - used)
        self.delivers = True
        try:
            for index in sorted((used | missing) & set(grads)):
                self._give(index, grads[index])
        finally:
            self.delivers = False

    def _warn_of(self, missing: set[int]) -> None:
        """Warn once of slots that only other ranks use."""
        if missing and not self._warned:
            self._warned = True
            names = [self.bucket.layout.slots[index].name for index in sorted(missing)]
            rank = self.bucket.ranks.rank
            warn(
                f"parameters {names} are used on some ranks but not on rank {rank}, "
                "whose part of their gradient counts as zero"
            )

    def _give(self, index: int, grad: ShardTensor) -> None:
        """Add `grad` to parameter `index`, through the hooks that users registered on it."""
        param = self.bucket.params[index]
        if grad.dtype != param.dtype:
            compat.leave_gradient_dtype(param)
        for hook in compat.grad_hooks(param):
            grad = _checked(hook(grad), grad)
        if param.grad is not None and not isinstance(param.grad, ShardTensor):
            param.grad = cut(self.bucket, index, param.grad)  # full: the user assigned it
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)
        for after in compat.post_accumulate_hooks(param) if runs_hooks() else ():
            after(param)

    def reset(self) -> None:
        """Forget an interrupted backward."""
        self._expected.clear()
        self.waiting.clear()


def _completion(reduction: Reduction) -> tuple[bool, float]:
    """The work that the bucket does once a graph has reduced a gradient."""
    return reduction.all_reduce, reduction.divide_later


def _not_zero(grads: dict[int, ShardTensor]) -> set[int]:
    """The slots of `grads` with a value other than zero; the host waits for the device at most
    once."""
    if not grads:
        return set()
    known = torch.stack([grad._local.any() for grad in grads.values()]).tolist()
    return {index for index, any_value in zip(grads, known, strict=True) if any_value}


def _checked(replacement: Tensor | None, grad: ShardTensor) -> ShardTensor:
    """The result of a gradient hook; `grad` if the hook returned None."""
    if replacement is None:
        return grad
    if not isinstance(replacement, ShardTensor):
        raise TypeError(
            f"a hook on a sharded parameter returned {type(replacement).__name__} of shape "
            f"{tuple(replacement.shape)}; return a ShardTensor (compute with the gradient given)"
        )
    return replacement
