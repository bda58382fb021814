"""The table of torch versions: the one place that names the range that shardc supports.

A private API of this folder was seen in all versions, unless its function says otherwise. A new
version needs one row, and a run of the tests with that version. A test compares README, docs,
pyproject.toml, Makefile and the hosted workflow with the table.
"""

VERSIONS = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))
"""The supported versions, oldest first."""


def supported() -> tuple[str, str]:
    """The oldest version and the newest, as texts."""
    oldest, newest = (".".join(map(str, VERSIONS[place])) for place in (0, -1))
    return oldest, newest


def specifier() -> str:
    """The versions as a specifier of pip: ">=2.11,<2.16"."""
    major, minor = VERSIONS[-1]
    return f">={supported()[0]},<{major}.{minor + 1}"
