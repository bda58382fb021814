"""A sharded tensor that is given in a parameter's place, made whole.

It is gathered by itself, when it is given: graphs and uncompiled code then read a plain tensor. Its
gradient is averaged over the ranks, as that of the parameter would be.
"""

from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardc.runtime import compat
from shardc.runtime.bucket.bucket import Bucket
from shardc.runtime.tensor.shard_spec import whole_gradient
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import wrapped


class _Whole(torch.autograd.Function):
    """All of a sharded tensor; the part of a gradient."""

    @staticmethod
    def forward(ctx: compat.FunctionContext, sharded: ShardTensor, dtype: torch.dtype) -> Tensor:
        ctx.spec, ctx.dtype = sharded._shard_spec, sharded.dtype
        local = cast(ShardTensor, sharded.detach().to(dtype))
        return local._unsharded()

    @staticmethod
    @once_differentiable
    def backward(ctx: compat.FunctionContext, grad: Tensor) -> tuple[Tensor, None]:
        part = whole_gradient(grad.to(ctx.dtype), ctx.spec)
        return ShardTensor(part, tuple(grad.shape), ctx.spec), None


@compat.inline_only
def whole(sharded: ShardTensor, bucket: Bucket) -> Tensor:
    """`sharded`, in the place of a parameter of `bucket`, as reads of that are: its dtype, placed.

    Every rank must call it.
    """
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            "functional_call inside of compiled code takes no sharded tensors: call it outside of "
            "what is compiled, or give it whole tensors (.full_tensor())"
        )
    dtype = bucket.key.reading_code().compute_dtype
    full = cast(Tensor, _Whole.apply(sharded, dtype))
    return wrapped(full, sharded._shard_spec.tp)
