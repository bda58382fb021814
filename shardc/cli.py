"""The `shardc` command; its sub-commands come later."""

import sys


def main() -> int:
    """Say that the name is reserved; exit code 2."""
    print("shardc has no command line yet; see the README for the Python API", file=sys.stderr)
    return 2
