"""The two consoles of the program: data on stdout, talk on stderr; colours and width as the place asks for."""

from __future__ import annotations

import os
import re
import sys
from typing import IO, cast

from rich.console import Console
from rich.theme import Theme

#: Used when nobody watches (a file, a pipe, a CI log).
PIPED_WIDTH = 100
#: Wider than this and the eye loses the line.
READING_WIDTH = 140

#: GitHub runs a line that begins like this, blanks before it included.
_COMMAND = re.compile(r"^(\s*)::", re.MULTILINE)

#: Typography that a terminal without Unicode gets in ASCII; drawings have an ASCII form of their own.
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
        raise BrokenPipeError  # rich would exit with 1, which here means findings


class _Stream:
    """What every line goes through: no blanks that pad to a width, nothing CI takes for a command, no mojibake."""

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
    """Whether block characters survive the encoding of this console."""
    return not console.options.ascii_only
