"""Functions for `set_custom_reduce`: each replaces a plain reduce-scatter.

Each takes the unreduced gradient, `flat: (W*S,)`, the op ("sum" or "avg"), the number of ranks and
their group by name, and returns this rank's part of the reduced gradient, `(S,)`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardc.runtime.comm.collectives import reduce_scatter
from shardc.runtime.layout.spec import divide_factors


def compress_bf16(flat: Tensor, op: str, world_size: int, group: str) -> Tensor:
    """Reduce in bfloat16: half the bytes of float32 on the wire."""
    return reduce_scatter(flat.to(torch.bfloat16), op, world_size, group).to(flat.dtype)


def compress_fp16(flat: Tensor, op: str, world_size: int, group: str) -> Tensor:
    """Reduce in float16, scaled so that the sum of all ranks does not overflow."""
    scale, _ = divide_factors(world_size, torch.float16)
    part = reduce_scatter((flat / scale).to(torch.float16), op, world_size, group)
    return part.to(flat.dtype) * scale


# -- for measuring only ----------------------------------------------------------------------------


def leave_out_reduce(flat: Tensor, op: str, world_size: int, group: str) -> Tensor:
    """Take this rank's own gradient in place of the sum of all ranks; wrong, and sends nothing."""
    part = flat.narrow(0, 0, flat.numel() // world_size).clone()
    return part * world_size if op == "sum" else part


class LeaveOutGather:
    """An all-gather that repeats this rank's segment; wrong, and sends nothing."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor for the result."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *_: object, **__: object
    ) -> None:
        output_tensor.view(-1, input_tensor.numel()).copy_(input_tensor)


leave_out_gather = LeaveOutGather()
