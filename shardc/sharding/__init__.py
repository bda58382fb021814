"""`fully_shard`: which modules become units, on which mesh, from which values."""
