"""`precompile`: compile the graphs of a job's first steps before the job, without its ranks.

The model is sharded over torch's fake process group, with shapes only, and the backend compiles it
as on a real rank. The compiled graphs stay on disk, where the job finds them (`compile_cache`).
Nothing is computed, so the model needs no memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from shardc.backend.compile import compile_graph
from shardc.backend.fake_ranks import fake_ranks, give_fakes, sharded_copy, sizes_of
from shardc.backend.frames import with_room_for_frames
from shardc.backend.options import Options
from shardc.runtime import compat
from shardc.runtime.checks.arguments import Count, checked
from shardc.runtime.groups.backends import fake_group_as_on
from shardc.runtime.groups.devices import device_named, named_devices
from shardc.runtime.tensor.extension import extends_gather
from shardc.runtime.unit.precision import map_tensors
from shardc.sharding.units import units_of


@dataclass(frozen=True)
class Precompiled:
    """Compiled graphs that a job finds at its start.

    Attributes:
        folder: the folder of the compiled graphs.
        compiled: how many Dynamo graphs were compiled now, each with its forward and backward.
        found: how many Dynamo graphs were found there, compiled before.
    """

    folder: str
    compiled: int
    found: int


@checked
def precompile(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    world_size: Count | None = None,
    mesh: DeviceMesh | Sequence[int] | None = None,
    device_type: str | None = None,
    options: dict[str, Any] | None = None,
    accumulation: bool = False,
    evaluate: bool = True,
    in_place: bool = True,
    progress: Callable[[str], object] = str,
    **sharding: Any,
) -> Precompiled:
    """Compile the steps of `model` for ranks that do not exist yet.

    A job over gloo or NCCL loads these graphs if it starts with the same model, settings, options
    and batch shapes, and the same versions of torch and shardc. On CPUs, the number of threads must
    be the job's (`torch.set_num_threads`; torchrun sets one a rank). Call it in a process of its
    own: all code that `torch.compile` compiled in this process is forgotten.

    Args:
        model: the model that the job gives to `fully_shard`; it needs no values and is not changed.
        args, kwargs: example inputs of one rank's step, by position or by name as in the job.
        world_size: ranks to shard over (default 8), up to 16,384.
        mesh: instead of `world_size`: sizes (shard,) or, with copies of the model, (replicate,
            shard); or a mesh over a fake process group.
        device_type: the type of device that the job computes on; default: the type of a given mesh,
            else "cuda" if this process sees a GPU, else "cpu". Compiling for a GPU needs a GPU of
            that kind, and none of its memory.
        options: the options of `torch.compile(..., options=)` in the job.
        accumulation: also compile steps under `no_sync`, and a step that reduces their gradients.
        evaluate: also compile the forward in evaluation, under `no_grad`.
        in_place: the job calls `model.compile(...)`; False: it calls `torch.compile(model, ...)`.
        progress: called with the name of each stage that begins.
        sharding: other arguments of `fully_shard`: `units` (default "auto"), `mp_policy`, ...

    Raises:
        ValueError: bad arguments, a model that `fully_shard` refuses, a real process group, or
            parameters of a subclass that extends its gather.
        RuntimeError: the model cannot be compiled.
        NotImplementedError: the mesh has another type of device than `Device`.
    """
    parsed = Options.parse(options)
    sizes = sizes_of("precompile", model, world_size, mesh, sharding)
    _check_kept(model)
    compat.forget_compiled()
    device = _device_type(device_type, model, mesh)
    if not device_named(device).compiles_ahead:
        known = named_devices(lambda each: each.compiles_ahead)
        raise NotImplementedError(
            f"precompile compiles for {known}, not for '{device}': leave it to the job's first "
            "start, where one rank compiles for all"
        )
    with fake_ranks(sizes, device_type=device) as made, fake_group_as_on(device):
        progress("sharding")
        sharded = sharded_copy(model, mesh if made is None else made, sharding)
        with compat.fake_tensors(device) as fake:
            give_fakes(sharded, fake)
            inputs = map_tensors(fake, (args, dict(kwargs or {})))
            for step, train in _steps(sharded, accumulation, evaluate):
                progress(f"compiling {step}")
                _compile(sharded, inputs[0], inputs[1], parsed, train, in_place)
    found, kept = compat.cache_counts()
    compat.forget_compiled()
    if not found + kept:
        raise RuntimeError(
            "no graph of the model could be kept: its forward cannot be traced (see "
            "TORCH_LOGS=graph_breaks), Inductor cannot compile it, or caches are off"
        )
    return Precompiled(compat.cache_folder(), kept, found)


def _device_type(asked: str | None, model: nn.Module, mesh: object) -> str:
    sharded = next(iter(units_of(model).values()), None)
    given = mesh if sharded is None else sharded._shardc_unit.mesh
    return given.device_type if isinstance(given, DeviceMesh) else device_to_compile_for(asked)


def device_to_compile_for(asked: str | None) -> str:
    """The type of device to compile for: `asked`, else "cuda" with a GPU in sight, else "cpu".

    Raises:
        ValueError: `asked` is "cuda", and this process sees no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        built = torch.version.cuda or "none: this is a build for CPUs"
        raise ValueError(
            "compiling for 'cuda' needs a GPU of the job's kind, whose properties Inductor asks "
            f"for, and this process sees none (CUDA of torch: {built}): do so on one of the job's "
            "machines, or leave it to the job's first start, where one rank compiles for all"
        )
    return asked or ("cuda" if has_gpu else "cpu")


def _check_kept(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if extends_gather(param):
            raise ValueError(
                f"parameter '{name}' is a {type(param.data).__name__}, which has its own code for "
                "gathers: graphs with that code are not kept on disk, so there is nothing "
                "to precompile. The job compiles them at its start; shardc.explain shows its plan"
            )


def _steps(model: nn.Module, accumulation: bool, evaluate: bool) -> Iterator[tuple[str, bool]]:
    """Prepare the model for each step to compile; yields the step's name, and whether it trains."""
    yield "a training step", True
    if accumulation:
        with ExitStack() as stack:
            for unit in units_of(model, root_only=True).values():
                stack.enter_context(unit.no_sync())
            yield "a step without gradient sync", True
        with _gradients_waiting(model):
            yield "a step that reduces accumulated gradients", True
    if evaluate:
        yield "an evaluation", False


@contextmanager
def _gradients_waiting(model: nn.Module) -> Iterator[None]:
    """A context in which gradients wait as after a step without sync, with shapes only."""
    units = units_of(model).values()
    buckets = [bucket for unit in units for bucket in unit._shardc_unit.buckets]
    for bucket in buckets:
        sink = bucket.gradients.waiting.sink
        if sink is not None and any(bucket.trainable):
            sink.grad = torch.empty(sink.shape, dtype=sink.dtype, device=sink.device)
            bucket.key.refresh()
    try:
        yield
    finally:
        for bucket in buckets:
            bucket.gradients.waiting.clear()


@with_room_for_frames
def _compile(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    train: bool,
    in_place: bool,
) -> None:
    """Compile one step as the job does; the traced graph then runs with shapes only."""

    def backend(gm: GraphModule, inputs: Sequence[Any], **ignored: Any) -> Callable[..., Any]:
        compile_graph(gm, inputs, options)
        return gm

    model.train(train)
    with torch.set_grad_enabled(train):
        if in_place:
            model.compile(backend=backend)
            model(*args, **kwargs)
        else:
            torch.compile(model, backend=backend)(*args, **kwargs)
