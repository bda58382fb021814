"""Plans without ranks: what a step would do, and the largest that fits."""
