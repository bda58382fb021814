"""The tensors that a recorded step reads beside its arguments: who holds each of them.

Parameters, buffers and the state of optimizers and scalers are looked up before each call, because
a loaded checkpoint may have replaced them. Any other tensor is refused: the step would read the
tensor of its first calls for ever.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.runtime.unit.bucket import Bucket
from shardc.step.constants import Known
from shardc.step.recorder import Recorder
from shardc.step.refusals import NotRecorded
from shardc.step.values import Entry

LEAVES_GRADIENTS = "it leaves gradients: end it with zero_grad(), which sets them to None"

Held = Callable[[], Tensor]
"""Gives a tensor, as its holder has it now."""


def buckets_of(optimizers: list[Optimizer]) -> dict[Bucket, None]:
    """The buckets of the models that the optimizers train, frozen buckets too."""
    found: dict[Bucket, None] = {}
    for module in modules_of(optimizers):
        for param in module._parameters.values():
            slot = getattr(param, "_slot", None)
            if slot is not None:
                found[slot.bucket] = None
    return found


def modules_of(optimizers: list[Optimizer]) -> list[nn.Module]:
    """The modules of the models that the optimizers train."""
    roots: dict[nn.Module, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                slot = getattr(param, "_slot", None)
                if slot is not None:
                    roots.update(dict.fromkeys(slot.bucket.owner.outermost.modules))
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def find_holders(known: Known, recorder: Recorder) -> list[Held]:
    """The holder of each captured tensor, in order; the graph reads the holder's tensor.

    Raises:
        NotRecorded: nobody that the step knows holds the tensor.
    """
    optimizers = [update.optimizer for update in recorder.updates]
    in_graph = [update.optimizer for update in recorder.updates if not update.is_call]
    holders: dict[int, tuple[Held, Tensor]] = {}
    for held in _holders(known, optimizers, in_graph):
        value = held()
        path = held.path if isinstance(held, Entry) else ()
        if len(path) == 1 and value.is_leaf and value.grad is not None:
            raise NotRecorded(LEAVES_GRADIENTS)
        if recorder.made(value):
            name = f" {path[-1]!r}" if path else ""
            raise NotRecorded(
                f"it replaces the tensor{name} of a module or optimizer: write to it in place "
                "(copy_)"
            )
        holders.setdefault(value.untyped_storage()._cdata, (held, value))
    found = []
    for node, value in recorder.captured.items():
        holder = holders.get(value.untyped_storage()._cdata)
        if holder is None:
            raise NotRecorded(
                f"it reads a tensor of shape {tuple(value.shape)} and {value.dtype} that is no "
                "argument, parameter or buffer, and no state of an optimizer: "
                "give it as an argument"
            )
        held, whole = holder
        recorder.read_as(node, value, whole)
        found.append(held)
    return found


def _holders(
    known: Known, optimizers: list[Optimizer], in_graph: list[Optimizer]
) -> Iterator[Held]:
    """Who holds tensors; the state only of optimizers whose updates are in the graph."""
    for bucket in buckets_of(optimizers):
        yield lambda bucket=bucket: bucket.segment  # type: ignore[misc]
        if bucket.gathered.held is not None and bucket.gathered.stays:
            yield lambda bucket=bucket: bucket.gathered.held  # type: ignore[misc]
        waiting = bucket.gradients.waiting
        if waiting.sink is not None:
            yield lambda waiting=waiting: waiting.sink  # type: ignore[misc]
    objects = list(known.objects())
    modules = [each for each in objects if isinstance(each, nn.Module)]
    for module in dict.fromkeys([*modules_of(optimizers), *modules]):
        for inner in module.modules():
            yield from _entries(inner, "_buffers")
            plain = {k: v for k, v in inner._parameters.items() if not hasattr(v, "_slot")}
            found = (key for key, value in plain.items() if value is not None)
            yield from (Entry(inner, "_parameters", (key,)) for key in found)
    for optimizer in in_graph:
        for param in optimizer.state:
            yield from _entries(optimizer, "state", param)
        for number in range(len(optimizer.param_groups)):
            yield from _entries(optimizer, "param_groups", number)
    for each in objects:
        if isinstance(each, torch.amp.GradScaler):
            yield from _entries(each, "__dict__")


def _entries(owner: object, attribute: str, *path: Any) -> Iterator[Entry]:
    """The entries of a dictionary that are tensors."""
    items = Entry(owner, attribute, path)().items()
    tensors = (key for key, value in items if isinstance(value, Tensor))
    return (Entry(owner, attribute, (*path, key)) for key in tensors)


def kind_of(value: Tensor) -> tuple[object, ...]:
    """The facts of a tensor that shape a graph."""
    return value.shape, value.dtype, value.stride(), value.device, value.requires_grad
