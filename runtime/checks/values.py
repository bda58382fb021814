"""Values that are read before torch is imported: amounts of memory, numbers of ranks, names."""

import re
from typing import Literal

MAX_WORLD = 16384
"""The largest number of ranks that can be planned for."""
HARDWARE = (
    "a100-ib", "a100-nvlink", "b200-ib", "b200-nvlink", "cpu", "h100-ib", "h100-nvlink", "h200-ib",
    "h200-nvlink",
)  # fmt: skip
"""The names of the profiles that are built in."""
Microscaled = Literal["mxfp8", "mxfp4", "nvfp4"]
"""The published formats on the wire, by their names in `MixedPrecisionPolicy`."""
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def read_amount(text: str) -> tuple[float, int | None] | None:
    """A number and its unit.

    Args:
        text: an amount such as "70GB", "16GiB" or "1000", or a share such as "0.9".

    Returns:
        The number and the bytes of its unit, or the number and None for a share (at most 1, with a
        point and no unit); None where the text is neither.
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS or not float(match[1]):
        return None
    number = float(match[1])
    is_share = not match[2] and "." in match[1] and number <= 1
    return number, None if is_share else _UNITS[match[2]]
