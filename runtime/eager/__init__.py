"""The eager runtime: gathers and reductions around modules that no graph contains."""
