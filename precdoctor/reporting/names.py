"""Names of modules and tensors in narrow tables: broken where a reader breaks them, not in the middle of a word."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from precdoctor.reporting.text import clean

_PARTS = re.compile(r"[^. ]*[. ]?")
_WORDS = re.compile(r"[^_]*_?")


class Name:
    """``blocks.3.attn.c_proj grad_output`` in a table cell.

    Lines end behind a dot or a blank; in a part that is too wide by itself behind an underscore; only in a word that is
    too wide by itself anywhere.
    """

    def __init__(self, name: str, style: str = "") -> None:
        self._name = clean(name)
        self._style = style

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max((Text(part.strip()).cell_len for part in _PARTS.findall(self._name)), default=0)
        return Measurement(widest, Text(self._name).cell_len).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = "\n".join(line.rstrip() for line in wrapped(self._name, options.max_width))
        yield Text(lines, self._style, overflow="fold")


def wrapped(name: str, width: int) -> Iterator[str]:
    """The lines of a name, none wider than ``width`` cells where its words are not."""
    line = ""
    for part in _broken(name, width):
        if line and Text((line + part).rstrip()).cell_len > width:
            yield line
            line = ""
        line += part
    yield line


def _broken(name: str, width: int) -> Iterator[str]:
    for part in filter(None, _PARTS.findall(name)):
        yield from filter(None, _WORDS.findall(part)) if Text(part.rstrip()).cell_len > width else (part,)
