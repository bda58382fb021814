"""Sharded modules: their class, the methods users call, summoning, copying."""
