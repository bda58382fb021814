"""`make lint` refuses prose that a reader has to take apart.

    python tests/prose.py shardc passes runtime

A docstring begins with a noun of the glossary, or with a verb of which that noun is the object: not
with a free relative (what, those that) or a causative (have it done). In docstrings and comments
no clause with "what" stands in the place of a noun.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

_BEGINNING = re.compile(r"(What|Which|Whose|That|Those|Have|Has|Of)\b")
_WORDS = re.compile(r"\b(what|whatever|whoever|whichever)\b", re.IGNORECASE)


def refused(path: Path) -> Iterator[str]:
    """A line for each docstring that begins so, and for each line of prose with such words."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if _BEGINNING.match(docstring):
                first = docstring.split("\n", 1)[0]
                yield f'{path}:{node.body[0].lineno}: begin with a noun or a verb: "{first}"'
    for number, line in _prose(text):
        if _WORDS.search(line):
            yield f'{path}:{number}: name the thing: "{line.strip()}"'


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines of docstrings, of strings below assignments, and comments, with their numbers."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(string))):
                yield from enumerate(string.split("\n"), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def main() -> int:
    files = (path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py")))
    found = [line for path in files for line in refused(path)]
    print("\n".join(found), end="\n" if found else "")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
