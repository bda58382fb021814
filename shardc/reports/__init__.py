"""Reports: the plan and the costs of a compiled step, as values, texts and pictures."""
