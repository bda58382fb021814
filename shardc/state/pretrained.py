"""`load_pretrained` reads safetensors files straight into segments.

A rank's part of a parameter is an interval: at most a ragged head, whole rows and a ragged tail of
the tensor in the file. A rank reads these boxes only, each into its place in the segment. So no
rank ever holds a whole parameter. The only messages are a check that all ranks can load.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardc.runtime.checks.arguments import checked
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.sharding.materialize import materialize
from shardc.state.model_state import listing, model_state, raise_for
from shardc.state.names import canonical_name, parameter_names
from shardc.state.ranks import ModelRanks
from shardc.state.values import write_value

_NAMES = ("model.safetensors.index.json", "model.safetensors")


class LoadedKeys(NamedTuple):
    """The keys that `strict=False` passed over, in the form of `nn.Module.load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@checked
def load_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> LoadedKeys:
    """Load safetensors into a model, sharded or not; each rank reads only its own parts.

    Every rank calls it. A model on meta gets memory first. Values are converted to the dtype of the
    model. One name of a tied parameter in the files is enough. Modules compute their buffers that
    are not saved and lie on meta, by the `_init_weights` of transformers or by `reset_parameters`.

    Args:
        model: usually the model given to `fully_shard`.
        folder: a folder with `model.safetensors`, or with the files that
            `model.safetensors.index.json` names; or the path of one of these two files, or of
            another file of safetensors.
        strict: whether a name that only the model or only the files have is an error.
        rename: gives the model's name for a name in the files.

    Returns:
        `missing_keys` and `unexpected_keys`.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: none of the files is there.
        RuntimeError: names are missing or unexpected, a shape differs, or another rank cannot load.
            The model is unchanged then.
        ValueError: nothing computes a value on meta that no file has.
    """
    ranks, error, plan = ModelRanks.of(model), None, None
    inits: dict[nn.Module, Callable[[], Any]] = {}
    try:
        files = _tensors_of(Path(folder), rename or str)
        plan = _planned(model, files, strict)
        inits = _to_initialise(model, plan.keys.missing_keys)
    except Exception as raised:
        error = raised
    ranks.agree(error)
    assert plan is not None
    if any(state.is_meta for state in (*model.parameters(), *model.buffers())):
        # Files fill the modules that are not in `inits`.
        materialize(model, init_fn=lambda module: inits[module]() if module in inits else None)
    state = model_state(model)
    for path in dict.fromkeys(source.path for source in plan.sources.values()):
        with _opened(path) as file:
            for name, source in plan.sources.items():
                if source.path == path:
                    _fill(state[name], file, source)
    return plan.keys


# -- tensors in the files --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """A tensor in a file."""

    path: Path
    name: str
    shape: tuple[int, ...]


def _opened(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError("load_pretrained needs safetensors: pip install safetensors") from error
    return safe_open(path, framework="pt")


def _tensors_of(folder: Path, rename: Callable[[str], str]) -> dict[str, _Source]:
    """All tensors of the files, by the model's names."""
    path = folder
    if folder.is_dir():
        path = next((folder / name for name in _NAMES if (folder / name).is_file()), folder)
    if not path.is_file():
        raise FileNotFoundError(f"load_pretrained: {folder} has neither {' nor '.join(_NAMES)}")
    paths = [path]
    if path.suffix == ".json":
        weight_map = json.loads(path.read_text())["weight_map"]
        paths = [path.parent / name for name in dict.fromkeys(weight_map.values())]
    found: dict[str, _Source] = {}
    for each in paths:
        with _opened(each) as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                shape = tuple(file.get_slice(name).get_shape())
                found[rename(name)] = _Source(each, name, shape)
    return found


# -- names and sources -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """The source in the files of each name of the model; a tied parameter has one source."""

    sources: dict[str, _Source]
    keys: LoadedKeys


def _planned(model: nn.Module, files: dict[str, _Source], strict: bool) -> _Plan:
    state = {name: value for name, value in model_state(model).items() if isinstance(value, Tensor)}
    first = {name: names[0] for names in parameter_names(model).values() for name in names}
    sources: dict[str, _Source] = {}
    problems: list[str] = []
    for name, source in files.items():
        if name in state:
            sources.setdefault(first.get(name, name), source)
            if source.shape != tuple(state[name].shape):
                problems.append(
                    f"size mismatch for '{name}': it has shape {tuple(state[name].shape)}, "
                    f"{source.path.name} has {source.shape}"
                )
    missing = [name for name in state if first.get(name, name) not in sources]
    unexpected = [name for name in files if name not in state]
    if strict and missing:
        problems.append(f"missing in the files: {listing(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected in the files: {listing(unexpected)}")
    hint = "" if not strict else "; strict=False passes over names, rename= maps them"
    raise_for(f"load_pretrained into a {_class_of(model)}{hint}", problems)
    return _Plan(sources, LoadedKeys(missing, unexpected))


def _class_of(module: nn.Module) -> str:
    return getattr(module, "_shardc_class", type(module)).__name__


# -- reading ---------------------------------------------------------------------------------------


@torch.no_grad()
def _fill(target: Tensor, file: Any, source: _Source) -> None:
    """Read this rank's part of the target, in the target's dtype and on its device."""
    if not isinstance(target, ShardTensor) or not source.shape:
        if not isinstance(target, ShardTensor) or target._local.numel():
            write_value(target, read_box(file, source.name, None).to(target.dtype))
        return
    local, (start, _) = target._local, target._shard_spec.interval()
    for box in target._boxes():
        if box.numel:
            at = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            place = local[box.start - start : box.start - start + box.numel]
            place.copy_(read_box(file, source.name, at).reshape(-1))


def read_box(file: Any, name: str, at: tuple[slice, ...] | None) -> Tensor:
    """A part of a tensor in a file, or all of it."""
    tensor: Tensor = file.get_tensor(name) if at is None else file.get_slice(name)[at]
    return tensor


# -- values that no file has -----------------------------------------------------------------------


def _to_initialise(model: nn.Module, missing: list[str]) -> dict[nn.Module, Callable[[], Any]]:
    """Modules with values on meta that no file has, and the function that initialises each.

    Raises:
        ValueError: nothing initialises a module.
    """
    saved, lacking = set(model.state_dict()), set(missing)
    states = [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]
    found: dict[nn.Module, Callable[[], Any]] = {}
    for key, value in states:
        name = canonical_name(model, key)
        if not value.is_meta or (key in saved and name not in lacking):
            continue
        module = model.get_submodule(key.rpartition(".")[0])
        init = _initialiser(model, module)
        if init is None:
            raise ValueError(
                f"load_pretrained: '{name}' is on meta, the files do not have it, and "
                f"{_class_of(module)} has no reset_parameters() that computes it: define it, or "
                "build modules that are not in the files off meta"
            )
        found[module] = init
    return found


def _initialiser(model: nn.Module, module: nn.Module) -> Callable[[], Any] | None:
    """The function that gives a module its values where the files do not."""
    for each in model.modules():
        init = getattr(each, "_init_weights", None)
        if callable(init):
            return partial(init, module)
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None
