"""Makes the program's consoles (results on stdout, messages on stderr), with colours and width to suit the output."""

from __future__ import annotations

import os
import re
import sys
from typing import IO, cast

from rich.console import Console
from rich.theme import Theme

#: Columns if the output is no terminal (a file, a pipe, a CI log).
PIPED_WIDTH = 100
#: Most columns on a terminal; longer lines are hard to read.
READING_WIDTH = 140

#: The start of a workflow command, which GitHub would run; blanks may precede it.
_COMMAND = re.compile(r"^(\s*)::", re.MULTILINE)

#: ASCII for typographic characters, for terminals without Unicode. Drawings have their own ASCII form.
_PLAIN = str.maketrans({"–": "-", "…": "...", "×": "x"})

THEME = Theme(
    {
        "pd.error": "bold red",
        "pd.warning": "bold yellow",
        "pd.info": "bold cyan",
        "pd.good": "green",
        "pd.label": "dim",
        "pd.quiet": "dim",
        "pd.strong": "bold",
        "pd.bad": "red",
        "pd.near": "yellow",
        "pd.code": "cyan",
    },
    inherit=False,
)


def make_console(file: IO[str] | None = None, width: int | None = None, *, colour: bool | None = None) -> Console:
    """A console that prints text as it is: no markup, no emoji codes, no guessed highlighting.

    Args:
        file: where to print; default stdout.
        width: columns; default the terminal's (at most :data:`READING_WIDTH`), or :data:`PIPED_WIDTH` without one.
        colour: force colours on or off; default: on a terminal, unless NO_COLOR or TERM=dumb; FORCE_COLOR forces them.
    """
    file = sys.stdout if file is None else file
    watched = _is_tty(file)
    console = _Console(
        file=cast("IO[str]", _Stream(file)),
        theme=THEME,
        width=width,
        force_terminal=colour,
        no_color=True if colour is False else None,
        color_system="auto" if colour is None else "standard" if colour else None,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
        legacy_windows=False,
    )
    if width is None:
        if watched:
            console.width = min(console.width, READING_WIDTH)
        elif not os.environ.get("COLUMNS", "").isdigit():
            console.width = PIPED_WIDTH
    return console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with status 1, which means findings


class _Stream:
    """Filters all output: removes trailing blanks, defuses CI commands, and spells typography in ASCII if needed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._unicode = (getattr(file, "encoding", None) or "utf-8").lower().startswith("utf")

    def write(self, text: str) -> int:
        if not self._unicode:
            text = text.translate(_PLAIN)
        return self._file.write(_COMMAND.sub(r"\1: :", re.sub(" +\n", "\n", text)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def _is_tty(file: IO[str]) -> bool:
    try:
        return file.isatty()
    except ValueError:  # closed
        return False


def can_draw(console: Console) -> bool:
    """Return whether the console's encoding has block characters."""
    return not console.options.ascii_only
