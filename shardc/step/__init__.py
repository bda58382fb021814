"""A training step as one graph: recorded once, then run without the Python of the step."""
