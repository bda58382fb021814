"""The `shardc` command: parses arguments and hands over to a module of `shardc.commands`."""

import argparse
import atexit
import gc
import sys
from collections.abc import Sequence

from shardc import __version__
from shardc.commands import calibrate, compare, doctor, explain, fit, plan, precompile
from shardc.commands.errors import FoundProblem, UsageError
from shardc.reports.terminal import READABLE, terminal_width, wrap

_DESCRIPTION = """\
shardc shards training: parameters, gradients and optimizer state live in parts, one a rank (a
process, with a GPU of its own where there are GPUs).

Start with `shardc doctor`: it says whether this machine can train.
"""
_EPILOG = """\
exit codes: 0 fine, 1 a problem was found, 2 wrong usage

`shardc COMMAND --help` explains a command and shows how to call it.
"""
_COMMANDS = (doctor, plan, explain, fit, compare, precompile, calibrate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own), and return its exit code."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    atexit.register(gc.freeze)  # graphs are large: Python would look through them for garbage
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return args.run(args)
    except (UsageError, FoundProblem) as error:
        print(f"shardc {args.command}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


class _Help(argparse.RawDescriptionHelpFormatter):
    """Format help: paragraphs wrap to the terminal; lines of examples begin with spaces."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(READABLE, terminal_width()))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts: list[str] = []
        for line in text.splitlines():
            if parts and _is_text(line) and _is_text(parts[-1]):
                parts[-1] += f" {line}"
            else:
                parts.append(line)
        return "\n".join(wrap(part) if _is_text(part) else _as_command(part) for part in parts)


def _is_text(line: str) -> bool:
    return bool(line) and not line.startswith(" ")


def _as_command(line: str) -> str:
    """A line of an example, broken into lines that a shell continues."""
    return " \\\n".join(wrap(line.strip(), terminal_width() - 2, "  ", "      ").splitlines())


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardc", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_Help
    )
    parser.add_argument("--version", action="version", version=f"shardc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=_Help,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
