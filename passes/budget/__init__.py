"""The memory budget: which values and buckets are kept, computed again, or sent to the host."""
