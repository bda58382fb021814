"""Whole tensors from a generator into a sharded model, one at a time.

If only the first rank has the generator, it sends each tensor to all ranks; each keeps its part.
A rank holds one whole tensor beside the one that the generator made.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardc.runtime.checks.arguments import checked, shown
from shardc.runtime.checks.words import plural
from shardc.runtime.watch.entering import told
from shardc.state.model_state import differences, listing, model_state
from shardc.state.names import parameter_names
from shardc.state.pretrained import LoadedKeys
from shardc.state.ranks import ModelRanks
from shardc.state.values import write_value


class _Header(NamedTuple):
    """The facts of the next tensor. Without a name the stream ends; an `error` says why."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    error: str = ""


_END = _Header("", (), torch.uint8)


@checked
def load(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]] | None, *, strict: bool = True
) -> LoadedKeys:
    """Load whole tensors into a model, sharded or not, one at a time. Every rank must call it.

    Either all ranks give `tensors`, or only the first rank; the others then give None. Values are
    converted to the dtype of the model. One name of a tied parameter is enough.

    Args:
        model: a model with memory.
        tensors: pairs of a name of the model's state dict and a whole tensor.
        strict: whether a name that only the model or only `tensors` has is an error.

    Returns:
        `missing_keys` and `unexpected_keys`.

    Raises:
        ValueError: some but not all ranks give tensors, and the first rank does not; or a parameter
            is on the meta device. Nothing has changed then.
        RuntimeError: a shape differs, a name is unexpected or missing, or the generator of another
            rank failed. Tensors before this one have been written.
    """
    ranks = ModelRanks.of(model)
    error: Exception | None = None
    state = {name: value for name, value in model_state(model).items() if isinstance(value, Tensor)}
    on_meta = [name for name, value in state.items() if value.is_meta]
    if on_meta:
        error = ValueError(
            f"load: {listing(on_meta)} on the meta device: give the model memory first, "
            "shardc.materialize(model)"
        )
    elif tensors is None and ranks.is_first:
        error = ValueError("load: the first rank gave None: it must give the tensors to load")
    ranks.agree(error)
    own = _everyone_has(ranks, tensors is not None)
    stream = iter(tensors or ()) if own else _sent(ranks, tensors)
    loaded, error = _Loaded(model, state, strict), None
    try:
        for name, value in stream:
            loaded.write(name, value)
            del value
        loaded.check_missing()
    except Exception as raised:
        error = raised
    ranks.agree(error, "the load ended early")
    return loaded.keys()


class _Loaded:
    """The names that were loaded so far."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor], strict: bool) -> None:
        self.model, self.state, self.strict = model, state, strict
        tied = parameter_names(model).values()
        self.first = {name: names[0] for names in tied for name in names}
        self.done: set[str] = set()
        self.unexpected: list[str] = []

    def write(self, name: str, value: Tensor) -> None:
        target = self.state.get(name)
        if target is None:
            self.unexpected.append(name)
            problems = [f"unexpected: '{name}' (strict=False skips it)"] if self.strict else []
        else:
            problems = differences(name, target, value, local=False)
        if problems:
            raise RuntimeError(
                f"load into a {type(self.model).__name__}: {problems[0]}. "
                f"{plural(len(self.done), 'tensor')} before it: written already"
            )
        if target is not None:
            write_value(target, value)
            self.done.add(self.first.get(name, name))

    def keys(self) -> LoadedKeys:
        missing = [name for name in self.state if self.first.get(name, name) not in self.done]
        return LoadedKeys(missing, self.unexpected)

    def check_missing(self) -> None:
        missing = self.keys().missing_keys
        if missing and self.strict:
            raise RuntimeError(
                f"load into a {type(self.model).__name__}: missing: {listing(missing)} "
                "(strict=False leaves them as they are). All others have been written"
            )


def _everyone_has(ranks: ModelRanks, mine: bool) -> bool:
    """Whether all ranks give tensors."""
    everyone = mine
    for group in ranks.groups:
        everyone = all(told(everyone, "a check of the tensors to load", group))
    return everyone


def _sent(
    ranks: ModelRanks, tensors: Iterable[tuple[str, Tensor]] | None
) -> Iterator[tuple[str, Tensor]]:
    """The first rank's tensors, on every rank."""
    own = iter(tensors) if ranks.is_first and tensors is not None else iter(())
    while True:
        header, value = _next(own) if ranks.is_first else (_END, None)
        header = ranks.broadcast_object(header)
        if header.error:
            raise RuntimeError(f"the first rank's tensors: {header.error}")
        if not header.name:
            return
        value = ranks.broadcast(value, header.shape, header.dtype)
        yield header.name, value
        del value


def _next(own: Iterator[tuple[str, Any]]) -> tuple[_Header, Tensor | None]:
    try:
        pair = next(own, None)
        if pair is None:
            return _END, None
        name, value = pair[0], pair[1]
        if not isinstance(value, Tensor):
            return _END._replace(error=f"'{name}' must be a tensor, got {shown(value)}"), None
        return _Header(name, tuple(value.shape), value.dtype), value.detach()
    except Exception as error:
        return _END._replace(error=f"{type(error).__name__}: {error}"), None
