"""Builds the borderless tables of all terminal reports, and wraps names of modules and tensors in narrow cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from precdoctor.reporting.text import clean

#: Keyword arguments of :meth:`rich.table.Table.add_column`.
Column = dict[str, Any]
_PARTS = re.compile(r"[^. ]*[. ]?")
_WORDS = re.compile(r"[^_]*_?")


def left(*titles: str, style: str = "") -> list[Column]:
    """Left-aligned columns of words that do not wrap."""
    return [{"header": title, "no_wrap": True, "style": style or None} for title in titles]


def right(*titles: str) -> list[Column]:
    """Right-aligned columns of numbers that do not wrap."""
    return [{"header": title, "no_wrap": True, "justify": "right"} for title in titles]


def folded(*titles: str, **more: Any) -> list[Column]:
    """Columns of text that wraps."""
    return [{"header": title, "overflow": "fold", **more} for title in titles]


def table(*columns: Column, gap: int = 2, header: bool = True) -> Table:
    """A table with these columns, ``gap`` blanks apart."""
    made = Table(box=None, padding=(0, gap, 0, 0), header_style="pd.label", pad_edge=False, show_header=header)
    for column in columns:
        made.add_column(**column)
    return made


def grid(*columns: Column, gap: int = 2) -> Table:
    """A table with these columns and no header."""
    made = Table.grid(padding=(0, gap, 0, 0))
    for column in columns:
        made.add_column(**column)
    return made


def facts(rows: Iterable[tuple[str, RenderableType]], *, gap: int = 2, width: int | None = None) -> Table:
    """A grid of labels and values, one pair per row; ``width`` is that of the labels, in cells."""
    made = grid({"style": "pd.label", "no_wrap": True, "width": width}, *folded(""), gap=gap)
    for label, value in rows:
        made.add_row(label, value)
    return made


class Name:
    """A table cell with the name of a module or tensor, ``blocks.3.attn.c_proj grad_output``.

    Lines break after a dot or a blank; inside a part that is too wide, after an underscore; inside a word that is too
    wide, anywhere.
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
    """The lines of a name, at most ``width`` cells wide; only a single word may be wider."""
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
