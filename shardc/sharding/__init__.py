"""`fully_shard`: the units of a model, their mesh, and their first values."""
