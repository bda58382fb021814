"""`nn.Module` and optimizers: their caches, and hooks that torch has no way to set."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.optim import Optimizer

from shardc.runtime.compat.dynamo import inline_only

Held: TypeAlias = Any
"""A value that a module holds under a name, or the state that it gives to `copy`."""

Memo: TypeAlias = dict[int, Held]
"""The copies that `copy.deepcopy` has made so far, by the id of the original."""


def is_module_call(frame: FrameType) -> bool:
    """Whether a frame is torch's call of a module, around its forward (2.13)."""
    names = ("_wrapped_call_impl", "_call_impl")
    return frame.f_code.co_name in names and frame.f_globals.get("__name__") == nn.Module.__module__


def is_replicated(module: nn.Module) -> bool:
    """Whether DDP or `torch.distributed._composable.replicate` owns `module`."""
    from torch.distributed._composable.contract import _get_registry

    names = _get_registry(module) or {}
    return isinstance(module, nn.parallel.DistributedDataParallel) or "replicate" in names


def mark_as_sharded(module: nn.Module, state: object) -> None:
    """Mark `module`: torch's own `fully_shard` and `replicate` refuse it.

    `torch.distributed.fsdp.fully_shard.state(module)` gives `state`.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

    vars(module).setdefault(REGISTRY_KEY, {}).setdefault("fully_shard", RegistryItem())
    vars(module).setdefault(STATE_KEY, {})[inspect.unwrap(fsdp.fully_shard)] = state


def params_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return (param for group in optimizer.param_groups for param in group["params"])


@functools.cache
def after_zero_grad(call: Callable[[Iterable[Tensor]], None]) -> None:
    """Call `call` with the parameters after `zero_grad` of any optimizer or module.

    torch has no hook for it; the two methods are wrapped, once for each `call`.
    """

    def wrapped(
        method: Callable[..., None], params: Callable[[Any], Iterable[Tensor]]
    ) -> Callable[..., None]:
        @functools.wraps(method)
        def zero_grad(self: object, *args: object, **kwargs: object) -> None:
            method(self, *args, **kwargs)
            call(params(self))

        return zero_grad

    optimizer, module = torch.optim.Optimizer, nn.Module
    optimizer.zero_grad = wrapped(optimizer.zero_grad, params_of)  # type: ignore[method-assign]
    module.zero_grad = wrapped(module.zero_grad, nn.Module.parameters)  # type: ignore[method-assign]


def become(module: nn.Module, cls: type) -> None:
    """Make a module an instance of `cls`, a subclass of its present class."""
    module.__class__ = cls


def put_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Put `param` into a module, past its properties and checks."""
    module._parameters[name] = param


def state_of(module: nn.Module) -> Held:
    """The attributes that `copy` copies, without the function that `module.compile` made.

    Modules with parametrizations are copied, too, though their own `__getstate__` raises.
    """
    if nn.utils.parametrize.is_parametrized(module):
        return nn.Module.__getstate__(module)
    return module.__getstate__()


@contextmanager
def without_parameters(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Hide some of a module's parameters from its own methods for a while."""
    hidden, parameters = set(names), module._parameters
    module.__dict__["_parameters"] = {n: p for n, p in parameters.items() if n not in hidden}
    try:
        yield
    finally:
        parameters.update(module._parameters)
        module.__dict__["_parameters"] = parameters


def rnn_weight_references(module: nn.Module) -> list[weakref.ref[nn.Parameter] | None]:
    """The weak references that `nn.LSTM` and other RNNs keep to their weights."""
    return list(module._flat_weight_refs) if isinstance(module, nn.RNNBase) else []


def forget_recomputed_weights(module: nn.Module) -> None:
    """Drop the weights that pruning, the old `weight_norm` and `spectral_norm` have computed.

    Such a weight is derived from parameters and keeps them in use. It is set anew before each
    forward.
    """
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (SpectralNorm, WeightNorm)):
            vars(module).pop(hook.name, None)
        elif isinstance(hook, BasePruningMethod):
            vars(module).pop(hook._tensor_name, None)


