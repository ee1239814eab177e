"""Running the report's JavaScript, and looking at its pages as Chromium shows them."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

NODE = shutil.which("node")
CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
WITHOUT_ENGINE = "no JavaScript engine: install node or chromium"
WITHOUT_BROWSER = "no browser: install chromium"


def evaluate(script: str) -> object:
    """The JSON that ``script``, a function body, returns; by node if there is one, else by Chromium."""
    if NODE is not None:
        code = f"console.log(JSON.stringify((() => {{{script}}})()))"
        done = subprocess.run([NODE, "-"], input=code, capture_output=True, text=True, check=True, timeout=60)
        return json.loads(done.stdout)
    page = f"<!doctype html><pre id=out></pre><script>out.textContent = JSON.stringify((() => {{{script}}})())</script>"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page)
        dom, _ = dump(file)
    return json.loads(html.unescape(re.search(r"<pre id=\"out\">(.*?)</pre>", dom, flags=re.DOTALL)[1]))


def dump(page: Path, *arguments: str, fragment: str = "") -> tuple[str, list[str]]:
    """The DOM of a page after its scripts ran, and what was said on the console: by scripts, by the content policy.

    A page that opens a dialogue never ends and is a TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(CHROMIUM, "--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage", "--no-first-run"),
            *("--enable-logging=stderr", "--log-level=0", f"--user-data-dir={profile}", "--virtual-time-budget=4000"),
            *(*arguments, "--dump-dom", page.resolve().as_uri() + fragment),
        ]
        environment = {**os.environ, "HOME": profile}
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=60, env=environment
        )
    return done.stdout, re.findall(r'CONSOLE.*?\] "(.*?)", source', done.stderr)
