"""The host holds the optimizer state of a bucket's parameters while forward and backward run.

The forward sends the state, and waits until it is sent; the backward fetches it. `sent: ()` holds a
number, by which the backward finds the state that the forward sent. Copies run on streams of their
own (`host_copies.stream_of`), into and from pinned memory. The wait frees the state's memory on the
device: state tensors stay the same objects, with an empty storage. The backward allocates the
memory again, and at the backward's end compute waits for the values. If several forwards come
before their backwards, the last backward brings the state back.

The state comes from the optimizers that have taken a step with a parameter of the segment. A step
and `state_dict` bring back any state that is still on the host. Small tensors (step counts), parts
of larger storages and subclasses (quantised states) stay on the device.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from shardc.runtime import compat
from shardc.runtime.checks.optimizer_hooks import Turn, after_steps, before_steps
from shardc.runtime.comm.host_copies import stream_of
from shardc.runtime.comm.ops import define_op
from shardc.runtime.tensor.shard_tensor import ShardTensor

log = logging.getLogger("shardc")

_SMALL = 1024
"""Tensors of fewer bytes stay on the device."""


@dataclass(eq=False)
class _Away:
    """The state of a bucket's parameters, from its first copy until it is back.

    Attributes:
        number: the number that the sending forward gives to the backward.
        held: at least one tensor of the state, each with its copy on the host.
        sent: the event after which all values are on the host.
        is_freed: whether the state's memory on the device is freed.
        backwards: the number of backwards still to come.
        back: the event after which all values are on the device; None until the copy back starts.
    """

    number: int
    held: list[tuple[Tensor, Tensor]]
    sent: torch.Event
    is_freed: bool = False
    backwards: int = 0
    back: torch.Event | None = None

    @property
    def device(self) -> torch.device:
        """The device of the state."""
        return self.held[0][0].device

    def free(self) -> None:
        """Make the device wait until the state is on the host, and free its device memory."""
        if not self.is_freed:
            torch.accelerator.current_stream(self.device).wait_event(self.sent)
            for state, _ in self.held:
                state.untyped_storage().resize_(0)
            self.is_freed = True

    def bring_back(self) -> None:
        """Start to copy the state back to the device, unless the copy has started."""
        if self.back is not None:
            return
        if not self.is_freed:
            self.back = self.sent
            return
        for state, host in self.held:
            state.untyped_storage().resize_(host.untyped_storage().nbytes())
        stream = stream_of(self.device, "in")
        with stream:
            for state, host in self.held:
                state.copy_(host, non_blocking=True)
                state.record_stream(stream)
            self.back = stream.record_event()

    def wait(self) -> None:
        """Make the device wait until the state is back."""
        assert self.back is not None
        torch.accelerator.current_stream(self.device).wait_event(self.back)


_users = WeakIdKeyDictionary()
"""By the storage of a segment: the optimizers that have trained it, with the parameters; weak."""
_away = WeakIdKeyDictionary()
"""By the storage of a segment: its `_Away`."""
_numbers = itertools.count()
_known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""Optimizers that have taken a step; True after a warning that their state stays on the device."""


# -- which tensors -------------------------------------------------------------------------------