def when_swapped(swap: Callable[[nn.Module, str, object, Callable[[], object]], object]) -> None:
    """Make `torch.func.functional_call` put values into modules by `swap`.

    `swap` gets the module, a name, the value, and a function that swaps as torch does.
    """
    from torch.nn.utils import _named_member_accessor as accessor

    plain, missing = accessor.swap_tensor, accessor._MISSING

    @functools.wraps(plain)
    def swap_tensor(
        module: nn.Module, name: str, tensor: Held, allow_missing: bool = False
    ) -> Held:
        def as_torch() -> object:
            return plain(module, name, tensor, allow_missing)

        return as_torch() if tensor is missing else swap(module, name, tensor, as_torch)

    accessor.swap_tensor = inline_only(swap_tensor)


def check_reparametrizing(check: Callable[[nn.Module, str], None]) -> None:
    """Call `check(module, name)` before a parametrization is added or removed.

    The old parametrizations take parameters out of a module's dict, which no module notices. The
    new parametrizations remove a property from a module's class.
    """
    from torch.nn.utils import parametrize
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    def check_first(owner: object, name: str, known_by: str = "") -> None:
        """Wrap a function that takes a module and a name, or a hook with the name and a module."""
        call: Callable[..., object] = getattr(owner, name)
        bound = inspect.signature(call).bind

        @functools.wraps(call)
        def run(*args: object, **kwargs: object) -> object:
            first, second, *_ = bound(*args, **kwargs).arguments.values()
            check(*((second, getattr(first, known_by)) if known_by else (first, second)))
            return call(*args, **kwargs)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(run) if is_static else run)

    check_first(WeightNorm, "apply")
    check_first(WeightNorm, "remove", "name")
    check_first(SpectralNorm, "remove", "name")
    check_first(BasePruningMethod, "remove", "_tensor_name")
    check_first(parametrize, "register_parametrization")
    check_first(parametrize, "remove_parametrizations")


def forget_rnn_weights(module: nn.Module) -> None:
    """Drop the weights that `nn.LSTM` and other RNNs cache."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = []
        module._flat_weight_refs = []


def rnn_attributes() -> dict[str, object]:
    """Properties that read the cached weights of `nn.LSTM` and other RNNs from their attributes.

    The weights are not flattened for cuDNN: they lie in the flat memory of a bucket.
    """

    def weights(rnn: nn.RNNBase) -> list[Tensor | None]:
        return [getattr(rnn, name, None) for name in rnn._flat_weights_names]

    def references(rnn: nn.RNNBase) -> list[None]:
        return [None] * len(rnn._flat_weights_names)

    def ignore(rnn: nn.RNNBase, value: object) -> None: ...

    def note(rnn: nn.RNNBase, value: object) -> None:
        vars(rnn)["_flat_weight_refs"] = None  # a copy lacks it, and __getstate__ deletes it

    return {
        "_flat_weights": property(weights, ignore),
        "_flat_weight_refs": property(references, note),
        "flatten_parameters": lambda rnn: None,
    }


def rewrites_loaded_state(module: nn.Module) -> bool:
    """Whether a module's own code may rename or convert the values that `load_state_dict` gives it.

    Looks at hooks and overrides by their private names. Hooks of torch's activation wrappers only
    add a prefix, and overrides of torch's layers only read older versions.
    """
    if not type(module)._load_from_state_dict.__module__.startswith("torch."):
        return True
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    known = "torch.distributed.algorithms."
    return not all(getattr(hook, "__module__", "").startswith(known) for hook in hooks)


def is_watched(optimizer: Optimizer, known: Iterable[Callable[..., object]]) -> bool:
    """Whether a call of `optimizer.step` runs a function beside torch's own and `known` hooks.

    torch's schedulers wrap `step` only to see that it was called once.
    """
    from torch.optim import optimizer as of_torch

    hooks = [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *of_torch._global_optimizer_pre_hooks.values(),
        *of_torch._global_optimizer_post_hooks.values(),
    ]
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return True
    return any(hook not in known for hook in hooks)
