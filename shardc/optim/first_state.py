"""The first state of an optimizer that has not stepped, found by a step with zero gradients."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc.runtime import compat


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's parameters; the position of each is its id."""
    return list(dict.fromkeys(compat.params_of(optimizer)))


class FirstState(NamedTuple):
    """The additions of a first step: `optimizer.state`, and settings that are new in each group."""

    state: dict[Any, Any]
    settings: list[dict[str, Any]]


@torch.no_grad()
def first_state(optimizer: Optimizer) -> FirstState:
    """The state of an optimizer after a step with zero gradients, its step counts set to zero.

    The step has no weight decay: the decay would enter a momentum, and SGD counts no steps by which
    a load could tell. The optimizer keeps no state. Its gradients and the settings of its groups
    are restored. Every rank must call it.
    """
    params = parameters_of(optimizer)
    grads = [param.grad for param in params]
    settings = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for param in params:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
            if "weight_decay" in group:
                group["weight_decay"] = group["weight_decay"] * 0
        type(optimizer).step(optimizer)
        made = {key: state for key, state in optimizer.state.items() if state}
        added = [
            {key: value for key, value in group.items() if key not in kept and key != "params"}
            for group, kept in zip(optimizer.param_groups, settings, strict=True)
        ]
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group, kept, rate in zip(optimizer.param_groups, settings, rates, strict=True):
            for key in group.keys() - kept.keys() - {"params"}:
                del group[key]
            group.update(kept if rate is None else {**kept, "lr": rate})
        optimizer.state.clear()
    for entries in (*made.values(), *added):
        if isinstance(entries, dict) and "step" in entries:
            entries["step"] = entries["step"] * 0
    return FirstState(made, added)


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to each leaf: each value that is no dict, list or tuple."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(fn, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_leaves(fn, value) for value in tree)
    return fn(tree)
