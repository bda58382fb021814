"""Peak memory of a whole step: planned, allocated and reserved, beside FSDP2's.

What the allocator did is left in `snapshot-CASE.pickle`, for pytorch.org/memory_viz.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import peers
import torch
import wire
from part_speed import BF16, LARGE, WORLD
from training import FOLDER, TINY

from shardc.backend.graph_plan import graph_plans

SHAPES = {
    "16 x 2048": replace(LARGE, batch=2),
    "32 x 1024": peers.Shape(32, 1024, 16, 32768, 2, 2048),
    "8 x 4096, short": peers.Shape(8, 4096, 32, 32768, 1, 512),
}


def measure(
    shape: peers.Shape, name: str, segments: str, tiny: bool, budget: str | None = None
) -> dict[str, Any]:
    """MB of a step with AdamW, with the allocator's segments fixed or expandable."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{segments}")
    _, mesh = wire.join(WORLD, 20e-6, 360e9)
    shape = TINY if tiny else shape
    model = peers.Model(shape).cuda()
    options: dict[str, Any] = {"calibrated": False} if name == "shardc" else {}
    if budget is not None and not tiny:
        options["memory_budget"] = budget
    call = peers.PEERS[name](model, mesh, policy=BF16, **options)
    torch.cuda.empty_cache()  # of the whole model, before it was sharded
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length), device="cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.memory._record_memory_history(context=None, max_entries=100_000)
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        call(tokens).backward()
        if step == 3:  # plans do not count the optimizer's step
            peak = torch.cuda.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
    reserved = torch.cuda.max_memory_reserved()
    label = f"{shape.blocks}-{shape.dim}-{name}-{segments}-{budget}"
    torch.cuda.memory._dump_snapshot(str(FOLDER / f"snapshot-{label}.pickle"))
    expandable = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}
    if expandable != {segments == "True"}:
        raise RuntimeError(f"segments were to be expandable: {segments}, and are: {expandable}")
    planned = max((plan.peak for plan in graph_plans), default=0)
    return {
        "planned MB": planned / 1e6,
        "peak MB": peak / 1e6,
        "reserved MB": reserved / 1e6,
        "planned / peak": planned / peak,
        "reserved / peak": reserved / peak,
    }


CASES: dict[str, Callable[[bool], dict[str, Any]]] = {
    f"{title}, {name}, expandable {segments}": partial(measure, shape, name, segments)
    for title, shape in SHAPES.items()
    for name in ("shardc", "fsdp2")
    for segments in ("False", "True")
} | {
    "16 x 2048, shardc, 5 GB": partial(
        measure, SHAPES["16 x 2048"], "shardc", "True", budget="5GB"
    ),
}
