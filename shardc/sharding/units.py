"""Units: the modules that become units, and the parameters that each unit takes.

A unit is one or more modules whose parameters are sharded, gathered and reduced together. Units are
found bottom-up: an inner unit takes its parameters first, and the module given to `fully_shard`
takes the rest. This search only reads the model.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn

from shardc.runtime.checks.arguments import Must, check_value, checked, shown
from shardc.runtime.modules.modules import ShardedModule

UnitPolicy = Annotated[
    str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], Any],
    Must(
        "'auto', a module class, a tuple of classes, a callable",
        lambda policy: policy == "auto" or _is_classes(policy) or callable(policy),
    ),
]
"""The values of `units=` (see `fully_shard`)."""

UNIT_OPTIONS = ("reshard_after_forward", "mp_policy", "offload_policy")
_CHOICE = Annotated[
    bool | Mapping[str, Any] | None, Must("True, False, None or a dict of options for the unit")
]


@dataclass(frozen=True)
class UnitRequest:
    """One unit to make: its modules and the options that differ from the call's."""

    modules: tuple[nn.Module, ...]
    options: Mapping[str, Any]


def find_inner_units(
    root: nn.Module, policy: UnitPolicy | None, skip: Container[nn.Module]
) -> list[UnitRequest]:
    """The modules inside `root` that `policy` makes units of, inner ones first.

    Raises:
        ValueError: an unknown policy, or a policy that gives an unknown option.
    """
    if policy is None:
        return []
    choose = _chooser(root, policy)
    found = []
    for module in _post_order(root, set()):
        if module is root or module in skip:
            continue
        chosen = choose(module)
        check_value(f"what units= gives for a {type(module).__name__}", chosen, _CHOICE)
        if not chosen or isinstance(module, ShardedModule):
            continue
        options = dict(chosen) if isinstance(chosen, Mapping) else {}
        for name in options:
            if name not in UNIT_OPTIONS:
                raise ValueError(
                    f"units= gave {type(module).__name__} the option '{name}'; "
                    f"known: {', '.join(UNIT_OPTIONS)}"
                )
        found.append(UnitRequest((module,), options))
    return found


def _chooser(root: nn.Module, policy: UnitPolicy) -> Callable[[nn.Module], Any]:
    if policy == "auto":
        chosen = set(_repeated_blocks(root))
        return chosen.__contains__
    if _is_classes(policy):
        if not any(isinstance(module, policy) for module in root.modules()):  # type: ignore[arg-type]
            known = sorted({type(module).__name__ for module in root.modules()})
            raise ValueError(
                f"units={shown(policy)}: the {type(root).__name__} has no such module; it has "
                f"{', '.join(known)}. Name one of those, or leave units= out for one unit"
            )
        return lambda module: isinstance(module, policy)  # type: ignore[arg-type]
    return policy  # type: ignore[return-value]


def _is_classes(policy: Any) -> bool:
    classes = policy if isinstance(policy, tuple) else (policy,)
    return bool(classes) and all(isinstance(each, type) for each in classes)


def _repeated_blocks(root: nn.Module) -> Iterator[nn.Module]:
    """Elements of every ModuleList or Sequential of two or more modules of one class."""
    for module in root.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = list(module.children())
            if len(children) > 1 and len({type(child) for child in children}) == 1:
                yield from (child for child in children if any(True for _ in child.parameters()))


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _post_order(child, seen)
        yield module


@dataclass(frozen=True)
class Owner:
    """One place where a module holds a parameter."""

    module: nn.Module
    name: str


def owned_parameters(
    modules: Sequence[nn.Module], skip: Iterable[nn.Module]
) -> dict[nn.Parameter, list[Owner]]:
    """Every parameter below `modules`, with all places that hold it, in registration order.

    The search does not enter `skip`. Names are relative to the unit; in a unit of several modules,
    names start with the module's index.
    """
    skipped, seen = set(skip), set[nn.Module]()
    found: dict[nn.Parameter, list[Owner]] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if module in skipped or module in seen:
            return
        seen.add(module)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(param, []).append(Owner(module, prefix + name))
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    for index, module in enumerate(modules):
        visit(module, f"{index}." if len(modules) > 1 else "")
    return found


def check_sharded(where: str, model: Any) -> None:
    """Raise ValueError unless `model` is a module with a unit in it."""
    if not isinstance(model, nn.Module) or not units_of(model):
        raise ValueError(
            f"{where} takes a model that was sharded, got {shown(model)}: call fully_shard first"
        )


@checked
def units_of(model: nn.Module, root_only: bool = False) -> dict[str, ShardedModule]:
    """The units at or below `model` by name ("" for `model` itself), outermost first.

    A unit of several modules stands under the name of each module. With `root_only`, only units
    that lie in no other unit.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ShardedModule) and (module._shardc_unit.is_root or not root_only)
    }
