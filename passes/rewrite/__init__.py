"""Rewrites: passes that change the computations or transfers of a graph, one pass a file."""
