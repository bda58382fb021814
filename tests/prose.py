"""`make lint` refuses docstrings that begin with a free relative or a causative.

    python tests/prose.py shardc passes runtime

A docstring begins with a noun of the glossary, or with a verb of which that noun is the object.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_REFUSED = re.compile(r"(What|Which|Whose|That|Those|Have|Has|Of)\b")


def refused(path: Path) -> Iterator[str]:
    """A line for each docstring of a file that begins so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if _REFUSED.match(text):
                first = text.split("\n", 1)[0]
                yield f'{path}:{node.body[0].lineno}: begin with a noun or a verb: "{first}"'


def main() -> int:
    files = (path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py")))
    found = [line for path in files for line in refused(path)]
    print("\n".join(found), end="\n" if found else "")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
