"""Pages in a headless browser: what a script finds in them, and whether they raise."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CATCH = """<script>
window.failures = [];
addEventListener("error", (event) => failures.push(event.message));
addEventListener("securitypolicyviolation", (event) => failures.push(event.violatedDirective));
</script>"""
_ANSWER = """<script>
{
  let answer = null;
  try { answer = (() => { %s })(); } catch (error) { failures.push(String(error)); }
  const text = JSON.stringify({ answer, failures });
  parent.document.body.append(element("pre", { id: "answer" }, text));
}
</script>"""


def answer_of(page: str, script: str, folder: Path, width: int = 0) -> Any:
    """What `script`, the body of a function, returns at the end of the page, as JSON has it.

    With a `width` in pixels the page stands in a frame of that width: windows are no narrower than
    500.

    Fails where the page or the script raised; skips the test where there is no browser.
    """
    binary = next(filter(None, map(shutil.which, _NAMES)), None)
    if binary is None:
        pytest.skip(f"no browser: none of {', '.join(_NAMES)} is installed")
    head, tail = page.rsplit("</body>", 1)
    page = f"{head}{_ANSWER % script}</body>{tail}".replace("<head>", f"<head>{_CATCH}", 1)
    if width:
        frame = (
            f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(page)}">'
        )
        page = f"<!doctype html><body>{frame}</iframe></body>"
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1500,1100"]
    command = [binary, *options, f"--user-data-dir={folder}", "--dump-dom", path.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = re.search(r'<pre id="answer">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert found, f"the page gave no answer: {ended.stderr[-500:]}"
    answer = json.loads(html.unescape(found[1]))
    assert answer["failures"] == []
    return answer["answer"]
