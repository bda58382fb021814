"""The places of parameters in flat buckets, and the spec that shapes the code of a bucket."""
