"""The methods of FSDP2's `FSDPModule` on sharded modules, and FSDP1's `no_sync`.

Each method changes the settings of units. Graphs that were compiled with earlier settings stay in
Dynamo's cache, so every combination of flags costs one compile. A forward reads the settings that
shape its code and the code of its backward: change them before the forward.

`recurse` has the defaults of FSDP2: some methods act on all units inside, some on this unit only.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.checks.arguments import Count, Must, Positive, check_value, checked, shown
from shardc.runtime.checks.meta import units_in
from shardc.runtime.checks.telling import warn
from shardc.runtime.comm.reduce_functions import leave_out_gather, leave_out_reduce
from shardc.runtime.groups.devices import device_named, named_devices
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.settings import Communicator
from shardc.runtime.unit.unit import Unit

Comm = Annotated[
    Any,
    Must(
        "an object that can be called and has allocate() (FSDP2's AllGather, ReduceScatter)",
        lambda comm: callable(comm) and callable(getattr(comm, "allocate", None)),
    ),
]
Event = Annotated[
    Any, Must("a recorded torch.Event", lambda event: callable(getattr(event, "wait", None)))
]
Reshard = Annotated[
    bool | int | None, Must("True, False, None or a divisor of the number of ranks")
]
_ALLOCATORS = ("memory", "all_gather", "reduce_scatter")
_MODULES = Annotated[
    Iterable[object],
    Must("a list of sharded modules", lambda given: not isinstance(given, (Controls, str))),
]


class Controls:
    """The methods of a sharded module, as on FSDP2's `FSDPModule`."""

    _shardc_unit: Unit

    # -- gradients -----------------------------------------------------------------------------

    @checked
    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """With False, backwards add up unreduced gradients instead of reducing them.

        Each bucket then has one flat buffer of its full size, in the dtype of the reduction. The
        next backward with True reduces the sum. Call the method before the forward.
        """
        self._change(recurse, sync=bool(requires_gradient_sync))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Skip reductions in the backwards of forwards inside the context; it nests and restores.

        Raises:
            RuntimeError: the module is not the outermost unit.
        """
        if not self._shardc_unit.is_root:
            raise RuntimeError(
                "no_sync() is for the outermost sharded module; for one inside use "
                "set_requires_gradient_sync(False)"
            )
        before = [(unit, unit.settings.sync) for unit in units_in(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, sync in before:
                unit.change(sync=sync)

    @checked
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With False (HSDP), gradients are reduced within each copy of the model and added up.

        The next backward with True reduces the sum over the copies.
        """
        self._change(recurse, all_reduce=bool(requires_all_reduce))

    @checked
    def set_is_last_backward(self, is_last_backward: bool, *, recurse: bool = True) -> None:
        """Accept FSDP2's hint that other backwards follow; nothing waits for the hint here."""

    @checked
    def set_gradient_divide_factor(self, factor: Positive, *, recurse: bool = False) -> None:
        """Divide the sum of gradients by `factor` instead of the number of ranks.

        Raises:
            TypeError, ValueError: `factor` is not a positive number.
        """
        self._change(recurse, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: Positive, *, recurse: bool = False) -> None:
        """Call `set_gradient_divide_factor`, under FSDP2's older name."""
        self.set_gradient_divide_factor(factor, recurse=recurse)

    @checked
    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """Sum on the wire and divide apart, also where the backend could average."""
        self._change(recurse, force_sum=bool(enable))

    @checked
    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """With True, parameters that no rank used get gradients of zeros instead of None.

        Parameters that only some ranks use need no setting: the other ranks count as zero.
        """
        self._change(recurse, reduce_unused=bool(reduce_scatter_unused_params))

    @checked
    def set_all_reduce_hook(
        self,
        hook: Callable[[Tensor], None] | None,
        *,
        stream: object = None,
        recurse: bool = False,
    ) -> None:
        """Call `hook` on each reduced gradient, `(S,)` in the dtype of the reduction, to change it
        in place.

        The hook runs after the reduce-scatter; with copies of the model (HSDP), after the
        all-reduce over copies. The hook sees the mean, or the sum where FSDP2's hook does (float16,
        forced sums). The hook may communicate. None removes the hook.

        Raises:
            ValueError: `stream` is given: the hook runs where the graph puts it.
        """
        if stream is not None:
            raise ValueError("set_all_reduce_hook: the hook runs in the graph; stream must be None")
        self._change(recurse, hook=hook)

    @checked
    def set_custom_reduce(
        self, function: Callable[[Tensor, str, int, str], Tensor] | None, *, recurse: bool = True
    ) -> None:
        """Replace the reduce-scatter by a function that FX can trace.

        `function(flat, op, world_size, group)` takes the unreduced gradient, `(W*S,)`, and gives
        this rank's part of the sum, `(S,)`; `shardc.compress_bf16` and `shardc.compress_fp16` are
        two such functions. The function becomes part of the graph: scheduled and compiled. None
        removes the function.
        """
        self._change(recurse, reduce_function=function)

    # -- communication -------------------------------------------------------------------------

    @checked
    def set_custom_all_gather(self, comm: Comm | None, *, recurse: bool = False) -> None:
        """Gather with an object of FSDP2's `AllGather` interface; None removes the object.

        The object is opaque to the compiler, so its gathers do not overlap compute.

        Raises:
            ValueError: buffers come from another allocator (`set_symm_mem_for_comm` and its like).
        """
        self._change_allocator(recurse, all_gather=comm)

    @checked
    def set_custom_reduce_scatter(self, comm: Comm | None, *, recurse: bool = False) -> None:
        """Reduce with an object of FSDP2's `ReduceScatter` interface; None removes the object.

        Raises:
            ValueError: as for `set_custom_all_gather`.
        """
        self._change_allocator(recurse, reduce_scatter=comm)

    @checked
    def set_ablation(
        self, *, all_gather: bool = False, reduce: bool = False, recurse: bool = True
    ) -> None:
        """Leave out gathers or reductions, to measure their cost. RESULTS ARE WRONG.

        With `all_gather`, this rank's segment takes the place of every rank's segment. With
        `reduce`, this rank's gradients take the place of the reduced gradients. Without either,
        nothing is left out.
        """
        if all_gather or reduce:
            left_out = [n for n, flag in (("gathers", all_gather), ("reductions", reduce)) if flag]
            warn(
                f"set_ablation: {' and '.join(left_out)} are left out. The model does NOT train "
                "correctly; this is for measuring only"
            )
        self._change(
            recurse,
            all_gather=leave_out_gather if all_gather else None,
            reduce_function=leave_out_reduce if reduce else None,
        )

    @checked
    def set_allocate_memory_from_process_group_for_comm(
        self, enable: bool, *, recurse: bool = False
    ) -> None:
        """Let the process group allocate the buffers of gathers and reductions, if it can.

        NCCL then transfers without copies where the network can (SHARP). Without an allocator in
        the backend (gloo) nothing changes. Gradients are first copied into such a buffer.

        Raises:
            ValueError: a custom all-gather or reduce-scatter is set, which allocates by itself.
        """
        self._change_allocator(recurse, memory="group" if enable else None)

    def _change(self, recurse: bool, **settings: object) -> None:
        for unit in units_in(self, recurse):
            unit.change(**settings)

    def _change_allocator(self, recurse: bool, **setting: object) -> None:
        """Change the allocator of buffers; raise ValueError where there would be two."""
        for unit in units_in(self, recurse):
            now = {name: getattr(unit.settings, name) for name in _ALLOCATORS} | setting
            memory, *comms = now.values()
            if None not in setting.values() and memory is not None and any(comms):
                raise ValueError(
                    "a custom all-gather or reduce-scatter allocates its buffers by itself: take "
                    "it away (None), or do without set_allocate_memory_from_process_group_for_comm "
                    "and set_symm_mem_for_comm"
                )
        self._change(recurse, **setting)

    @checked
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refuse True: a gathered bucket is memory of the compiled graph, at no fixed address."""
        if keep:
            raise NotImplementedError(
                "shardc does not keep the storage of gathered parameters between steps: they are "
                "part of the compiled graph, whose memory the compiler plans"
            )

    @checked
    def set_symm_mem_for_comm(
        self, backend: Literal["NCCL", "CUDA", "NVSHMEM"] = "NCCL", *, recurse: bool = False
    ) -> None:
        """Gather in symmetric memory; reduce there too, where sums are forced.

        NCCL then gathers by its copy engines or symmetric kernels. Every rank must call it.

        Args:
            backend: the provider of symmetric memory: "NCCL", "CUDA" or "NVSHMEM".
            recurse: whether to change units inside too.

        Raises:
            ValueError: another backend, or a custom all-gather or reduce-scatter is set.
            NotImplementedError: torch has no symmetric memory for the mesh's devices.
        """
        for unit in units_in(self, recurse):
            if not device_named(unit.device.type).has_symmetric_memory:
                known = named_devices(lambda each: each.has_symmetric_memory)
                raise NotImplementedError(
                    "set_symm_mem_for_comm: torch has symmetric memory for "
                    f"{known} devices only, and {unit.name or 'the root'} is sharded "
                    f"over '{unit.device.type}'"
                )
        self._change_allocator(recurse, memory="symmetric")
        compat.use_symmetric_memory(backend)

    # -- buckets that stay gathered ------------------------------------------------------------

    @checked
    def set_reshard_after_forward(
        self, reshard_after_forward: Reshard, recurse: bool = True
    ) -> None:
        """Set `reshard_after_forward`, as the argument of `fully_shard` does.

        Raises:
            TypeError, ValueError: neither None, a bool nor a divisor of the number of ranks.
        """
        units = units_in(self, recurse)
        worlds = [unit.mesh.size(unit.mesh.ndim - 1) for unit in units]
        asked = [check_reshard(reshard_after_forward, world) for world in worlds]
        for unit, value in zip(units, asked, strict=True):
            unit.asked_reshard = value
            unit.settle()

    @checked
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """With False, buckets stay gathered after the backward, for the next forward.

        Use it for micro-batches between optimizer steps. A step writes the parameters, and the
        buckets are then gathered anew before the next forward.
        """
        self._change(recurse, reshard_after_backward=bool(reshard_after_backward))

    @checked
    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Accept FSDP2's way to skip a gather that a backward does not need; graphs have none."""

    @checked
    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather this unit now and keep it gathered until `reshard()` or its next backward's end.

        Until then the unit's modules read full parameters, in the dtype of compute. The next
        forward does not gather again. Every rank must call `unshard`. With `async_op`, `unshard`
        returns a handle and does not wait. The handle's `wait()` waits; otherwise the first read
        waits.
        """
        buckets = tuple(bucket for unit in units_in(self, False) for bucket in unit.buckets)
        for bucket in buckets:
            bucket.gathered.hold(wait=not async_op)
            bucket.gathered.opened = True
        return UnshardHandle(buckets) if async_op else None

    def reshard(self) -> None:
        """Free the unit's gathered buckets."""
        for bucket in (bucket for unit in units_in(self, False) for bucket in unit.buckets):
            bucket.gathered.drop()

    def reset_iter_state(self) -> None:
        """Forget an interrupted step: free gathered buckets, drop the notes of the backward and the
        gradients that wait to be reduced.

        Raises:
            RuntimeError: the module is not the outermost unit.
        """
        self._require_root("reset_iter_state")
        for unit in units_in(self):
            for bucket in unit.buckets:
                bucket.reset()

    @checked
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Accept both values: backwards reduce anyway, and `finalize_backward` reduces the rest.

        Raises:
            RuntimeError: the module is not the outermost unit.
        """
        self._require_root("set_manual_backward_finalization")

    @checked
    def finalize_backward(self, *, async_op: bool = False) -> "UnshardHandle | None":
        """Reduce gradients that backwards without sync have left, in the units that sync now.

        Args:
            async_op: return a handle; the gradients are reduced before the method returns anyway.

        Raises:
            RuntimeError: the module is not the outermost unit.
        """
        self._require_root("finalize_backward")
        for unit in units_in(self):
            for bucket in unit.buckets:
                bucket.gradients.flush()
        return UnshardHandle(()) if async_op else None  # nothing is left to wait for

    def _require_root(self, method: str) -> None:
        if not self._shardc_unit.is_root:
            raise RuntimeError(f"{method}() is for the outermost sharded module")

    @checked
    def set_post_optim_event(self, event: Event | None) -> None:
        """Make the gathers of the next forward wait for `event`, recorded after an optimizer step
        on another stream; work queued before the gathers does not wait. None removes the event."""
        after = None if event is None else functools.cache(event.wait)
        for unit in units_in(self):
            unit.before_gathers = after

    # -- hints for the schedule ----------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: "Sequence[Controls]") -> None:
        """Gather units when this unit's forward begins, without regard to the cost model.

        The hint is for the next compile; FSDP2's method of this name is for the next forward.

        Raises:
            TypeError, ValueError: `modules` is no list, or a module in it is not sharded.
        """
        units = _units("set_modules_to_forward_prefetch", modules)
        self._shardc_unit.change(forward_prefetch=units)

    def set_modules_to_backward_prefetch(self, modules: "Sequence[Controls]") -> None:
        """Gather units when this unit's backward begins, as `set_modules_to_forward_prefetch`."""
        units = _units("set_modules_to_backward_prefetch", modules)
        self._shardc_unit.change(backward_prefetch=units)

    @checked
    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: Count, *, recurse: bool = True
    ) -> None:
        """Limit the number of reductions under way, each with its unreduced gradients in memory.

        Without a limit on the number, the bytes are bounded by the gradients of two units.

        Raises:
            TypeError, ValueError: no whole number, or less than one.
        """
        self._change(recurse, reduce_buffers=max_input_buffers)

    @checked
    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True, high_priority: bool = False
    ) -> None:
        """Reduce on a separate communicator, so that reductions can overlap gathers on the wire.

        Every rank of the mesh must call it. `high_priority` puts the kernels of the communicator on
        a stream of high priority (NCCL).
        """
        self._change(recurse, reduces_on=_communicator(enable, high_priority))

    @checked
    def set_separate_all_gather_group(
        self, enable: bool = True, *, recurse: bool = True, high_priority: bool = False
    ) -> None:
        """Gather on a separate communicator; else as `set_separate_reduce_scatter_group`."""
        self._change(recurse, gathers_on=_communicator(enable, high_priority))


