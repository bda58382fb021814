"""`warmup`: compile the graphs of a training before its first step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardc.backend.frames import with_room_for_frames
from shardc.runtime import compat
from shardc.runtime.checks.arguments import checked
from shardc.sharding.units import check_sharded, units_of


@checked
@with_room_for_frames
def warmup(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    accumulation: bool = False,
    evaluation: bool = True,
) -> None:
    """Run the steps of a training once, so that their graphs are compiled before it begins.

    All ranks call it, with inputs of the shapes of the training. Parameters, buffers and the
    states of random generators do not change; no gradients remain.

    Args:
        model: a sharded model after `model.compile(backend="shardc")`, or the result of
            `torch.compile`.
        args, kwargs: the inputs of one rank's step, as the training gives them.
        loss: computes the loss of the model's outputs (default: their `loss`, or the sum of all).
        accumulation: also compile steps under `no_sync`, and a step that reduces their gradients.
        evaluation: also compile the forward in evaluation, under `no_grad`.

    Raises:
        ValueError: the model is not sharded, not compiled, or has gradients already.
    """
    sharded = _check(model)
    named = dict(kwargs or {})

    def step() -> None:
        (loss or _loss)(model(*args, **named)).backward()

    with _as_before(sharded):
        sharded.train()
        step()
        sharded.zero_grad()
        if accumulation:
            with contextlib.ExitStack() as stack:
                for unit in units_of(sharded, root_only=True).values():
                    stack.enter_context(unit.no_sync())
                step()
            step()
        if evaluation:
            sharded.eval()
            with torch.no_grad():
                model(*args, **named)


def _check(model: nn.Module) -> nn.Module:
    """The sharded model of `model`. Raises ValueError where it cannot be warmed up."""
    sharded: nn.Module = getattr(model, "_orig_mod", model)
    check_sharded("warmup", sharded)
    if not compat.is_compiled(model):
        raise ValueError(
            f"warmup takes a compiled model, got {type(model).__name__}: call "
            'model.compile(backend="shardc") first, or give the result of torch.compile(model, ...)'
        )
    taken = [name for name, param in sharded.named_parameters() if param.grad is not None]
    if taken:
        raise ValueError(
            f"warmup: {taken[0]} has a gradient, which would be lost: warm up before the first "
            "step, or call zero_grad() first"
        )
    return sharded


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """A context that restores buffers, training flags and random states; no gradients remain."""
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    training = {module: module.training for module in model.modules()}
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        random = torch.random.fork_rng([])
    else:
        own = torch.accelerator.current_device_index()
        random = torch.random.fork_rng([own], device_type=device.type)
    try:
        with random:
            yield
    finally:
        model.zero_grad()
        for module, flag in training.items():
            module.training = flag
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)


def _loss(outputs: Any) -> Tensor:
    """The `loss` of a model's outputs, or the sum of all outputs that require gradients."""
    if isinstance(found := getattr(outputs, "loss", None), Tensor):
        return found
    tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
    parts = [each.float().sum() for each in tensors if each.requires_grad]
    if not parts:
        raise ValueError("warmup: the model returns nothing that requires gradients: give loss=")
    return torch.stack(parts).sum()
