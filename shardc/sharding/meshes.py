"""Parameters that `shard_placement_fn` puts on other meshes than that of the call, as experts are.

A unit has one mesh. So the modules that hold such parameters, and no others, become units of their
own, inside of the unit of the call; FSDP2 keeps them in the groups of one module.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.sharding.rows import PlacementFn


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