def _communicator(own: bool, high_priority: bool) -> Communicator:
    return ("urgent" if high_priority else "own") if own else "shared"


class UnshardHandle:
    """The handle that `unshard` and `finalize_backward` return with `async_op=True`."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets

    def wait(self) -> None:
        """Wait until the buckets are gathered; the next forward does so by itself."""
        for bucket in self._buckets:
            bucket.gathered.finish()


def check_reshard(value: object, world_size: int) -> bool | int | None:
    """Check `reshard_after_forward`; 1 becomes False, and the world size becomes True.

    Raises:
        ValueError: neither None, a bool nor a divisor of the world size.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or world_size % value:
        raise ValueError(
            f"reshard_after_forward must be a bool, None or a divisor of the world size "
            f"{world_size}, got {value!r}"
        )
    return value == world_size if value in (1, world_size) else value


def share_comm_ctx(modules: Sequence[Controls]) -> None:
    """Share communicators among pipeline stages on one device, as FSDP2's function of this name.

    Units over the same ranks share a communicator. If the first of `modules` has a separate one for
    gathers or for reductions, the other units over the same ranks get it too. The first module's
    limit on reductions becomes the limit of all units.

    Raises:
        TypeError, ValueError: `modules` is no list, or a module in it is not sharded.
    """
    units = _units("share_comm_ctx", modules)
    if not units:
        return
    first = units[0]
    groups, settings = {bucket.ranks.shard for bucket in first.buckets}, first.settings
    for unit in [unit for module in modules for unit in units_in(module)]:
        if any(bucket.ranks.shard in groups for bucket in unit.buckets):
            unit.change(gathers_on=settings.gathers_on, reduces_on=settings.reduces_on)
        unit.change(reduce_buffers=settings.reduce_buffers)


def _units(where: str, modules: "Iterable[Controls]") -> tuple[Unit, ...]:
    check_value(f"{where}: modules", modules, _MODULES)
    given = list(modules)
    for index, module in enumerate(given):
        if not isinstance(module, Controls):
            raise ValueError(
                f"{where}: modules must have been given to fully_shard, and modules[{index}] is "
                f"{shown(module)} that was not"
            )
    return tuple(unit for module in given for unit in units_in(module, False))
