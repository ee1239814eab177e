"""Snippets on a terminal: lines that fit, so that what is copied from the screen still runs."""

from __future__ import annotations

import textwrap

_COMMENT = "  # "


def fitted(code: str, width: int) -> str:
    """Code in which a comment never makes a line wider than ``width``.

    A comment behind code that is too wide goes above it; one on a line of its own is broken into several. Code alone
    stays as it is: where a statement may be broken is for its writer to say.
    """
    return "\n".join(part for line in code.split("\n") for part in _fitted(line, width))


def _fitted(line: str, width: int) -> list[str]:
    body = line.lstrip()
    if len(line) <= width or "#" not in body:
        return [line]
    indent = line[: len(line) - len(body)]
    code, found, comment = ("", "#", body[1:].strip()) if body.startswith("#") else body.rpartition(_COMMENT)
    if not found:
        return [line]
    start = f"{indent}# "
    above = textwrap.wrap(comment, max(width, len(start) + 20), initial_indent=start, subsequent_indent=start)
    return [*above, indent + code.rstrip()] if code else above
