"""Reports: what a compiled step does and costs, as values, texts and pictures."""
