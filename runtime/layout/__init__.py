"""Where every parameter lies in flat buckets, and the spec that shapes their code."""
