"""Errors that end a command. Exit codes: 0 fine, 1 a problem was found, 2 wrong usage."""

from collections.abc import Iterator
from contextlib import contextmanager


class UsageError(ValueError):
    """A command line that cannot be run: exit code 2. The message has a correction."""


class FoundProblem(RuntimeError):
    """The command ran and found a problem: exit code 1. The message has a remedy."""


@contextmanager
def finding_problems(target: str, verb: str) -> Iterator[None]:
    """Raise FoundProblem for errors inside, where `target` is planned or compiled.

    The message of an error of shardc stays as it is. The message of an error of torch or of the
    model gets the error's type, and loses torch's hint on how to report a bug.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        text = str(error).partition("\nSet TORCHDYNAMO_VERBOSE=1")[0].strip()
        of_shardc = isinstance(error, ValueError) or type(error).__module__.startswith("shardc.")
        what = text if of_shardc else f"{type(error).__name__}: {text}"
        raise FoundProblem(f"{target} cannot be {verb}: {what}") from error
