"""Figures as people write them."""


def format_bytes(count: float) -> str:
    """Bytes as a text for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
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


def plural(count: int, noun: str) -> str:
    """A count of things."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
