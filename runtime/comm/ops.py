"""Ops of shardc: each has a schema, a function that runs it, and one for results without data."""

from collections.abc import Callable, Sequence

import torch

_library = torch.library.Library("shardc", "FRAGMENT")


def define_op(
    schema: str,
    run: Callable[..., object],
    like: Callable[..., object] = lambda *_: None,
    backward: Callable[..., object] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Define the op `shardc::...` of a schema; a trace calls `like` in the place of `run`."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardc::{name}", like, lib=_library)
    if backward is not None:
        torch.library.register_autograd(f"shardc::{name}", backward, lib=_library)
