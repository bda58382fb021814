"""Plans without ranks: the plan and cost of a step, and the largest step that fits."""
