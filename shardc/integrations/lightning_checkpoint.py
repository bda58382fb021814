"""Checkpoints in Lightning's format: a folder of DCP with `meta.pt`, or one file of full tensors.

Lightning's own functions look for DTensors; the functions here take models that `fully_shard`
sharded. Checkpoints of both kinds are read at any number of ranks, and Lightning's strategy for
FSDP2 reads and writes the same two kinds.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from shardc.sharding.units import units_of
from shardc.state.names import rekey_optimizer_state_dict
from shardc.state.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

META = "meta.pt"
"""The file of a sharded checkpoint with all entries that are no model and no optimizer."""


def holds_units(model: object) -> bool:
    """Whether `fully_shard` was called on the module or on a module inside."""
    return isinstance(model, nn.Module) and bool(units_of(model))


def saving(full: bool) -> StateDictOptions:
    """Options to save sharded states on the host, or full states on the host of rank 0."""
    return StateDictOptions(full_state_dict=full, cpu_offload=True)


def loading(strict: bool) -> StateDictOptions:
    """Options to load full states that every rank has read."""
    return StateDictOptions(full_state_dict=True, strict=strict)


def model_of(state: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """The key and the model of the one sharded model in a state."""
    found = [(key, value) for key, value in state.items() if holds_units(value)]
    if len(found) != 1:
        raise ValueError(
            f"a checkpoint holds one sharded model, but the state {list(state)} has {len(found)}: "
            "set the model up first (fabric.setup), and save each model to a path of its own"
        )
    return found[0]


def write_checkpoint(
    path: Path, tensors: Mapping[str, Any], rest: Mapping[str, Any], full: bool, rank: int
) -> None:
    """Write a checkpoint: a folder of parts with `rest` in `meta.pt`, or all in one file."""
    if full and path.is_dir() and not (path / META).is_file():
        raise IsADirectoryError(f"{path} is a folder that holds no checkpoint")
    if rank == 0 and path.exists() and full == path.is_dir():
        shutil.rmtree(path) if full else path.unlink()
    if not full:
        dcp.save(dict(tensors), checkpoint_id=path)
    if rank == 0:
        torch.save({**tensors, **rest} if full else dict(rest), path if full else path / META)


def read(
    path: Path, state: Mapping[str, Any], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load the model and the optimizers of `state` from a checkpoint; return its other entries."""
    key, model = model_of(state)
    optimizers = {k: v for k, v in state.items() if isinstance(v, Optimizer)}
    if (path / META).is_file():
        _read_folder(path, key, model, optimizers, strict)
        rest: dict[str, Any] = torch.load(path / META, weights_only=weights_only)
        return rest
    if not path.is_file():
        raise ValueError(f"{path} is no checkpoint: neither a folder with {META} nor a file")
    rest = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    set_model_state_dict(model, rest.pop(key), options=loading(strict))
    listed = rest.get("optimizer_states", [])  # in a checkpoint of a Trainer
    for at, (name, optimizer) in enumerate(optimizers.items()):
        saved = rest.pop(name) if name in rest else listed[at]
        named = rekey_optimizer_state_dict(saved, "names", model, optimizer)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=named, options=loading(strict))
    return rest


def _read_folder(
    path: Path, key: str, model: nn.Module, optimizers: Mapping[str, Optimizer], strict: bool
) -> None:
    state = {key: get_model_state_dict(model)}
    planner = None if strict else dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=path, planner=planner)
    options = StateDictOptions(strict=strict)
    set_model_state_dict(model, state[key], options=options)
    for name, optimizer in optimizers.items():
        loaded = {name: get_optimizer_state_dict(model, optimizer)}
        dcp.load(loaded, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=loaded[name], options=options)
