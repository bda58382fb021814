"""Equal blocks stay equal for Dynamo, though their vectors are slots of one bucket, the model's.

Dynamo compares the slot that a module reads. So while a plan is traced, each such slot is read as a
bucket of its own, whose segment is an input of the graph. After the trace, each read is made a read
of the slot again.

    traced:  w = unshard_slot(standin, "one slot", 0)
    after:   w = unshard_slot(segment, "the bucket", 3)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardc.runtime import compat
from shardc.runtime.layout.spec import intern_spec
from shardc.runtime.modules.modules import ShardedModule
from shardc.runtime.unit.bucket import Bucket
from shardc.runtime.unit.params import Place, SlotRef


class _Standin:
    """A stand-in for a bucket in traced code, with a single slot of `bucket`."""

    extension = None
    placed = (None,)

    def __init__(self, bucket: Bucket, index: int) -> None:
        code = bucket.key.reading_code()
        self.bucket, self.index, self.key = bucket, index, self
        self.params, self.gathered = (bucket.params[index],), bucket.gathered
        self.places: dict[int, Place] = {}
        self.segment = torch.empty_like(
            bucket.segment, requires_grad=bucket.segment.requires_grad
        )  # no view: regions take no inputs that share memory
        alone = replace(code, shapes=code.shapes[index : index + 1])
        self._reading: tuple[str, list[Tensor]] = (intern_spec(alone), [])

    def reading(self) -> tuple[str, Sequence[Tensor]]:
        """The signature and inputs of a read, as `GraphKey.reading` gives them."""
        return self._reading


@contextmanager
def reading_apart(units: Iterable[ShardedModule]) -> Iterator[Callable[..., list[int]]]:
    """A context in which traced code reads slots of `units` in other units' buckets as stand-ins.

    Yields:
        A function that makes the reads of a Dynamo graph reads of slots again. The
        function returns the positions of the inputs that are left, and raises ValueError where the
        graph reads nothing else of a bucket.
    """
    before: list[tuple[dict[str, Any], str, SlotRef]] = []
    standins: list[_Standin] = []
    try:
        for unit in units:
            own = unit._shardc_unit.buckets
            for slots in (vars(m).get("_shardc_slots", {}) for m in unit.modules()):
                for name, slot in list(slots.items()):
                    if _is_apart(slot, own):
                        standins.append(_Standin(slot.bucket, slot.index))
                        before.append((slots, name, slot))
                        slots[name] = SlotRef(standins[-1], 0, slot.is_shared)  # type: ignore[arg-type]
        yield lambda gm: _read_slots(gm, standins)
    finally:
        for slots, name, slot in before:
            slots[name] = slot


def _is_apart(slot: Any, own: Sequence[Bucket]) -> bool:
    """Whether a slot lies in a bucket outside the unit, and its read needs only the segment."""
    bucket = slot.bucket
    if bucket is None or bucket in own or bucket.extension or bucket.placed[slot.index]:
        return False
    return not bucket.key.reading()[1]


def _read_slots(gm: GraphModule, standins: Sequence[_Standin]) -> list[int]:
    inputs = gm.graph.find_nodes(op="placeholder")
    nodes = {id(compat.real_input(node)): node for node in inputs}
    gone = set()
    for standin in standins:
        node, bucket = nodes.get(id(standin.segment)), standin.bucket
        if node is None:
            continue
        segment = nodes.get(id(bucket.segment))
        if segment is None:
            raise ValueError(f"{bucket} is read by blocks alone")
        signature, extras = bucket.key.reading()
        for mark in list(node.users):
            mark.args = (segment, signature, standin.index, extras)
        gm.graph.erase_node(node)
        gone.add(node)
    gm.recompile()
    return [position for position, node in enumerate(inputs) if node not in gone]
