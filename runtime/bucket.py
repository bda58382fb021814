"""A bucket at run time: this rank's segment, the parameters that are views of it, their gradients.

The segment is the autograd leaf: a graph takes it as its one input for the whole bucket, and its
gradient is one flat tensor. A post-accumulate hook deals that out: every parameter that the
backward used gets its ShardTensor gradient, a view of the flat one, and the hooks users registered
on parameters run then, once, with the reduced gradient. Parameters no graph used keep None, because
zeros would let AdamW decay them.
"""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.layout import BucketLayout
from shardc.runtime.shard_tensor import ShardSpec, ShardTensor
from shardc.runtime.unshard import UnshardSpec, intern_spec, unshard

_serials: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class SlotRef:
    """A parameter's way to its bucket; `value` is what reading the parameter gives a module."""

    def __init__(self, bucket: "Bucket", index: int) -> None:
        self.bucket = bucket
        self.index = index

    @property
    def name(self) -> str:
        """The parameter's name within its unit."""
        return self.bucket.layout.slots[self.index].name

    @compat.inline_only
    def value(self) -> Tensor:
        """A marker under Dynamo, the full tensor in an eager forward, else the ShardTensor."""
        bucket = self.bucket
        if torch.compiler.is_compiling():
            return torch.ops.shardc.unshard_slot(bucket.segment, bucket.signature, self.index)
        if bucket.depth > 0:
            return bucket.gathered()[self.index]
        return bucket.params[self.index]

    def __deepcopy__(self, memo: dict[int, object]) -> "SlotRef":
        return self


