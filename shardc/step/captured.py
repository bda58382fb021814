"""The tensors that a recorded step reads beside its arguments: who holds each of them.

Parameters, buffers and the state of optimizers and scalers are looked up before each call, because
a loaded checkpoint may have replaced them. Any other tensor is refused: the step would read the
tensor of its first calls for ever.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.unit.bucket import Bucket
from shardc.step.constants import Known
from shardc.step.recorder import Recorder
from shardc.step.refusals import NotRecorded

LEAVES_GRADIENTS = "it leaves gradients: end it with zero_grad(), which sets them to None"

Held = Callable[[], Tensor]
"""Gives a tensor, as its holder has it now."""


@dataclass(frozen=True)
class Entry:
    """A tensor that is an entry of a dictionary, as a buffer is."""

    where: dict[Any, Any]
    key: object

    def __call__(self) -> Tensor:
        return _local(self.where[self.key])


@dataclass(frozen=True)
class State:
    """A tensor of an optimizer; `load_state_dict` replaces the dictionaries in which it lies."""

    optimizer: Optimizer
    param: Tensor
    key: object

    def __call__(self) -> Tensor:
        return _local(self.optimizer.state[self.param][self.key])


@dataclass(frozen=True)
class GroupSetting:
    """A setting of a parameter group that is a tensor: `lr`."""

    optimizer: Optimizer
    group: int
    key: str

    def __call__(self) -> Tensor:
        return _local(self.optimizer.param_groups[self.group][self.key])


def _local(value: Tensor) -> Tensor:
    return value._local if isinstance(value, ShardTensor) else value


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
        if isinstance(held, Entry) and value.is_leaf and value.grad is not None:
            raise NotRecorded(LEAVES_GRADIENTS)
        if recorder.made(value):
            name = f" {held.key!r}" if isinstance(held, (Entry, State, GroupSetting)) else ""
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
            yield from _entries(inner._buffers)
            plain = {k: v for k, v in inner._parameters.items() if not hasattr(v, "_slot")}
            yield from (Entry(inner._parameters, key) for key, v in plain.items() if v is not None)
    for optimizer in in_graph:
        for param, state in optimizer.state.items():
            yield from (State(optimizer, param, entry.key) for entry in _entries(state))
        for number, group in enumerate(optimizer.param_groups):
            names = (str(entry.key) for entry in _entries(group))
            yield from (GroupSetting(optimizer, number, name) for name in names)
    for each in objects:
        if isinstance(each, torch.amp.GradScaler):
            yield from _entries(vars(each))


def _entries(where: dict[Any, Any]) -> Iterator[Entry]:
    return (Entry(where, key) for key, value in where.items() if isinstance(value, Tensor))


def kind_of(value: Tensor) -> tuple[object, ...]:
    """The facts of a tensor that shape a graph."""
    return value.shape, value.dtype, value.stride(), value.device, value.requires_grad