def _remember(optimizer: Optimizer, *_: object) -> None:
    """Remember an optimizer that has taken a step: it may keep state of its sharded parameters."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # the graph has the addresses of the state
    for param in _sharded(optimizer):
        users = _users.setdefault(param._local.untyped_storage(), weakref.WeakKeyDictionary())
        users.setdefault(optimizer, WeakIdKeyDictionary())[param] = True
    if optimizer not in _known:
        _known[optimizer] = False
        optimizer.register_state_dict_pre_hook(_bring_back_all)


def _sharded(optimizer: Optimizer) -> Iterator[ShardTensor]:
    params = compat.params_of(optimizer)
    return (param for param in params if isinstance(param, ShardTensor))


def _users_of(segment: Tensor) -> Iterator[tuple[Optimizer, ShardTensor]]:
    """The optimizers that have trained parameters of a segment, with each parameter."""
    for optimizer, params in _users.get(segment.untyped_storage(), {}).items():
        yield from ((optimizer, param) for param in params)


def _state_of(segment: Tensor) -> Iterator[Tensor]:
    """The state tensors of the parameters of a segment that may leave the device."""
    seen = set[int]()
    for optimizer, param in _users_of(segment):
        if param not in optimizer.state:
            continue
        for value in optimizer.state[param].values():
            tensor = value._local if isinstance(value, ShardTensor) else value
            if type(tensor) is Tensor and tensor.device == segment.device:
                storage = tensor.untyped_storage()
                is_alone = storage.nbytes() == tensor.nbytes >= _SMALL
                if is_alone and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    yield tensor


def _warn_of_what_stays(segment: Tensor) -> None:
    """Warn of optimizers that keep state on the device although the budget counts it as gone."""
    for optimizer, param in _users_of(segment):
        if _known[optimizer]:
            continue
        state = optimizer.state.get(param, {}).values()
        is_kept = any(isinstance(value, Tensor) and value.nbytes >= _SMALL for value in state)
        if is_kept or getattr(optimizer, "inners", None):
            _known[optimizer] = True
            log.warning(
                "memory_budget: planned with the optimizer's state on the host, but the state of "
                "%s cannot leave the device: a step may hold more than the budget. Compile with "
                "the option 'offload_optimizer_state' False",
                type(optimizer).__name__,
            )


# -- there and back ------------------------------------------------------------------------------


def _send_state(segment: Tensor) -> Tensor:
    """Start to copy the state of `segment: (S,)`'s parameters to the host, unless it is there."""
    if segment.device.type == "cpu":
        return torch.tensor(-1)
    before_steps.call(Turn.ON_HOST, _bring_back_all)
    after_steps.call(Turn.ON_HOST, _remember)
    memory = segment.untyped_storage()
    away: _Away | None = _away.get(memory)
    if away is not None and away.back is not None:  # a backward was interrupted, or runs this
        _arrive(memory, away)
        away = None
    if away is None:
        states = list(_state_of(segment))
        if not states:
            _warn_of_what_stays(segment)
            return torch.tensor(-1)
        away = _away[memory] = _sent(states)
    away.backwards += 1
    return torch.tensor(away.number)


def _sent(states: list[Tensor]) -> _Away:
    """Start to copy tensors to the host."""
    held = [(each, torch.empty_like(each, device="cpu", pin_memory=True)) for each in states]
    stream = stream_of(states[0].device, "out")
    with stream:
        for state, host in held:
            host.copy_(state, non_blocking=True)
        return _Away(next(_numbers), held, stream.record_event())


def _wait_until_state_sent(sent: Tensor) -> Tensor:
    """Make the device wait until the state is on the host, and free its device memory."""
    for _, away in _numbered(sent):
        away.free()
    return sent


def _fetch_state(sent: Tensor) -> None:
    """Start to copy the state back in the last backward; compute waits for it at the end."""
    for memory, away in _numbered(sent):
        away.backwards -= 1
        if not away.backwards:
            away.bring_back()
            arrive = functools.partial(_arrive, memory, away)
            compat.when_outermost_backward_ends(arrive) if compat.in_backward() else arrive()


def _numbered(sent: Tensor) -> list[tuple[UntypedStorage, _Away]]:
    """The storage of a segment and the state that a forward sent; none if the state is back."""
    number = int(sent)
    return [(memory, away) for memory, away in _away.items() if away.number == number]


def _arrive(memory: UntypedStorage, away: _Away) -> None:
    """Make the device wait until the state is back, and forget its `_Away`."""
    away.wait()
    if _away.get(memory) is away:
        del _away[memory]


def _bring_back_all(optimizer: Optimizer, *_: object) -> None:
    """Bring the state of an optimizer back to the device, for ops queued from now on."""
    if torch.compiler.is_compiling() or not _away:
        return
    for param in _sharded(optimizer):
        memory = param._local.untyped_storage()
        if (away := _away.get(memory)) is not None:
            away.bring_back()
            _arrive(memory, away)


define_op(
    "send_state(Tensor segment) -> Tensor",
    _send_state,
    lambda _: torch.empty((), dtype=torch.int64, device="cpu"),
)
define_op(
    "wait_until_state_sent(Tensor(a) sent) -> Tensor(a)", _wait_until_state_sent, lambda sent: sent
)
define_op("fetch_state(Tensor(a!) sent) -> ()", _fetch_state)  # `!`: no dead code to passes
