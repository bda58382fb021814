"""The settings of a unit, from which `bucket_spec` makes the specs of its buckets."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardc.runtime.layout.layout import BucketLayout
from shardc.runtime.layout.spec import Interned, divide_factors, intern_object
from shardc.runtime.layout.wire_format import MICROSCALING, WireFormat
from shardc.runtime.unit.precision import MixedPrecisionPolicy

if TYPE_CHECKING:
    from shardc.runtime.unit.unit import Unit

Communicator = Literal["shared", "own", "urgent"]
"""The mesh's communicator, one for one purpose, or one for one purpose with priority (NCCL)."""

_OBJECTS = ("reduce_function", "all_gather", "reduce_scatter", "hook")
_KEPT = 4
"""The number of user objects that are kept for one setting."""


@dataclass
class Settings:
    """The settings that all buckets of a unit share.

    Graphs recompile after a change of one that shapes a spec.

    Attributes:
        reshard_after_forward: free the gathered bucket after the forward; a number: keep this
            rank's part among that number of ranks, among which the backward gathers.
        reshard_after_backward: False keeps the bucket gathered until the next step's backward.
        sync: reduce gradients; False adds up unreduced gradients.
        all_reduce: reduce over copies of the model too; False adds up gradients of one copy.
        divide_factor: the divisor of gradients; None: the number of ranks.
        force_sum: sum and divide even where the backend can average.
        reduce_unused: a parameter that no rank used gets a gradient of zeros.
        reduce_function, all_gather, reduce_scatter, hook: keys of the user's objects.
        objects: the last user objects of each setting: a later backward may call an earlier one.
        writes: how many times a setting of any unit was set.
        memory: the allocator of the buffers of collectives (`comm_buffers`).
        gathers_on, reduces_on: the communicators of gathers and of reductions.
        reduce_buffers: the largest number of reductions under way; None: the schedule decides.
        forward_prefetch, backward_prefetch: units to gather when the unit's forward or backward
            begins.
        precision, offload: the policies given to `fully_shard`.
        host_is_apart: plan as if the device were not the host, though all is on the CPU
            (`explain`).
    """

    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    sync: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    force_sum: bool = False
    reduce_unused: bool = False
    reduce_function: str | None = None
    all_gather: str | None = None
    reduce_scatter: str | None = None
    hook: str | None = None
    memory: str | None = None
    gathers_on: Communicator = "shared"
    reduces_on: Communicator = "shared"
    reduce_buffers: int | None = None
    forward_prefetch: tuple["Unit", ...] = field(default=(), repr=False)
    backward_prefetch: tuple["Unit", ...] = field(default=(), repr=False)
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    host_is_apart: bool = False
    objects: dict[str, tuple[Interned, ...]] = field(default_factory=dict, repr=False)
    writes: ClassVar[int] = 0

    def put(self, name: str, value: object) -> None:
        """Set the setting `name`; of a user's object, set the key and keep the object."""
        if name in _OBJECTS and value is not None:
            own = intern_object(value)
            earlier = [known for known in self.objects.get(name, ()) if known is not own]
            self.objects = {**self.objects, name: (*earlier, own)[-_KEPT:]}
            value = own.key
        setattr(self, name, value)
        Settings.writes += 1

    @property
    def offloaded(self) -> bool:
        """Whether segments lie on the host."""
        return isinstance(self.offload, CPUOffloadPolicy)

    @property
    def pinned(self) -> bool:
        """Whether segments lie in pinned memory of the host, so that copies overlap compute."""
        return isinstance(self.offload, CPUOffloadPolicy) and self.offload.pin_memory

    def is_full_precision(self, evaluating: bool) -> bool:
        """Whether the unit runs without casts; never in training."""
        return evaluating and self.precision.full_precision_in_eval

    def dtypes(self, stored: torch.dtype, evaluating: bool) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of compute and of the reduction for a bucket stored in `stored`."""
        policy = self.precision
        if not stored.is_floating_point or self.is_full_precision(evaluating):
            return stored, stored
        computed = policy.param_dtype or stored
        return computed, policy.reduce_dtype or computed

    def wire_format(
        self, layout: BucketLayout, purpose: Literal["gather", "reduce"]
    ) -> WireFormat | None:
        """The wire format of a bucket's gathers or reductions; None: values keep their dtype."""
        policy = self.precision
        dtype = policy.gather_wire_dtype if purpose == "gather" else policy.reduce_wire_dtype
        if dtype is None or not layout.block:
            return None
        if isinstance(dtype, str):
            form = MICROSCALING[dtype]
            return WireFormat(form.dtype, form.block, layout.exact, scale=form.scale)
        return WireFormat(dtype, policy.wire_block, layout.exact, policy.wire_seed)

    def division(self, ranks: int, dtype: torch.dtype, mean_op: str) -> tuple[str, float, float]:
        """The mean of gradients of `ranks` ranks: the op, and the divisors before and after it.

        `mean_op` is "avg" where the backend averages by itself.
        """
        exact = dtype in (torch.float32, torch.bfloat16)
        own = self.reduce_function is None and self.reduce_scatter is None
        if mean_op == "avg" and self.divide_factor is None and exact and own and not self.force_sum:
            return "avg", 1.0, 1.0
        factor = ranks if self.divide_factor is None else self.divide_factor
        return "sum", *divide_factors(factor, dtype)
