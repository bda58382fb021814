"""The table of docs/integrations/unchanged.md: codebases written for FSDP2, trained by shardc.

PYTHONPATH=tests python -m clients            # prints it, minutes; needs the extra `test`
PYTHONPATH=tests python -m clients --write    # puts it into the page
PYTHONPATH=tests python -m clients TEXT ...   # the clients whose names contain a text

With `--write` and texts, the other rows of the page stay.
"""

import sys
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from clients import CLIENTS, Client, faults, run

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "unchanged.md"
BEGIN, END = "<!-- python -m clients: begin -->", "<!-- python -m clients: end -->"


def kept() -> dict[str, dict[str, str]]:
    """The rows of the page, by client."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {values[0]: dict(zip(cells[0], values, strict=True)) for values in cells[2:]}


def row(name: str, client: Client) -> dict[str, str]:
    """The row of a client; of one that is not installed, the row of the page."""
    if not client.is_there:
        return kept().get(name, {"client": name, "version": "not installed"})
    wanted = run(client, by_shardc=False)
    found = faults(client, run(client, by_shardc=True), wanted)
    if client.compiles:
        compiled = faults(client, run(client, "compiled", by_shardc=True), wanted)
        found["the same, compiled"] = "; ".join(filter(None, compiled.values()))
    return {"client": name, "version": client.version} | {k: v or "yes" for k, v in found.items()}


def main(asked: list[str]) -> None:
    writes, texts = "--write" in asked, [each for each in asked if each != "--write"]
    chosen = {n: c for n, c in CLIENTS.items() if not texts or any(t in n for t in texts)}
    rows = kept() if writes else {}
    rows |= {name: row(name, client) for name, client in tqdm(chosen.items(), unit="client")}
    table = tabulate(
        [rows[name] for name in CLIENTS if name in rows],
        headers="keys", tablefmt="github", missingval="-", disable_numparse=True,
    )  # fmt: skip
    if not writes:
        print(table)
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
