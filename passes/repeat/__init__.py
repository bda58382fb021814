"""Blocks that repeat: traced once before AOT autograd, compiled once by Inductor."""
