"""The caller of a refused op, and the way out that fits the caller.

The stack names the caller: a library that works on whole tensors needs other advice than a line of
the user's program. Frames of shardc and of torch's plumbing are passed over.
"""

import sys
from traceback import walk_stack
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
"""(the caller, by the module's name; advice): the first caller that is on the stack counts."""

_INTEGRATIONS = {
    "transformers.trainer": "shardc.integrations.transformers.ShardcTrainer, or its mixin for "
        "other trainers, trains sharded models",
    "accelerate": "shardc.integrations.accelerate.prepare(accelerator, model, ...) prepares a "
        "sharded model",
    "lightning.fabric": "shardc.integrations.lightning.FabricStrategy trains sharded models",
    "lightning.pytorch": "shardc.integrations.lightning.TrainerStrategy trains sharded models",
}  # fmt: skip
"""Libraries that wrap and save the models they are given; the integrations to use instead."""

_GATHERED_FOR = ("torch.optim", "torch.nn.utils.convert_parameters", "torch.nn.utils.clip_grad")
"""Libraries of `_WAYS_OUT` that can work on gathered values."""

_PLUMBING = (
    "shardc.", "contextlib", "torch._", "torch.autograd.", "torch.functional",
    "torch.nn.functional", "torch.utils._",
)  # fmt: skip

_SEARCHES = {
    "torch.distributed.pipelining._backward": "this schedule splits backwards in two, and "
        "PipelineStage finds no sharded parameters in its graph: make stages with "
        "shardc.integrations.pipelining.ShardedStage",
    "torch.distributed.optim.apply_optimizer_in_backward": "_apply_optimizer_in_backward hooks "
        "into the node of autograd that adds up a parameter's gradient. A sharded parameter has "
        "no such node, and its optimizer would never step: step it in a hook of "
        "param.register_post_accumulate_grad_hook",
}  # fmt: skip
"""Modules of torch that look for the node of a parameter, and the words of the error."""


class _Call(NamedTuple):
    """A frame of the stack, without a reference to its variables."""

    module: str
    function: str
    place: str


def caller_and_way_out() -> tuple[str, str]:
    """The caller of the op that is refused now, in words, and the way out for the caller."""
    calls = _calls()
    asker, way_out = next(
        row for row in _WAYS_OUT if any(call.module.startswith(row[0]) for call in calls)
    )
    if asker and asker != "torch.optim":  # advice on an optimizer holds in every loop
        way_out = _integration() or way_out
    shown = [call for call in calls if not call.module.startswith(_PLUMBING)]
    if not shown:
        return "", way_out
    first, own = shown[0], shown[-1]
    if first is own:
        return f" (called at {own.place})", way_out
    return f" (called in {first.module}.{first.function}, from {own.place})", way_out


def refuse_search_for_node() -> None:
    """Raise for a caller that looks for a parameter's node in the graph of autograd.

    The nodes of buckets are there, and none of sharded parameters.
    """
    reason = _SEARCHES.get(str(sys._getframe(2).f_globals.get("__name__")))
    if reason is not None:
        raise RuntimeError(reason)


def is_called_by(library: str) -> bool:
    """Whether code of `library` called the function that asks."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith(library)


def is_called_by_autograd() -> bool:
    """Whether autograd itself calls into shardc, to add up gradients in a backward."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in walk_stack(sys._getframe(1)))
    asker = next((each for each in modules if not each.startswith("shardc.")), None)
    return asker in (None, "torch.autograd.graph")


def _integration() -> str | None:
    """The integration that replaces the outermost library whose loop runs; None without one."""
    modules = [str(f.f_globals.get("__name__", "")) for f, _ in walk_stack(sys._getframe(1))]
    names = ((each, name) for each in reversed(modules) for name in _INTEGRATIONS)
    return next((_INTEGRATIONS[name] for each, name in names if each.startswith(name)), None)


def is_refused_to_caller() -> bool:
    """Whether the caller is a library that would go wrong with whole values.

    Such a library works on storages, sends the values to other ranks or keeps them in place of the
    parameter.
    """
    askers = tuple(asker for asker, _ in _WAYS_OUT if asker)
    return any(
        call.module.startswith(askers) and not call.module.startswith(_GATHERED_FOR)
        for call in _calls()
    )


def _calls() -> list[_Call]:
    """The stack from the innermost frame, up to the first frame outside the libraries."""
    libraries = (*_PLUMBING, "torch.", *(asker for asker, _ in _WAYS_OUT if asker))
    calls: list[_Call] = []
    frame = sys._getframe(1)
    while frame is not None and (not calls or calls[-1].module.startswith(libraries)):
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        calls.append(_Call(module, code.co_name, f"{code.co_filename}:{frame.f_lineno}"))
        frame = frame.f_back  # type: ignore[assignment]
    return calls
