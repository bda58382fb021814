"""Figures as people write them, in reports and in errors."""

import math
from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB")


def format_bytes(count: float) -> str:
    """Bytes as a text for people, in powers of 1024."""
    for unit in _BINARY[:-1]:
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds as a text for people."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us" if abs(seconds) >= 1e-9 else "0 s"


def plural(count: int, noun: str, several: str = "") -> str:
    """A count of things: "1 copy", "1,024 copies".

    Args:
        count: the number of things.
        noun: the word for one thing.
        several: the word for several things; default: the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def listed(names: Sequence[str]) -> str:
    """Names one after the other: "a, b and c"."""
    return " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


def some(names: Sequence[object], most: int) -> str:
    """The first names, and the number of others: "a, b and 3 more"."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def bytes_like(count: int, given: object) -> str:
    """`count` bytes in the style of the amount `given`, rounded up.

    The unit is KB or MB beside "70GB", KiB or MiB beside "64GiB" and beside a share of the device,
    and the byte beside a number.
    """
    text = str(given).lower()
    if not isinstance(given, float) and not text.endswith("b") and "." not in text:
        return plural(count, "byte")
    binary = "ib" in text or not text.endswith("b")
    base, names = (1024, _BINARY) if binary else (1000, _DECIMAL)
    power = min(int(math.log(max(count, 1), base)), len(names) - 1)
    digit = 10.0 ** (3 - int(math.log10(max(count / base**power, 1))))
    return f"{math.ceil(count / base**power * digit) / digit:g} {names[power]}"


def dtype_name(dtype: object) -> str:
    """The name of a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
