"""The commands of `shardc`: a module each, with its arguments (`add_arguments`) and its `run`."""
