"""DTensors, and the functions of torch that make them, which ask shardc for its own placements."""

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from typing_extensions import TypeIs

from shardc.runtime.compat.dynamo import tell_later

Placements: TypeAlias = "Sequence[Placement] | None"

Given: TypeAlias = Any
"""An argument or a result of a function of torch."""


def is_dtensor(value: object) -> TypeIs[DTensor]:
    """Whether `value` is a DTensor of torch; a ShardTensor passes as one to `isinstance` only."""
    return issubclass(type(value), DTensor)


def local_of(tensor: DTensor) -> Tensor:
    """This rank's value of a DTensor, without gradient (stubs give `detach` a plain type)."""
    return cast(DTensor, tensor.detach()).to_local()


def dtensor_parts(tensor: Tensor) -> tuple[Tensor, DTensorSpec] | None:
    """The local value and the spec of a DTensor; None for other tensors."""
    return (tensor._local_tensor, tensor._spec) if is_dtensor(tensor) else None


def make_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor of a local value and a spec."""
    return DTensor(local, spec, requires_grad=False)


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a contiguous DTensor of `shape`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))


# -- functions that make DTensors ----------------------------------------------------------------


Ints: TypeAlias = tuple[int, ...]
Boxes: TypeAlias = tuple[Ints, Ints]
"""The shape of a part, and its offsets in the whole tensor."""
BoxOf: TypeAlias = Callable[[Ints, DeviceMesh, Sequence[Placement]], Boxes]


class DTensorKind(Protocol):
    """A kind of tensor that passes as a DTensor, and the placements for which torch makes it."""

    def is_placed(self, placements: Placements) -> bool:
        """Whether `placements` contains a placement of this kind."""

    def is_kind(self, value: object) -> bool:
        """Whether `value` is a tensor of this kind."""

    def distribute(
        self, tensor: Tensor, mesh: DeviceMesh, placements: Given, src_data_rank: int | None
    ) -> Tensor:
        """Make a tensor of this kind as `distribute_tensor` does, for a placement of this kind."""

    def from_local(
        self, local: Tensor, mesh: DeviceMesh, placements: Given, shape: Given, stride: Given
    ) -> Tensor:
        """Make a tensor of this kind as `DTensor.from_local` does, for a placement of this kind."""

    def box(self, shape: Ints, mesh: DeviceMesh, placements: Given, box_of: BoxOf) -> Boxes:
        """Give the shape of this rank's part and its offsets, for a placement of this kind.

        `box_of` is torch's function for other placements.
        """

    def place(self, full: Tensor, like: Given) -> Tensor:
        """Cut a full tensor, which all ranks have, in the way of `like`, a tensor of this kind."""

    def refuse_swap(self, tensor: Given) -> NoReturn:
        """Raise for `torch.utils.swap_tensors` of a tensor of this kind."""


def let_torch_make(kind: DTensorKind) -> None:
    """Make `distribute_tensor`, `DTensor.from_local`, `compute_local_shape_and_global_offset`,
    `set_model_state_dict`, `swap_tensors` and the `isinstance` of traced code ask `kind`."""
    _extend_distribute_tensor(kind)
    _extend_boxes(kind)
    _extend_from_local(kind)
    _extend_state_dicts(kind)
    tell_later(functools.partial(_extend_isinstance, kind))
    _extend_swap(kind)


WHILE_DISPATCHING = (
    torch._C._dispatch_tls_is_dispatch_key_excluded,
    torch._C.DispatchKey.ADInplaceOrView,
)
"""A function and its argument: true in and below `__torch_dispatch__`, false in a user's code."""

TRACING = torch._guards._TLS
"""State of this thread: it has a `tracing_context` while Dynamo or AOT autograd makes a graph."""


def _extend_distribute_tensor(kind: DTensorKind) -> None:
    from torch.distributed.tensor import distribute_tensor

    def ask(*args: Given, **kwargs: Given) -> Tensor:
        mesh, placements = (*args[1:3], None, None)[:2]
        placements = kwargs.get("placements", placements)
        if not kind.is_placed(placements):
            return cast(Tensor, original(*args, **kwargs))
        tensor = args[0] if args else kwargs["tensor"]
        mesh = kwargs.get("device_mesh", mesh) or _current_mesh()
        return kind.distribute(tensor, mesh, placements, kwargs.get("src_data_rank", 0))

    original = _replace(distribute_tensor, ask)


