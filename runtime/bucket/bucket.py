"""A bucket at run time: this rank's segment, and the parameters that are views of it.

The segment is the autograd leaf: a graph takes it as its one input for the whole bucket, and its
gradient is one flat tensor, which a hook deals out to the parameters (`gradients`). What is
gathered outside of graphs is in `eager.full_parameters`.

What a bucket's code looks like follows from the settings of its unit and from what waits in it: the
spec, whose signature every read of a parameter carries.
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardc.runtime import compat
from shardc.runtime.bucket.bucket_spec import spec_for
from shardc.runtime.bucket.gradients import Gradients
from shardc.runtime.bucket.settings import Settings
from shardc.runtime.comm.ranks import Ranks
from shardc.runtime.eager.full_parameters import Gathered
from shardc.runtime.eager.weak_hooks import weak_hook
from shardc.runtime.layout.layout import BucketLayout
from shardc.runtime.layout.padding import padding_value
from shardc.runtime.layout.spec import UnshardSpec, intern_spec, spec_of
from shardc.runtime.tensor.shard_tensor import ShardSpec, ShardTensor
from shardc.runtime.tensor.tensor_parallel import Placed, local_value

if TYPE_CHECKING:
    from shardc.runtime.bucket.unit import Unit

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
            signature, extras = bucket.reading()
            full = torch.ops.shardc.unshard_slot(bucket.segment, signature, self.index, extras)
            placed = bucket.placed[self.index]
            return full if placed is None else placed.wrap(full)
        if bucket.gathered.is_readable:
            return bucket.gathered.read(self.index)
        return bucket.params[self.index]

    def __deepcopy__(self, memo: dict[int, object]) -> "SlotRef":
        bucket = memo.get(id(self.bucket))  # of the unit that is being copied, if one is
        return SlotRef(bucket, self.index) if isinstance(bucket, Bucket) else self


class Bucket:
    """One flat bucket of a unit on this rank.

    Attributes:
        layout: the plan, equal on all ranks.
        ranks: who shares it.
        settings: those of its unit.
        segment: this rank's part, `(S,)`; the autograd leaf of the whole bucket.
        params: the ShardTensor parameters, one a slot.
        placed: how each lies on a tensor-parallel mesh, if it does.
        gathered: its full parameters, where they are at hand.
        gradients: what becomes of its gradient.
        code: the spec of the code that unshards it now.
        serial: the number of the bucket in its group, equal on all ranks.
        unit: its `Unit`, once it is made.
        gather_group, reduce_group: communicators of its own; None for the mesh's (`group`).
        summoned: whether modules hold ordinary parameters in the place of `params`.
        made: whether any bucket exists in this process.
    """

    made = False

    def __init__(
        self,
        layout: BucketLayout,
        ranks: Ranks,
        settings: Settings,
        segment: Tensor,
        unit_modules: Iterable[nn.Module],
        device: torch.device | None = None,
        placed: Sequence[Placed | None] | None = None,
    ) -> None:
        Bucket.made = True
        self.placed = tuple(placed or (None,) * len(layout.slots))
        self.layout = layout
        self.ranks = ranks
        self.settings = settings
        self.group = ranks.shard
        self.rank = ranks.rank
        self.serial = next(_serials[ranks.everyone])
        self.unit_modules = weakref.WeakSet(unit_modules)
        self.device = device or segment.device
        self.gather_group: str | None = None
        self.reduce_group: str | None = None
        self.unit: Unit | None = None
        self.params: list[nn.Parameter] = []
        self.trainable = (layout.requires_grad,) * len(layout.slots)
        self.gathered = Gathered(self)
        self.gradients = Gradients(self)
        self.summoned = False
        self.mean_op = compat.mean_op(ranks.shard, self.device.type)
        self._specs = tuple(
            ShardSpec(
                slot.start,
                slot.numel,
                layout.segment,
                self.rank,
                layout.world_size,
                self.group,
                tp,
            )
            for slot, tp in zip(layout.slots, self.placed, strict=True)
        )
        self.set_segment(segment)

    def __str__(self) -> str:
        unit = f" ({self.label})" if self.unit is not None else ""
        size = f"{self.layout.numel} {self.segment.dtype}"
        return f"bucket {self.serial}{unit} of {size}: {self.layout.contents}"

    @property
    def owner(self) -> "Unit":
        """Its unit, which has been made."""
        assert self.unit is not None
        return self.unit

    # -- the segment and what shapes the graph -----------------------------------------------

    def set_segment(self, segment: Tensor) -> None:
        """Take `segment: (S,)` as the leaf; `take` and `apply` point the parameters to it."""
        self.gathered.drop()
        self.segment = nn.Parameter(segment, requires_grad=any(self.trainable))
        if not self.settings.offloaded:
            self.device = segment.device
        self.segment.shardc_bucket = weakref.ref(self)  # type: ignore[attr-defined]
        if self.segment.is_floating_point() or self.segment.is_complex():
            self.segment.requires_grad_(True)
            self.segment.register_post_accumulate_grad_hook(weak_hook(self.gradients.receive))
            self.segment.requires_grad_(any(self.trainable))
        self.refresh_signature()

    def refresh_signature(self) -> None:
        """Name the code this bucket needs now; a change recompiles the graphs that use it."""
        self.code = spec_for(self)
        self._train = self._reading(self.code)
        self._eval = self._reading(spec_for(self, evaluating=True))

    def _reading(self, code: UnshardSpec) -> tuple[str, list[Tensor]]:
        waiting = self.gradients.waiting
        values = {
            "full": self.gathered.held,
            "sink": waiting.sink,
            "pending": waiting.pending,
            "partial": waiting.partial,
        }
        return intern_spec(code), [values[name] for name in code.extras]  # type: ignore[misc]

    def reading(self) -> tuple[str, list[Tensor]]:
        """What a read needs now: the signature of its code, and what that is given."""
        if not self.settings.precision.full_precision_in_eval:
            return self._train
        return self._train if self.owner.training else self._eval

    def reading_code(self) -> UnshardSpec:
        """The spec of the code that a read needs now."""
        return spec_of(self.reading()[0])

    @property
    def version(self) -> object:
        """Differs after any write to the parameters."""
        return self.segment._version, self.updates()

    @property
    def label(self) -> str:
        """The unit's name, for messages; with its number where the unit has several buckets."""
        buckets = self.owner.buckets
        return self.owner.name + (f"[{buckets.index(self)}]" if len(buckets) > 1 else "")

    @property
    def reshard_after_forward(self) -> bool:
        """Whether the gathered bucket is freed after the forward."""
        return bool(self.settings.reshard_after_forward)

    def set_trainable(self, index: int, flag: bool) -> None:
        """Follow a parameter's `requires_grad` from the next forward on."""
        flags = list(self.trainable)
        flags[index] = flag
        self.trainable = tuple(flags)
        self.segment.requires_grad_(any(flags))
        self.refresh_signature()

    def updates(self) -> int:
        """Grows with every update that a compiled `opt.step` makes.

        Inductor's kernels write to the local parts without a trace there; AOT autograd then counts
        up the versions of the parameters, not that of the segment.
        """
        return sum(param._version for param in self.params)

    def end_backward(self) -> None:
        """A backward has differentiated the bucket: free it, or keep it for the next step."""
        if not self.settings.reshard_after_backward:
            self.gathered.hold()
        else:
            self.gathered.drop()

    def reset(self) -> None:
        """Forget a step that was interrupted."""
        self.gathered.reset()
        self.gradients.reset()
        self.refresh_signature()

    # -- parameters as views of the segment ----------------------------------------------------

    def view(self, index: int, flat: Tensor) -> ShardTensor:
        """Parameter `index` as a view of `flat: (S,)`, the segment or its gradient."""
        layout, slot = self.layout, self.layout.slots[index]
        start, stop = layout.interval(index, self.rank)
        first = slot.start + start - self.rank * layout.segment if stop > start else 0
        part = flat.detach()[first : first + stop - start]
        return ShardTensor(part, self._shape(index), self.spec(index))

    def _shape(self, index: int) -> tuple[int, ...]:
        """The shape that users see; a slot has that of the local value of a DTensor."""
        placed = self.placed[index]
        return self.layout.slots[index].shape if placed is None else placed.shape

    def spec(self, index: int) -> ShardSpec:
        """Where parameter `index` lies on the ranks."""
        return self._specs[index]

    def cut(self, index: int, full: Tensor) -> ShardTensor:
        """This rank's part of `full`, a tensor of the shape of parameter `index`, as a copy."""
        start, stop = self.layout.interval(index, self.rank)
        placed = self.placed[index]
        local = full.detach() if placed is None else placed.local_of(full)
        part = local.reshape(-1)[start:stop].to(self.segment.device, copy=True)
        return ShardTensor(part, tuple(full.shape), self.spec(index))

    @torch.no_grad()
    def take(self, params: Sequence[nn.Parameter], filled: bool = False) -> None:
        """Cut full parameters, one a slot, into the segment; each is freed as soon as it is cut.

        If the segment is `filled`, it has the values already. DTensors are not freed here:
        `self.params` has other objects for them.
        """
        for index, param in enumerate(params):
            grad = None if param.grad is None else self.cut(index, param.grad)
            if not param.is_meta and not filled:
                start, stop = self.layout.interval(index, self.rank)
                part = self.view(index, self.segment)._local
                part.copy_(local_value(param).reshape(-1)[start:stop])
            self.params.append(self._point(param, index, grad))

    @torch.no_grad()
    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Convert the segment (dtype, device) and point the parameters to the new one."""
        segment = fn(self.segment.detach())
        if self.segment.is_meta and not segment.is_meta:  # no value yet, so no padding either
            segment.fill_(padding_value(segment.dtype))
        self.set_segment(segment)
        for index, param in enumerate(self.params):
            old = param.grad
            grad = (
                ShardTensor(fn(old._local), tuple(old.shape), old._spec)
                if isinstance(old, ShardTensor)
                else old
            )
            self._point(param, index, grad)

    def make_param(self, index: int, like: nn.Parameter) -> nn.Parameter:
        """Parameter `index`, a view of the segment, with the flag and attributes of `like`."""
        sharded = nn.Parameter(self.view(index, self.segment), like.requires_grad)
        own = {"_local", "_spec", "_slot"}
        sharded.__dict__.update({k: v for k, v in like.__dict__.items() if k not in own})
        sharded._slot = SlotRef(self, index)  # type: ignore[attr-defined]
        return sharded

    @torch.no_grad()
    def adopt(self, index: int, param: nn.Parameter) -> None:
        """Have `param`, whole and of the slot's shape, be parameter `index`: cut it, in place.

        The parameter that it replaces keeps its values and is no part of the bucket any more.
        """
        old = self.params[index]
        value, grad = param.detach(), None if param.grad is None else self.cut(index, param.grad)
        left = old.to_local().clone()  # type: ignore[attr-defined]
        old.copy_(value)
        self.params[index] = self._point(param, index, grad)
        old._local = left  # type: ignore[attr-defined]
        del old._slot  # type: ignore[attr-defined]
        if param.requires_grad != self.trainable[index]:
            self.set_trainable(index, param.requires_grad)

    def _point(self, param: nn.Parameter, index: int, grad: Tensor | None) -> nn.Parameter:
        """Make `param`, the same object, a view of the segment.

        Optimizers and tied modules that hold the object keep holding the parameter. A DTensor has
        another layout in memory and stays what it is; it remembers what it became.
        """
        sharded = self.make_param(index, param)
        if isinstance(param, DTensor):
            param._shardc_became = sharded  # type: ignore[attr-defined]
            sharded.grad = grad
            return sharded
        param.grad = None
        compat.swap_tensors(param, sharded)
        param.grad = grad
        return param


def bucket_of(segment: Tensor) -> Bucket:
    """The bucket of a segment, which something else must hold: a module, a parameter, a graph."""
    bucket: Bucket | None = segment.shardc_bucket()  # type: ignore[attr-defined]
    assert bucket is not None
    return bucket
