"""Sharded modules: their class, methods for users, summoning, copying."""
