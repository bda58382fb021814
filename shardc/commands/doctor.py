"""`shardc doctor`: check whether this machine can train, and give advice where it cannot."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tqdm import tqdm

from shardc.commands.errors import UsageError
from shardc.reports.terminal import wrap

if TYPE_CHECKING:
    from shardc.commands.machine import Checked

NAME = "doctor"
SUMMARY = "check whether this machine can train, and say what to do where it cannot"
DESCRIPTION = """\
Check what training needs on this machine: torch, compilers, GPUs, and processes that really
exchange tensors. Takes about half a minute. One line a check: ok, missing (not there) or broken
(there, but it does not work), and what to do about it. Not all of it is needed everywhere: the
last line says whether this machine can train.
"""
EPILOG = "exit code: 0 if this machine can train on CPU or GPU, 1 otherwise\n"

_NEEDS = {
    "CPU": ("torch", "all-gather on CPU"),
    "GPU": ("torch", "GPU", "all-gather on GPU"),
}
"""The checks that must be ok to train. A compiler is not needed: graphs can run op by op."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardc doctor`."""
    add = parser.add_argument
    add("--timeout", type=float, default=120.0, metavar="SECONDS",
        help="how long a compile or an all-gather may take (default 120)")  # fmt: skip
    add("--json", action="store_true", help="print JSON when all checks are done")


def run(args: argparse.Namespace) -> int:
    """Run all checks, print each finding at once, then the devices that can train."""
    if args.timeout <= 0:
        raise UsageError(f"--timeout must be more than 0 seconds, got {args.timeout:g}")
    from shardc.commands.machine import checks

    found: dict[str, Checked] = {}
    todo = list(checks())
    with tqdm(todo, unit="check", leave=False, disable=None) as progress:
        for name, check in progress:
            progress.set_description(name)
            found[name] = check(timeout=args.timeout)
            if not args.json:
                tqdm.write(_line(name, found[name]))
    devices = can_train(found)
    if args.json:
        records = [{"name": n, **dataclasses.asdict(finding)} for n, finding in found.items()]
        print(json.dumps({"can_train": devices, "checks": records}, indent=2))
    else:
        print(f"\n{_verdict(devices, found)}")
    return 0 if devices else 1


def can_train(found: Mapping[str, "Checked"]) -> list[str]:
    """The devices for which all checks are ok that training needs."""
    return [
        device
        for device, needs in _NEEDS.items()
        if all(name in found and found[name].status == "ok" for name in needs)
    ]


def _line(name: str, finding: "Checked") -> str:
    what = f"{finding.detail} -> {finding.advice}" if finding.advice else finding.detail
    return wrap(what, first=f"{finding.status:<8} {name:<18} ", then=" " * 28)


def _verdict(devices: list[str], found: Mapping[str, "Checked"]) -> str:
    if not devices:
        return "This machine cannot train yet: see what is missing or broken above."
    slow = [device for device in devices if found[f"compile for {device}"].status != "ok"]
    how = f" (uncompiled on {' and '.join(slow)})" if slow else ""
    return f"This machine can train on {' and '.join(devices)}{how}."
