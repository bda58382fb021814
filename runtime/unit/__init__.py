"""Units and their buckets: segments, parameters, gradients and settings; gathers and reductions
outside of compiled graphs."""
