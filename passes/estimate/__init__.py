"""Estimates: the seconds of an op, the kernels of a graph, the memory that it holds."""
