"""torch's writer of safetensors checkpoints, for ranks that hold several boxes of a tensor.

`HuggingFaceStorageWriter` keys the entries of a file by name: of several boxes with one name the
last would replace the others. `write_boxes_apart` lets it write the second box of each name into a
second file, and so on. Readers and the consolidation take all files of a folder, and find each box
by its offsets.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.futures import Future

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    Written = Future[list[WriteResult]]
    Write = Callable[[HuggingFaceStorageWriter, SavePlan, SavePlanner], Written]


def write_boxes_apart() -> None:
    """Make `HuggingFaceStorageWriter` write each box of a name to a file of its own."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    write: Write = HuggingFaceStorageWriter.write_data
    if hasattr(write, "_shardc_wraps"):
        return

    def write_data(
        self: "HuggingFaceStorageWriter", plan: "SavePlan", planner: "SavePlanner"
    ) -> "Written":
        _refuse_what_is_lost(self, plan.items)
        layers = _layers(plan.items)
        if len(layers) <= 1:
            return write(self, plan, planner)
        results: list[WriteResult] = []
        for depth, items in enumerate(layers):
            layer = replace(plan, items=items, storage_data=_moved(plan.storage_data, depth))
            results += write(self, layer, planner).wait()
        written: Written = Future()
        written.set_result(results)
        return written

    write_data._shardc_wraps = write  # type: ignore[attr-defined]
    HuggingFaceStorageWriter.write_data = write_data  # type: ignore[method-assign]


def _layers(items: list["WriteItem"]) -> list[list["WriteItem"]]:
    """Items in layers: the first item of each name, the second item of each name, and so on."""
    layers: list[list[WriteItem]] = []
    seen: dict[str, int] = defaultdict(int)
    for item in items:
        depth = seen[item.index.fqn]
        seen[item.index.fqn] += 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(item)
    return layers


def _moved(storage_data: dict[str, Any], depth: int) -> dict[str, Any]:
    """A copy of `storage_data` with a file number that no rank uses at a lower depth.

    The writer numbers the files of W ranks from 1 to W.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    return {**storage_data, "shard_index": storage_data["shard_index"] + depth * world}


def _refuse_what_is_lost(writer: "HuggingFaceStorageWriter", items: list["WriteItem"]) -> None:
    """Raise ValueError for tensors that the writer would lose: parts, and tensors of no dims."""
    from torch.distributed.checkpoint.planner import WriteItemType

    alone = not dist.is_initialized() or dist.get_world_size() == 1
    for item in items:
        data, name = item.tensor_data, item.index.fqn
        if data is None:
            continue
        if item.type is WriteItemType.SHARD and not (writer.save_distributed or alone):
            raise ValueError(
                f"'{name}' is sharded, and HuggingFaceStorageWriter(save_distributed=False) lets "
                "all ranks write to the same files. Pass save_distributed=True, or save "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
            )
        if writer.enable_consolidation and not data.size:
            raise ValueError(
                f"'{name}' has no dims, and torch's consolidation writes 0 for such tensors. Save "
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), or "
                "pass enable_consolidation=False"
            )
