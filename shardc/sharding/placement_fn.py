"""`shard_placement_fn`: parameters cut between rows, and parameters on other meshes (experts).

A unit has one mesh. So the modules that hold such parameters, and no others, become units of their
own, inside of the unit of the call; FSDP2 keeps them in the groups of one module.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardc.runtime.tensor.extension import extends_gather
from shardc.runtime.tensor.shard_tensor import ShardTensor

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


def modules_on_other_meshes(
    modules: tuple[nn.Module, ...],
    mesh: DeviceMesh,
    placement_fn: PlacementFn | None,
    skipped: Iterable[Any],
) -> dict[DeviceMesh, list[nn.Module]]:
    """The outermost modules below `modules` whose parameters are all on one other mesh, by mesh.

    Args:
        skipped: parameters and modules that stay as they are.

    Raises:
        ValueError: a module that holds parameters of another mesh, and is one of `modules` or
            holds parameters of `mesh`, too.
    """
    if placement_fn is None:
        return {}
    ignored = set(skipped)
    found: dict[DeviceMesh, list[nn.Module]] = {}
    asked = {
        param: getattr(placement_fn(param), "mesh_info", None)
        for module in modules
        for param in module.parameters()
        if not isinstance(param, ShardTensor) and param not in ignored
    }
    meshes = {param: info.mesh for param, info in asked.items() if info and info.mesh != mesh}

    def visit(module: nn.Module, name: str) -> None:
        if module in ignored:
            return
        theirs = {meshes.get(param) for param in module.parameters() if param in asked}
        other = next(iter(theirs), None)
        own = list(module.named_parameters(recurse=False))
        runs = own or type(module).forward is not nn.Module.forward  # a ModuleList does not
        if len(theirs) == 1 and other is not None and module not in modules and runs:
            found.setdefault(other, []).append(module)
            return
        for param_name, param in own:
            if param in meshes:
                raise ValueError(
                    f"shard_placement_fn puts parameter '{name}{param_name}' on {meshes[param]}, "
                    f"but {type(module).__name__}, which holds it, is a unit on {mesh}: put the "
                    "parameters of that mesh into a module of their own, or call fully_shard on "
                    "it with that mesh"
                )
        for child_name, child in module.named_children():
            visit(child, f"{name}{child_name}.")

    for module in modules if meshes else ():
        visit(module, "")
    return {other: list(dict.fromkeys(inner)) for other, inner in found.items()}
