"""ShardTensor: a parameter of full shape of which this rank holds one interval."""

from shardc.runtime.tensor import shard_tensor  # noqa: F401 (ops make the class that it defines)
