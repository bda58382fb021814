"""Units and their buckets: segments, parameters, gradients, settings; their uncompiled gathers and
reductions."""
