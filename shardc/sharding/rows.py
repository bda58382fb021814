"""Parameters that are cut between rows, not by intervals of any length."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from shardc.runtime.tensor.extension import extends_gather

PlacementFn = Callable[[nn.Parameter], Any]
"""The value of `shard_placement_fn=` (see `fully_shard`)."""


def is_cut_by_rows(name: str, param: nn.Parameter, placement_fn: PlacementFn | None) -> bool:
    """Whether a parameter is cut between rows: `placement_fn` asks for it, or its subclass does.

    Raises:
        TypeError, ValueError: `placement_fn` gives no `Shard`, or a dim that does not exist.
        NotImplementedError: `placement_fn` gives another dim for such a subclass.
    """
    given: Any = None if placement_fn is None else placement_fn(param)
    on_a_mesh = hasattr(given, "mesh_info")  # torch's ShardPlacementResult
    asked, extends = given.placement if on_a_mesh else given, extends_gather(param)
    if asked is None:
        return extends
    what = f"shard_placement_fn gives {asked!r} for parameter '{name}' of {list(param.shape)}"
    if not isinstance(asked, Shard):
        raise TypeError(f"{what}: it must be a Shard of torch.distributed.tensor, or None")
    if not -param.dim() <= asked.dim < param.dim():
        raise ValueError(f"{what}, which has no dim {asked.dim}")
    by_rows = asked.dim in (0, -param.dim())
    if extends and not by_rows:
        raise NotImplementedError(
            f"{what}, a {type(param).__name__}, which is cut along dim 0 only: give None for it"
        )
    return extends or (by_rows and not on_a_mesh)
