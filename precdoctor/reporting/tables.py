"""Tables without lines, as every screen shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.table import Table

#: What :class:`rich.table.Table` is told of a column.
Column = dict[str, Any]


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
