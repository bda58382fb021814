"""State dicts of sharded models and their optimizers."""
