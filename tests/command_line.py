"""Running `shardc` in the process of the test."""

from typing import Any

from shardc.commands.cli import main


def ended(capsys: Any, *arguments: str) -> tuple[Any, str, str]:
    """The exit code of `shardc ARGUMENTS`, and what it printed to stdout and to stderr."""
    try:
        code: Any = main(list(arguments))
    except SystemExit as end:  # argparse
        code = end.code
    return (code, *capsys.readouterr())