def _extend_boxes(kind: DTensorKind) -> None:
    """Make torch's function tell the place of a part; it would take the part for the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    def ask(*args: Given, **kwargs: Given) -> Boxes:
        shape, mesh, placements = (*args, *(kwargs.get(name) for name in names[len(args) :]))[:3]
        if not kind.is_placed(placements):
            return cast(Boxes, original(*args, **kwargs))
        return kind.box(tuple(shape), mesh, placements, original)

    names = ("global_shape", "mesh", "placements")
    original = _replace(compute_local_shape_and_global_offset, ask)


def _replace(function: Given, ask: Callable[..., object]) -> FunctionType:
    """Replace the code of a function by a call of `ask`; returns the original function.

    Modules that were imported before shardc hold the function itself.
    """
    original = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    function.__globals__["_shardc_ask"] = ask
    function.__code__ = _asks.__code__
    function.__defaults__ = function.__kwdefaults__ = None
    function.__wrapped__ = original
    return original


def _asks(*args: Given, **kwargs: Given) -> Given:
    return _shardc_ask(*args, **kwargs)  # type: ignore[name-defined] # noqa: F821


def _current_mesh() -> DeviceMesh:
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.get_current_mesh()


def _extend_from_local(kind: DTensorKind) -> None:
    torchs: Callable[..., Tensor] = DTensor.from_local

    @functools.wraps(torchs)
    def from_local(local_tensor: Tensor, *args: Given, **kwargs: Given) -> Tensor:
        mesh, placements = (*args, None, None)[:2]
        placements = kwargs.get("placements", placements)
        if not kind.is_placed(placements):
            return torchs(local_tensor, *args, **kwargs)
        mesh = kwargs.get("device_mesh", mesh) or _current_mesh()
        shape, stride = kwargs.get("shape"), kwargs.get("stride")
        return kind.from_local(local_tensor, mesh, placements, shape, stride)

    DTensor.from_local = staticmethod(from_local)  # type: ignore[method-assign, assignment]


def _extend_state_dicts(kind: DTensorKind) -> None:
    """Cut full values that rank 0 has sent by `kind`; `set_model_state_dict` would cut by dims."""
    from torch.distributed import _state_dict_utils

    torchs: Callable[..., None] = _state_dict_utils._distribute_tensors

    @functools.wraps(torchs)
    def distribute(state: dict[str, Given], keys: list[str], *args: Given, **kwargs: Given) -> None:
        others = []
        for key in keys:
            held = state.get(key)
            if isinstance(held, tuple) and kind.is_kind(held[0]):
                state[key] = kind.place(held[1], held[0])
            else:
                others.append(key)
        torchs(state, others, *args, **kwargs)

    _state_dict_utils._distribute_tensors = distribute  # type: ignore[assignment]


def _extend_isinstance(kind: DTensorKind) -> None:
    """Make Dynamo accept `kind` as DTensors; Dynamo alone looks at the real class of a tensor."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.tensor import TensorVariable

    torchs: Callable[..., VariableTracker] = BuiltinVariable.call_isinstance

    @functools.wraps(torchs)
    def call_isinstance(
        self: BuiltinVariable, tx: Given, arg: VariableTracker, types: VariableTracker
    ) -> VariableTracker:
        if isinstance(arg, TensorVariable) and types.is_python_constant():
            wanted = types.as_python_constant()
            value = arg.as_proxy().node.meta.get("example_value")
            if kind.is_kind(value) and DTensor in (wanted if type(wanted) is tuple else (wanted,)):
                return VariableTracker.build(tx, True)
        return torchs(self, tx, arg, types)

    BuiltinVariable.call_isinstance = call_isinstance  # type: ignore[method-assign, assignment]


def _extend_swap(kind: DTensorKind) -> None:
    """Make `swap_tensors` refuse `kind`: the memory of such a tensor belongs to a bucket."""
    torchs: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    @functools.wraps(torchs)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        for tensor in (t1, t2):
            if kind.is_kind(tensor):
                kind.refuse_swap(tensor)
        torchs(t1, t2)

    torch.utils.swap_tensors = swap_tensors
