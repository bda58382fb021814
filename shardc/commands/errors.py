"""Ends of a command, and its exit code: 0 fine, 1 found a problem, 2 wrong usage."""

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """A command line that cannot be run: exit code 2. Says what to type instead."""


class FoundProblem(RuntimeError):
    """The command ran and found a problem: exit code 1. Says how to get out of it."""


@contextmanager
def finding_problems(target: str, verb: str) -> Iterator[None]:
    """Inside, `target` is planned or compiled: what that raises is a problem of `target`.

    Errors of shardc are told as they are, those of torch and of the model with their type and
    without torch's hint on how to report a bug.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        text = str(error).partition("\nSet TORCHDYNAMO_VERBOSE=1")[0].strip()
        of_shardc = isinstance(error, ValueError) or type(error).__module__.startswith("shardc.")
        what = text if of_shardc else f"{type(error).__name__}: {text}"
        raise FoundProblem(f"{target} cannot be {verb}: {what}") from error
