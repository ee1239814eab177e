"""Tables without lines, as every screen shows them, and names of modules and tensors in narrow ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from precdoctor.reporting.text import clean

#: What :class:`rich.table.Table` is told of a column.
Column = dict[str, Any]
_PARTS = re.compile(r"[^. ]*[. ]?")
_WORDS = re.compile(r"[^_]*_?")


def left(*titles: str, style: str = "") -> list[Column]:
    """Columns of words that stay on one line."""
    return [{"header": title, "no_wrap": True, "style": style or None} for title in titles]


def right(*titles: str) -> list[Column]:
    """Columns of numbers."""
    return [{"header": title, "no_wrap": True, "justify": "right"} for title in titles]


def folded(*titles: str, **more: Any) -> list[Column]:
    """Columns of text that goes on in the next line where it has no room."""
    return [{"header": title, "overflow": "fold", **more} for title in titles]


def table(*columns: Column, gap: int = 2, header: bool = True) -> Table:
    """A table with these columns, ``gap`` blanks apart."""
    made = Table(box=None, padding=(0, gap, 0, 0), header_style="pd.label", pad_edge=False, show_header=header)
    for column in columns:
        made.add_column(**column)
    return made


def grid(*columns: Column, gap: int = 2) -> Table:
    """The same without titles."""
    made = Table.grid(padding=(0, gap, 0, 0))
    for column in columns:
        made.add_column(**column)
    return made


def facts(rows: Iterable[tuple[str, RenderableType]], *, gap: int = 2, width: int | None = None) -> Table:
    """A label, ``width`` columns wide if that is given, and a value in each row."""
    made = grid({"style": "pd.label", "no_wrap": True, "width": width}, *folded(""), gap=gap)
    for label, value in rows:
        made.add_row(label, value)
    return made


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
