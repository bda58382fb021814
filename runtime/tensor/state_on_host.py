"""The optimizer's state of a bucket's parameters waits on the host while forward and backward run.

    shardc::send_state(segment) -> sent                  # in the forward
    shardc::wait_until_state_sent(sent) -> sent
    shardc::fetch_state(sent)                            # in the backward

`sent: ()` holds a number, by which the backward finds what the forward has sent. Copies run on
streams of their own (`host_copies.stream_of`), into and from pinned memory. The wait frees the
device's memory: state tensors stay the same objects, without storage meanwhile. The backward
allocates it again, and at its end compute waits for the values. Where several forwards come before
their backwards, the last of these brings the state back.

Which tensors these are is read from the optimizers that have taken a step with a parameter of the
segment. A step and `state_dict` bring back what is still away. Small tensors (step counts), parts
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
from shardc.runtime.tensor.shard_tensor import ShardTensor

log = logging.getLogger("shardc")

_SMALL = 1024
"""Tensors of fewer bytes stay on the device."""


@dataclass(eq=False)
class _Away:
    """The state of a bucket's parameters, from its first copy until it is back.

    Attributes:
        number: what the forward that has sent it gives to the backward.
        held: tensors of the state, and where each lies on the host; there is one at least.
        sent: the event after which all is on the host.
        is_freed: whether the device's memory is freed.
        backwards: how many are to come.
        back: the event after which all is on the device again, once that has begun.
    """

    number: int
    held: list[tuple[Tensor, Tensor]]
    sent: torch.Event
    is_freed: bool = False
    backwards: int = 0
    back: torch.Event | None = None

    @property
    def device(self) -> torch.device:
        """Where the state belongs."""
        return self.held[0][0].device

    def free(self) -> None:
        """Make the device wait until all is on the host, and free its memory there."""
        if not self.is_freed:
            torch.accelerator.current_stream(self.device).wait_event(self.sent)
            for state, _ in self.held:
                state.untyped_storage().resize_(0)
            self.is_freed = True

    def bring_back(self) -> None:
        """Start to copy it back, unless it is on its way."""
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
        """Make the device wait until all is back."""
        assert self.back is not None
        torch.accelerator.current_stream(self.device).wait_event(self.back)


_users = WeakIdKeyDictionary()
"""By the memory of a segment: optimizers that have trained it, with the parameters; weak."""
_away = WeakIdKeyDictionary()
"""By the memory of a segment: its `_Away`."""
_numbers = itertools.count()
_known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""Optimizers that have taken a step: whether a warning was given that their state stays."""


# -- which tensors -------------------------------------------------------------------------------


def _remember(optimizer: Optimizer, *_: object) -> None:
    """Remember an optimizer that has taken a step: it may have state of these parameters."""
    if _is_captured():
        return  # what runs then knows the addresses of the state
    for param in _sharded(optimizer):
        users = _users.setdefault(param._local.untyped_storage(), weakref.WeakKeyDictionary())
        users.setdefault(optimizer, WeakIdKeyDictionary())[param] = True
    if optimizer not in _known:
        _known[optimizer] = False
        optimizer.register_state_dict_pre_hook(_bring_back_all)


def _is_captured() -> bool:
    """Whether a CUDA graph is captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _sharded(optimizer: Optimizer) -> Iterator[ShardTensor]:
    params = compat.params_of(optimizer)
    return (param for param in params if isinstance(param, ShardTensor))


def _users_of(segment: Tensor) -> Iterator[tuple[Optimizer, ShardTensor]]:
    """The optimizers that have trained the parameters of a segment, with each of these."""
    for optimizer, params in _users.get(segment.untyped_storage(), {}).items():
        yield from ((optimizer, param) for param in params)


def _state_of(segment: Tensor) -> Iterator[Tensor]:
    """The tensors that optimizers keep of the parameters of a segment, if they may go."""
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
    """Warn of optimizers whose state a budget counts as gone, and which keep it all the same."""
    for optimizer, param in _users_of(segment):
        if _known[optimizer]:
            continue
        kept = [value for value in optimizer.state.get(param, {}).values() if _is_large(value)]
        if kept or getattr(optimizer, "inners", None):
            _known[optimizer] = True
            log.warning(
                "memory_budget: planned with the optimizer's state on the host, but what %s keeps "
                "cannot leave the device: a step may hold more than the budget. Compile with the "
                "option 'offload_optimizer_state' False",
                type(optimizer).__name__,
            )


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() * value.element_size() >= _SMALL


# -- there and back ------------------------------------------------------------------------------


def _send_state(segment: Tensor) -> Tensor:
    """Start to copy the state of the parameters of `segment: (S,)` to the host, if it is here."""
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
    """Make the device wait until the state is on the host, and free its memory there: the same
    tensor."""
    for _, away in _numbered(sent):
        away.free()
    return sent


def _fetch_state(sent: Tensor) -> None:
    """Start to copy it back, if no other backward is to come; it is there when this one ends."""
    for memory, away in _numbered(sent):
        away.backwards -= 1
        if not away.backwards:
            away.bring_back()
            arrive = functools.partial(_arrive, memory, away)
            compat.when_outermost_backward_ends(arrive) if compat.in_backward() else arrive()


def _numbered(sent: Tensor) -> list[tuple[UntypedStorage, _Away]]:
    """The state that a forward has sent, if it has not returned yet, and the memory of the
    segment."""
    number = int(sent)
    return [(memory, away) for memory, away in _away.items() if away.number == number]


def _arrive(memory: UntypedStorage, away: _Away) -> None:
    """Make the device wait until the state on its way back is there, and forget it."""
    away.wait()
    if _away.get(memory) is away:
        del _away[memory]


def _bring_back_all(optimizer: Optimizer, *_: object) -> None:
    """Bring the state of an optimizer back to the device, for ops queued there from now on."""
    if torch.compiler.is_compiling() or not _away:
        return
    for param in _sharded(optimizer):
        memory = param._local.untyped_storage()
        if (away := _away.get(memory)) is not None:
            away.bring_back()
            _arrive(memory, away)


_library = torch.library.Library("shardc", "FRAGMENT")
_library.define("send_state(Tensor segment) -> Tensor")
_library.define("wait_until_state_sent(Tensor(a) sent) -> Tensor(a)")
_library.define("fetch_state(Tensor(a!) sent) -> ()")  # so that nobody takes it for dead code
for _name, _implementation, _fake in (
    ("send_state", _send_state, lambda _: torch.empty((), dtype=torch.int64, device="cpu")),
    ("wait_until_state_sent", _wait_until_state_sent, lambda sent: sent),
    ("fetch_state", _fetch_state, lambda sent: None),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardc::{_name}", _fake, lib=_library)
