"""What a command may end with, and its exit code: 0 fine, 1 found a problem, 2 wrong usage."""


class UsageError(ValueError):
    """What was typed cannot be run: exit code 2. Says what to type instead."""


class FoundProblem(RuntimeError):
    """The command ran and found a problem: exit code 1. Says how to get out of it."""
