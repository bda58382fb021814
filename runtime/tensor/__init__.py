"""ShardTensor: a parameter of full shape of which this rank holds one interval."""
