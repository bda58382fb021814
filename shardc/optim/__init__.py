"""Optimizers whose update needs whole tensors, on sharded parameters."""
