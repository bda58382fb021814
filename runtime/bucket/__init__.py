"""Units and their buckets: segments, parameters, gradients, settings."""
