"""The backwards of this process, told to those who watch them."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardc.runtime.unit.bucket import Bucket

watchers: "list[Callable[[Iterable[Bucket]], None]]" = []
"""Called in each backward, at least once, with the buckets that a part of it differentiates."""


def tell_backward(buckets: "Iterable[Bucket]") -> None:
    """Tell the watchers of buckets that the running backward differentiates."""
    for watch in watchers:
        watch(buckets)
