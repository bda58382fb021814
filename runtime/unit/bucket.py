"""A bucket at run time: this rank's segment, its parameters, gradients and settings.

The segment is the autograd leaf: a graph takes it as the one input for the whole bucket. The
segment's gradient is one flat tensor, which a hook deals out to the parameters (`gradients`). The
parameters are views of the segment (`params`). `full_parameters` gathers buckets outside of graphs;
`graph_key` names the code that a read of a parameter needs.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardc.runtime import compat
from shardc.runtime.groups.communicators import kept_with
from shardc.runtime.groups.ranks import Ranks
from shardc.runtime.layout.layout import BucketLayout, split_of
from shardc.runtime.layout.padding import without_padding
from shardc.runtime.tensor.extension import Extension
from shardc.runtime.tensor.shard_spec import ShardSpec
from shardc.runtime.tensor.tensor_parallel import Placed
from shardc.runtime.unit.full_parameters import Gathered
from shardc.runtime.unit.gradients import Gradients
from shardc.runtime.unit.graph_key import GraphKey
from shardc.runtime.unit.settings import Settings
from shardc.runtime.unit.weak_hooks import weak_hook

if TYPE_CHECKING:
    from shardc.runtime.unit.params import Place
    from shardc.runtime.unit.unit import Unit


class Bucket:
    """One flat bucket of a unit on this rank.

    Attributes:
        layout: the slots and sizes, equal on all ranks.
        ranks: the groups of ranks that share the bucket.
        settings: the settings of the bucket's unit.
        segment: this rank's part, `(S,)`; the autograd leaf of the whole bucket.
        params: the ShardTensor parameters, one a slot.
        specs: for each slot, the intervals of the parameter on the ranks.
        split: the pieces of the segment (`split_of`).
        placed: for each slot, the parameter's placement on a tensor-parallel mesh, or None.
        extension: the gather hooks of a tensor subclass, for a bucket of one such parameter.
        trainable: for each slot, whether the parameter requires a gradient.
        places: by slot, the inputs of graphs for slots that modules of inner units read.
        gathered: the full parameters, outside of graphs.
        gradients: the way of the segment's gradient to the parameters.
        key: the key of the graphs that read the bucket.
        serial: the number of the bucket in its group, equal on all ranks.
        origin: the `serial` of the first bucket in a chain of copies; the bucket's own `serial` if
            it is no copy.
        unit: the bucket's `Unit`; None until the unit is made.
    """

    def __init__(
        self,
        layout: BucketLayout,
        ranks: Ranks,
        settings: Settings,
        segment: Tensor,
        device: torch.device | None = None,
        placed: Sequence[Placed | None] | None = None,
        extension: Extension | None = None,
    ) -> None:
        self.layout = layout
        self.ranks = ranks
        self.settings = settings
        self.serial = next(
            kept_with(compat.resolve_group(ranks.everyone), "buckets", itertools.count)
        )
        self.origin = self.serial
        self.device = device or segment.device
        self.unit: Unit | None = None
        self.params: list[nn.Parameter] = []
        self.trainable = (layout.requires_grad,) * len(layout.slots)
        self.places: dict[int, Place] = {}
        self.placed = tuple(placed or (None,) * len(layout.slots))
        self.extension = extension
        where = (layout.segment, ranks.rank, layout.world_size, ranks.shard)
        everyone = ranks.everyone if ranks.copies > 1 else ""
        self.specs = tuple(
            ShardSpec(slot.start, slot.numel, *where, tp, everyone, ranks.mesh)
            for slot, tp in zip(layout.slots, self.placed, strict=True)
        )
        self.split = split_of(layout, ranks.rank)
        self._first: object = None
        self.gathered = Gathered(self)
        self.gradients = Gradients(self)
        self.key = GraphKey(self)
        self.set_segment(segment)

    def __str__(self) -> str:
        unit = f" ({self.label})" if self.unit is not None else ""
        return f"bucket {self.serial}{unit} of {self.content}"

    @property
    def content(self) -> str:
        """The content in words, the same for equal blocks."""
        return f"{self.layout.numel} {self.segment.dtype}: {self.layout.contents}"

    @property
    def owner(self) -> "Unit":
        """The bucket's unit, which must have been made."""
        assert self.unit is not None
        return self.unit

    def set_segment(self, segment: Tensor) -> None:
        """Make `segment: (S,)` the leaf; the caller points the parameters to it (`params`)."""
        self.gathered.drop()
        segment = without_padding(segment, self.layout, self.ranks.rank)
        self.segment = nn.Parameter(segment, requires_grad=any(self.trainable))
        if not self.settings.offloaded:
            self.device = segment.device
        self.segment.shardc_bucket = weakref.ref(self)  # type: ignore[attr-defined]
        if self.segment.is_floating_point() or self.segment.is_complex():
            self.segment.requires_grad_(True)
            self.segment.register_post_accumulate_grad_hook(weak_hook(self.gradients.receive))
            self.segment.requires_grad_(any(self.trainable))
        self.key.follow_settings()  # how a mean is made depends on the device

    @property
    def version(self) -> object:
        """A value that changes with every write to the parameters."""
        return self.segment._version, self.updates()

    @property
    def is_as_sharded(self) -> bool:
        """Whether `note_first` was called, and no parameter was written since."""
        return self._first is not None and self._first == self.version

    def note_first(self) -> None:
        """Note that the parameters have the values that they were sharded with."""
        self._first = self.version

    @property
    def label(self) -> str:
        """The unit's name, for messages; with the bucket's index if the unit has several."""
        buckets = self.owner.buckets
        return self.owner.name + (f"[{buckets.index(self)}]" if len(buckets) > 1 else "")

    def set_trainable(self, index: int, flag: bool) -> None:
        """Set whether parameter `index` requires a gradient, from the next forward on."""
        flags = list(self.trainable)
        flags[index] = flag
        self.trainable = tuple(flags)
        if index in self.places:
            self.places[index].marker.requires_grad_(flag)
        self.segment.requires_grad_(any(flags))
        self.key.refresh()

    def updates(self) -> int:
        """A count that grows with every update by a compiled `opt.step`.

        Inductor's kernels write to the local parts and change no version. AOT autograd then counts
        up the versions of the parameters, not the version of the segment.
        """
        return sum(param._version for param in self.params)

    def end_backward(self) -> None:
        """Free the bucket after a backward differentiated it, or keep it for the next step."""
        if not self.settings.reshard_after_backward:
            self.gathered.hold()
        elif self.gathered.stays:
            self.gathered.shut()
        else:
            self.gathered.drop()

    def reset(self) -> None:
        """Forget a step that was interrupted."""
        self.gathered.reset()
        self.gradients.reset()


def bucket_of(segment: Tensor) -> Bucket:
    """The bucket of a segment.

    A module, a parameter or a graph must hold the bucket: the segment refers to it weakly.
    """
    bucket: Bucket | None = segment.shardc_bucket()  # type: ignore[attr-defined]
    assert bucket is not None
    return bucket
