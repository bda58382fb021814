"""Repeated blocks: one trace before AOT autograd, one compile by Inductor."""
