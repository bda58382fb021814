"""Values given in the place of parameters, converted as a read converts the parameter.

A sharded value is gathered by itself when it is given: graphs and uncompiled code then read a plain
tensor. The value's gradient is averaged over the ranks, as the parameter's gradient would be.
"""

import torch
from torch import Tensor

from shardc.runtime import compat
from shardc.runtime.tensor.shard_tensor import ShardTensor
from shardc.runtime.tensor.tensor_parallel import wrapped
from shardc.runtime.unit.bucket import Bucket


@compat.inline_only
def as_read(given: Tensor, bucket: Bucket) -> Tensor:
    """Convert `given`, in the place of a parameter of `bucket`: full, in the forward's dtype.

    Every rank must call it if `given` is sharded.
    """
    if isinstance(given, ShardTensor) and torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(
            "functional_call inside of compiled code takes no sharded tensors: call it outside of "
            "compiled code, or give it whole tensors (.full_tensor())"
        )
    low = None if bucket.owner.summoned else bucket.key.reading_code().param_dtype
    value = _whole(given) if isinstance(given, ShardTensor) else given
    return value if low is None or not value.is_floating_point() else value.to(low)


def _whole(sharded: ShardTensor) -> Tensor:
    full, tp = sharded.full_tensor(), sharded._shard_spec.tp
    return full if tp is None else wrapped(tp.local_of(full), tp)
