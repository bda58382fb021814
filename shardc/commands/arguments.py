"""Arguments that several commands share, and functions that read their values.

A command imports torch when it runs, so a wrong command line costs no import of torch.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from shardc.commands.errors import UsageError
from shardc.commands.target import EXAMPLE
from shardc.runtime.checks.values import HARDWARE, MAX_WORLD, Microscaled, read_amount
from shardc.runtime.checks.words import plural

if TYPE_CHECKING:
    from shardc.passes.estimate.hardware import Profile
    from shardc.runtime.unit.precision import MixedPrecisionPolicy

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_WIRE = {"float8": "float8_e4m3fn", "int8": "int8"}


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the target and `--world-size`."""
    add = parser.add_argument
    add("target", help=f"package.module:function, for example {EXAMPLE}")
    add("--world-size", type=count, default=8, metavar="W", help="ranks that share the model; "
        "with copies of it (HSDP), ranks of one copy (default 8)")  # fmt: skip


def add_copies(parser: argparse.ArgumentParser) -> None:
    """Add `--copies`, which `mesh_sizes` takes."""
    parser.add_argument(
        "--copies",
        type=count,
        default=1,
        metavar="N",
        help="copies of the model (HSDP), each over --world-size ranks (default 1)",
    )


def mesh_sizes(copies: int, world_size: int) -> tuple[int, ...]:
    """The sizes of the mesh of `copies` of the model, each over `world_size` ranks.

    Raises:
        UsageError: the mesh has more ranks than can be planned for.
    """
    ranks = plural(copies * world_size, "rank")
    if copies * world_size > MAX_WORLD:
        raise UsageError(f"at most {plural(MAX_WORLD, 'rank')} can be planned for, got {ranks}")
    return (copies, world_size) if copies > 1 else (world_size,)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add `--mp` and `--wire`, which `read_precision` reads."""
    add = parser.add_argument
    add("--mp", choices=sorted(_DTYPES), help="param_dtype of mixed precision: the dtype that "
        "parameters are gathered in (default: as they are stored)")  # fmt: skip
    formats = sorted((*_WIRE, *get_args(Microscaled)))
    add("--wire", choices=formats, help="gather parameters in this format, in blocks that share a "
        "scale; gradients are sent in int8 then (default: nothing is quantised)")  # fmt: skip


def read_precision(args: argparse.Namespace) -> "MixedPrecisionPolicy":
    """The policy that `--mp` and `--wire` ask for."""
    import torch

    from shardc.runtime.unit.precision import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, _DTYPES[args.mp]) if args.mp else None,
        gather_wire_dtype=getattr(torch, _WIRE.get(args.wire, ""), args.wire),
        reduce_wire_dtype=torch.int8 if args.wire else None,
    )


def add_profile(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--profile`, with a help text that begins with the given words."""
    parser.add_argument(
        "--profile",
        choices=HARDWARE,
        metavar="NAME",
        help=f"{what}: {', '.join(HARDWARE)} (default: this machine's GPU, else h100-nvlink)",
    )


def read_profile(args: argparse.Namespace) -> "Profile":
    """The profile that `--profile` names, or the default profile."""
    from shardc.passes.estimate.hardware import PROFILES, current_profile

    return PROFILES[args.profile] if args.profile else current_profile("cuda")


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that shape a step, beside the model and the number of ranks."""
    add = parser.add_argument
    add_precision(parser)
    add_profile(parser, "the hardware that times are for")
    add_copies(parser)
    add("--hierarchical", action="store_true", help="gather across nodes first, then inside of "
        "each (hierarchical_mesh), with as many ranks a node as the profile has"
    )  # fmt: skip
    add("--reshard", type=_reshard, metavar="WHEN", help="reshard_after_forward: yes, no, or a "
        "number of ranks (default: all units but the outermost)")  # fmt: skip
    add("--memory-budget", "--memory", type=_amount_or_curve, metavar="BYTES", help="memory that a "
        "step may use, such as 70GB, or 0.9 for that share of the device: the fastest step that "
        "fits is chosen; or 'curve', to see step time against memory (default: none)")  # fmt: skip
    add("--offload", action="store_true", help="keep segments, gradients and optimizer state on "
        "the host (CPUOffloadPolicy)")  # fmt: skip


def count(text: str) -> int:
    """Read a count for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a count, 1 or more, got '{text}'")
    return number


def amount(text: str) -> str:
    """Check bytes of memory for argparse; the text is returned as it is."""
    if read_amount(text) is None:
        raise argparse.ArgumentTypeError(
            f"must be bytes such as 70GB or 16GiB, or a share in (0, 1] such as 0.9, got '{text}'"
        )
    return text


def _amount_or_curve(text: str) -> str:
    return text if text == "curve" else amount(text)


def check_reshard_size(reshard: bool | int | None, world_size: int) -> None:
    """Raise UsageError unless `world_size` ranks can be cut into groups of `reshard` ranks."""
    if reshard not in (None, True, False) and (reshard < 1 or world_size % reshard):
        raise UsageError(
            f"--reshard {reshard}: must be yes, no or a divisor of the {plural(world_size, 'rank')}"
        )


def _reshard(text: str) -> bool | int:
    if text in ("yes", "no"):
        return text == "yes"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be yes, no or a number of ranks, got '{text}'"
        ) from None


def example_inputs(inputs: Any, target: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The example inputs of a target: positional arguments, and arguments by name.

    Raises:
        UsageError: the target gives no inputs.
    """
    if inputs is None:
        raise UsageError(
            f"{target} returns a model only, and a step needs inputs: return (model, inputs), with "
            f"a tuple, or a dict by name, of one rank's tensors, as {EXAMPLE} does"
        )
    if isinstance(inputs, Mapping):
        return (), inputs
    return (inputs if isinstance(inputs, (tuple, list)) else (inputs,)), {}
