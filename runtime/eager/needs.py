"""Interfaces of units, of their buckets and of the modules that hold them, for the eager runtime.

They are made of it, in rooms that come after it: it knows them by what it uses of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from shardc.runtime.groups.ranks import Ranks
from shardc.runtime.layout.layout import BucketLayout
from shardc.runtime.layout.spec import UnshardSpec
from shardc.runtime.tensor.tensor_parallel import Placed

if TYPE_CHECKING:
    from shardc.runtime.eager.accumulate import Accumulated
    from shardc.runtime.eager.full_parameters import Gathered


class EagerUnit(Protocol):
    """A unit, as eager code sees it; `name` is for messages."""

    name: str

    @property
    def buckets(self) -> Sequence["EagerBucket"]:
        """Its buckets."""

    @property
    def outermost(self) -> "EagerUnit":
        """The unit around it and all others."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that still exist."""

    def await_updates(self) -> None:
        """A gather is about to start: wait for what it shall wait for."""


class EagerSettings(Protocol):
    """The settings of a unit that the eager runtime reads: see `Settings`."""

    reshard_after_backward: bool
    sync: bool
    all_reduce: bool
    reduce_buffers: int | None

    @property
    def forward_prefetch(self) -> Sequence[EagerUnit]: ...

    @property
    def backward_prefetch(self) -> Sequence[EagerUnit]: ...


class EagerGradients(Protocol):
    """The way of a bucket's gradient to its parameters.

    Attributes:
        waiting: gradients that wait to be reduced.
        delivers: whether parameters are given their gradients now.
    """

    waiting: "Accumulated"
    delivers: bool

    def flush(self) -> None:
        """Reduce what has waited."""

    def deliver(
        self, part: Tensor, used: set[int], elsewhere: set[int], eager: bool = False
    ) -> None:
        """Deal a reduced gradient, `(S,)`, out to the parameters that a rank used."""

    def unreduced(self, index: int, dtype: torch.dtype) -> Tensor | None:
        """The unreduced gradient of the full parameter `index`."""


class EagerKey(Protocol):
    """The key of the graphs that read a bucket; `code` is that of `GraphKey`."""

    code: UnshardSpec

    def reading_code(self) -> UnshardSpec:
        """The spec of the code that a read needs now."""

    def refresh(self) -> None:
        """Name the code that the bucket needs now."""


class EagerBucket(Protocol):
    """A bucket, as eager code sees it.

    Attributes:
        layout: its plan.
        ranks: who shares it.
        serial: its number in the group, equal on all ranks.
        segment: this rank's part, `(S,)`.
        trainable: which parameters require gradients.
        placed: how each parameter lies on a tensor-parallel mesh, if it does.
        gathered: its full parameters, where they are at hand.
    """

    layout: BucketLayout
    ranks: Ranks
    serial: int
    segment: nn.Parameter
    trainable: tuple[bool, ...]
    placed: tuple[Placed | None, ...]
    gathered: "Gathered"

    @property
    def owner(self) -> EagerUnit:
        """Its unit."""

    @property
    def key(self) -> EagerKey:
        """The key of graphs that read the bucket."""

    @property
    def settings(self) -> EagerSettings:
        """The settings of its unit."""

    @property
    def gradients(self) -> EagerGradients:
        """The gradients of the bucket."""

    @property
    def label(self) -> str:
        """Its name, for messages."""

    @property
    def version(self) -> object:
        """Differs after any write to the parameters."""

    def end_backward(self) -> None:
        """A backward has differentiated it: free it, or keep it for the next step."""


class EagerModule(Protocol):
    """A module that holds sharded parameters, by name in `_shardc_slots`."""

    @property
    def _shardc_slots(self) -> Mapping[str, object]: ...

    @property
    def _shardc_buckets(self) -> Iterable[EagerBucket]: ...