class Bucket:
    """One flat bucket of a unit on this rank.

    Attributes:
        layout: the plan, equal on all ranks.
        segment: this rank's part, `(S,)`; the autograd leaf of the whole bucket.
        params: the ShardTensor parameters, one a slot.
        signature: names the code that unshards this bucket (see `unshard`).
        serial: the number of the bucket in its group, equal on all ranks.
        unit: the number of its unit, equal on all ranks.
        owner: its `Unit`.
        gather_group, reduce_group: communicators of its own; None for the mesh's (`group`).
        made: whether any bucket exists in this process.
    """

    made = False

    def __init__(
        self,
        layout: BucketLayout,
        group: str,
        rank: int,
        segment: Tensor,
        unit_modules: Iterable[nn.Module],
    ) -> None:
        Bucket.made = True
        self.serial = next(_serials[group])
        self.layout = layout
        self.group = group
        self.rank = rank
        self.unit_modules = frozenset(unit_modules)
        self.gather_group: str | None = None
        self.reduce_group: str | None = None
        self.unit = -1
        self.owner: Any = None
        self.params: list[nn.Parameter] = []
        self.trainable = (layout.requires_grad,) * len(layout.slots)
        self.reshard_after_forward = True
        self.reduce_op = compat.mean_op(group)
        self.depth = 0
        self._gathered: tuple[Tensor, ...] | None = None
        self._used: set[int] = set()
        self._elsewhere: set[int] = set()
        self._warned = False
        self._specs = tuple(
            ShardSpec(slot.start, slot.numel, layout.segment, rank, layout.world_size, group)
            for slot in layout.slots
        )
        self.set_segment(segment)

    def __str__(self) -> str:
        slots = ", ".join(f"{slot.name}{list(slot.shape)}" for slot in self.layout.slots)
        return f"bucket {self.serial} of {self.layout.numel} {self.segment.dtype}: {slots}"

    # -- the segment and what shapes the graph -----------------------------------------------

    def set_segment(self, segment: Tensor) -> None:
        """Take `segment: (S,)` as the leaf; `take` and `apply` point the parameters to it."""
        self.segment = nn.Parameter(segment, requires_grad=any(self.trainable))
        self.segment.shardc_bucket = self  # type: ignore[attr-defined]
        if self.segment.is_floating_point() or self.segment.is_complex():
            self.segment.requires_grad_(True)
            self.segment.register_post_accumulate_grad_hook(self._on_gradient)
            self.segment.requires_grad_(any(self.trainable))
        self.refresh_signature()

    def refresh_signature(self) -> None:
        """Name the code this bucket needs now; a change recompiles the graphs that use it."""
        layout = self.layout
        self.signature = intern_spec(
            UnshardSpec(
                dtype=self.segment.dtype,
                world_size=layout.world_size,
                group=self.gather_group or self.group,
                pieces=tuple(layout.split_sizes()),
                shapes=tuple(slot.shape for slot in layout.slots),
                trainable=self.trainable,
                reshard_after_forward=self.reshard_after_forward,
                reduce_op=self.reduce_op,
                reduce_group=self.reduce_group,
                hints=self.owner.hints if self.owner is not None else (),
            )
        )

    def set_trainable(self, index: int, flag: bool) -> None:
        """Follow a parameter's `requires_grad` from the next forward on."""
        flags = list(self.trainable)
        flags[index] = flag
        self.trainable = tuple(flags)
        self.segment.requires_grad_(any(flags))
        self.refresh_signature()

    # -- parameters as views of the segment ----------------------------------------------------

    def view(self, index: int, flat: Tensor) -> ShardTensor:
        """Parameter `index` as a view of `flat: (S,)`, the segment or its gradient."""
        layout, slot = self.layout, self.layout.slots[index]
        start, stop = layout.interval(index, self.rank)
        first = slot.start + start - self.rank * layout.segment if stop > start else 0
        return ShardTensor(
            flat.detach()[first : first + stop - start], slot.shape, self.spec(index)
        )

    def spec(self, index: int) -> ShardSpec:
        """Where parameter `index` lies on the ranks."""
        return self._specs[index]

    def cut(self, index: int, full: Tensor) -> ShardTensor:
        """This rank's part of `full`, a tensor of the shape of parameter `index`, as a copy."""
        start, stop = self.layout.interval(index, self.rank)
        part = full.detach().reshape(-1)[start:stop].to(self.segment.device, copy=True)
        return ShardTensor(part, tuple(full.shape), self.spec(index))

    @torch.no_grad()
    def take(self, params: Sequence[nn.Parameter]) -> None:
        """Cut full parameters, one a slot, into the segment; each is freed as soon as it is cut."""
        for index, param in enumerate(params):
            grad = None if param.grad is None else self.cut(index, param.grad)
            if not param.is_meta:
                start, stop = self.layout.interval(index, self.rank)
                self.view(index, self.segment)._local.copy_(param.reshape(-1)[start:stop])
            self._point(param, index, grad)
            self.params.append(param)

    @torch.no_grad()
    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the segment (dtype, device) and point the parameters to the new one."""
        self.set_segment(fn(self.segment.detach()))
        for index, param in enumerate(self.params):
            old = param.grad
            grad = (
                ShardTensor(fn(old._local), tuple(old.shape), old._spec)
                if isinstance(old, ShardTensor)
                else old
            )
            self._point(param, index, grad)

    def _point(self, param: nn.Parameter, index: int, grad: Tensor | None) -> None:
        """Make `param`, the same object, a view of the segment.

        Optimizers and tied modules that hold the object keep holding the parameter.
        """
        sharded = nn.Parameter(self.view(index, self.segment), param.requires_grad)
        own = {"_local", "_spec", "_slot"}
        sharded.__dict__.update({k: v for k, v in param.__dict__.items() if k not in own})
        sharded._slot = SlotRef(self, index)  # type: ignore[attr-defined]
        param.grad = None
        torch.utils.swap_tensors(param, sharded)
        param.grad = grad

    # -- gradients -----------------------------------------------------------------------------

    def updates(self) -> int:
        """Grows with every update that a compiled `opt.step` makes.

        Inductor's kernels write to the local parts without a trace there; AOT autograd then counts
        up the versions of the parameters, not that of the segment.
        """
        return sum(param._version for param in self.params)

    def note_used(self, slots: Iterable[int], elsewhere: Iterable[int] = ()) -> None:
        """A backward that is about to run differentiates `slots`; other ranks `elsewhere` too."""
        self._used.update(slots)
        self._elsewhere.update(elsewhere)

    @torch.no_grad()
    def _on_gradient(self, segment: Tensor) -> None:
        flat, segment.grad = segment.grad, None
        missing = self._elsewhere - self._used
        used = self._used | missing
        self._used, self._elsewhere = set(), set()
        if missing and not self._warned:
            self._warned = True
            names = [self.layout.slots[index].name for index in sorted(missing)]
            warnings.warn(
                f"parameters {names} are used on some ranks but not on rank {self.rank}, whose "
                "part of their gradient counts as zero",
                stacklevel=2,
            )
        if flat is None:  # read, but nothing that was differentiated depends on it
            return
        if self.reduce_op == "sum" and self.layout.world_size > 1:
            flat.div_(self.layout.world_size)
        for index in sorted(used):
            if not self.trainable[index]:
                continue
            param, grad = self.params[index], self.view(index, flat)
            for hook in compat.grad_hooks(param):
                grad = _checked(hook(grad), grad)
            if param.grad is None:
                param.grad = grad
            else:
                param.grad.add_(grad)
            for after in compat.post_accumulate_hooks(param):
                after(param)

    # -- eager reads ---------------------------------------------------------------------------

    @torch.compiler.disable
    def gathered(self) -> tuple[Tensor, ...]:
        """The full parameters, gathered at the first read inside an eager forward."""
        if self._gathered is None:
            compat.resolve_group(self.group)  # says so if it is gone
            # The first read may lie inside `no_grad` or `vmap` and a later one outside: what is
            # cached serves both.
            with compat.outside_function_transforms(), torch.enable_grad():
                self._gathered = unshard(self.segment, self.signature)
            if self.segment.requires_grad:
                _on_backward(self._gathered, self)
        return self._gathered

    def leave(self) -> None:
        """A module that counted itself in `depth` ends; the last one frees what was gathered."""
        self.depth -= 1
        if self.depth == 0:
            self._gathered = None


def _checked(replacement: Tensor | None, grad: ShardTensor) -> ShardTensor:
    """A gradient hook's result, as autograd takes it."""
    if replacement is None:
        return grad
    if not isinstance(replacement, ShardTensor):
        raise TypeError(
            f"a hook on a sharded parameter returned {type(replacement).__name__} of shape "
            f"{tuple(replacement.shape)}; return a ShardTensor (compute with the gradient given)"
        )
    return replacement


def _on_backward(views: Sequence[Tensor], bucket: Bucket) -> None:
    """Note each full parameter as used when its own gradient is computed."""
    for index, view in enumerate(views):
        if view.requires_grad:
            view.register_hook(
                lambda grad, index=index: None if grad is None else bucket.note_used([index])
            )
