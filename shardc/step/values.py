"""Values of a recorded step: tensors known by their memory, stand-ins without any, and holders."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.tensor.shard_tensor import ShardTensor


def place_of(value: Tensor) -> tuple[object, ...]:
    """The elements of memory that a tensor has."""
    where = value.untyped_storage()._cdata, value.storage_offset()
    return (*where, value.dtype, value.shape, value.stride())


def part_of(value: Tensor, shape: list[int], stride: list[int], offset: int) -> Tensor:
    """A view of the memory of `value`, from `offset` elements behind its first on."""
    return value.as_strided(shape, stride, value.storage_offset() + offset)


part_of.is_view = True  # type: ignore[attr-defined]


def without_memory(value: Any) -> Any:
    """A tensor of the same shape, dtype and device, over the memory of one element.

    Of a ShardTensor, one whose local part is such a tensor; any other value is returned itself.
    """
    if isinstance(value, ShardTensor):
        return over(value, without_memory(value._local))
    if not isinstance(value, Tensor):
        return value
    return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)


def local_of(value: Any) -> Any:
    """The plain tensor under a parameter or gradient."""
    return value._local if isinstance(value, ShardTensor) else value


def over(like: Tensor, local: Tensor) -> Tensor:
    """A gradient like another one, over other memory."""
    if isinstance(like, ShardTensor):
        return ShardTensor(local, tuple(like.shape), like._shard_spec)
    return local


@dataclass(frozen=True)
class Entry:
    """A value in an attribute of an object: a buffer, the state of an optimizer, its `lr`.

    `load_state_dict` replaces the containers on the path.

    Attributes:
        owner, attribute: the object, and the attribute, a container.
        path: the keys that lead to the value.
    """

    owner: object
    attribute: str
    path: tuple[Any, ...]

    def __call__(self) -> Any:
        value = getattr(self.owner, self.attribute)
        for key in self.path:
            value = value[key]
        return local_of(value)
