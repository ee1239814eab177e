"""The fenced code of a documentation page, as its readers would copy it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class CodeBlock:
    language: str
    #: A file name, or what the block is about; may be empty.
    title: str
    code: str
    #: The heading it stands under.
    under: str


def blocks(page: Path) -> list[CodeBlock]:
    """All of a page, in order. A `#` inside a block is no heading."""
    text = page.read_text()
    fences = list(_FENCE.finditer(text))
    inside = [range(f.start(), f.end()) for f in fences]
    headings = [h for h in _HEADING.finditer(text) if not any(h.start() in span for span in inside)]
    found = []
    for fence in fences:
        under = [h.group(1) for h in headings if h.start() < fence.start()]
        found.append(CodeBlock(fence[1], fence[2] or "", fence[3], under[-1] if under else ""))
    return found
