"""Where a refused op was called from, and the way out that fits there.

The stack says who asked: a library that works on whole tensors needs other advice than a line of
the user's. Frames of shardc and of torch's plumbing are passed over.
"""

import sys
from types import FrameType
from typing import NamedTuple

SAVE_WHOLE = (
    "To save the whole: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, "
    "cpu_offload=True)) on every rank, or torch.distributed.checkpoint.save"
)
_WAYS_OUT = (
    ("torch.distributed.tensor", "distribute_tensor takes plain tensors: give it "
        "param.full_tensor(). To load a model call shardc.set_model_state_dict"),
    ("torch.optim", "Take shardc.WholeTensorOptimizer(TheOptimizer, params, ...), or an optimizer "
        "that works elementwise (AdamW, SGD, Adagrad, ...)"),
    ("torch.nn.parallel", "DistributedDataParallel keeps whole parameters equal: give fully_shard "
        "a mesh (replicate, shard) instead, see hybrid_mesh()"),
    ("torch.distributed.fsdp", "Use one of the two: shardc's fully_shard or torch's"),
    ("safetensors", f"{SAVE_WHOLE} (its HuggingFaceStorageWriter writes them). To load, give "
        "safetensors.torch.load_file(...) to model.load_state_dict"),
    ("torch.serialization", SAVE_WHOLE),
    ("torch.nn.utils.prune", "Prune before fully_shard"),
    ("torch.nn.utils", "Call it on full parameters: with shardc.summon_full_params(model): ..."),
    ("", "Call .full_tensor() (on every rank) and work on the result; a parameter reads as the "
        "full tensor inside its module's forward and after the unit's unshard()"),
)  # fmt: skip
"""(who asked, by the module's name; what to do): the first that is on the stack counts."""

_INTEGRATIONS = {
    "transformers.trainer": "shardc.integrations.transformers.ShardcTrainer, or its mixin for "
        "other trainers, trains sharded models",
    "accelerate": "shardc.integrations.accelerate.prepare(accelerator, model, ...) prepares a "
        "sharded model",
    "lightning.fabric": "shardc.integrations.lightning.FabricStrategy trains sharded models",
    "lightning.pytorch": "shardc.integrations.lightning.TrainerStrategy trains sharded models",
}  # fmt: skip
"""Libraries that wrap and save what they are given, and what to give it to instead."""

_GATHERED_FOR = ("torch.optim", "torch.nn.utils.convert_parameters", "torch.nn.utils.clip_grad")
"""Libraries among these that can work on gathered values."""

_PLUMBING = (
    "shardc.", "contextlib", "torch._", "torch.autograd.", "torch.functional",
    "torch.nn.functional", "torch.utils._",
)  # fmt: skip


class _Call(NamedTuple):
    """A frame of the stack, without a hold on what is in it."""

    module: str
    function: str
    place: str


def caller_and_way_out() -> tuple[str, str]:
    """Who called the op that is refused now, in words, and what they can do instead."""
    calls = _calls()
    asker, way_out = next(
        row for row in _WAYS_OUT if any(call.module.startswith(row[0]) for call in calls)
    )
    if asker and asker != "torch.optim":  # whose loop it is does not matter to an optimizer
        way_out = _integration() or way_out
    shown = [call for call in calls if not call.module.startswith(_PLUMBING)]
    if not shown:
        return "", way_out
    first, own = shown[0], shown[-1]
    if first is own:
        return f" (called at {own.place})", way_out
    return f" (called in {first.module}.{first.function}, from {own.place})", way_out


def refuse_split_backward() -> None:
    """Raise for a pipeline that asks a parameter where its gradient comes from.

    Its schedule splits backwards in two, and looks in the stage's graph for parameters, which are
    not there: it would lose their gradients.
    """
    if sys._getframe(2).f_globals.get("__name__") == "torch.distributed.pipelining._backward":
        raise RuntimeError(
            "this schedule splits backwards in two, and PipelineStage finds no sharded parameters "
            "in its graph: make stages with shardc.integrations.pipelining.ShardedStage"
        )


def is_called_by(library: str) -> bool:
    """Whether the caller of the function that asks is code of `library`."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith(library)


def is_called_by_autograd() -> bool:
    """Whether no code but autograd's, which adds up gradients in a backward, calls into shardc."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("shardc."):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__") == "torch.autograd.graph"


def _integration() -> str | None:
    """The integration to use in place of the outermost library whose loop runs, if shardc has
    one."""
    frame: FrameType | None = sys._getframe(1)
    found: str | None = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        found = next((use for name, use in _INTEGRATIONS.items() if module.startswith(name)), found)
        frame = frame.f_back
    return found


def is_refused_to_caller() -> bool:
    """Whether a library asks that would go wrong with whole values, as it works on storages, sends
    them to other ranks or keeps them in place of the parameter.
    """
    askers = tuple(asker for asker, _ in _WAYS_OUT if asker)
    return any(
        call.module.startswith(askers) and not call.module.startswith(_GATHERED_FOR)
        for call in _calls()
    )


def _calls() -> list[_Call]:
    """The stack from the innermost frame, up to the first that is no library's."""
    libraries = (*_PLUMBING, "torch.", *(asker for asker, _ in _WAYS_OUT if asker))
    calls: list[_Call] = []
    frame = sys._getframe(1)
    while frame is not None and (not calls or calls[-1].module.startswith(libraries)):
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        calls.append(_Call(module, code.co_name, f"{code.co_filename}:{frame.f_lineno}"))
        frame = frame.f_back  # type: ignore[assignment]
    return calls
