"""Words that can be pasted into a shell, whatever a path or a recorded command holds. Imports little."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

#: What stands for itself where any character is escaped; a backslash and an apostrophe do not.
_PLAIN = frozenset('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 !"$%&()*+,-./:;<=>?@[]^_`{|}~')


def quoted(word: str) -> str:
    r"""One word for bash, zsh or ksh, on one line: control characters and bytes that are no text as ``$'\012'``."""
    if word.isprintable() and "##" not in word:
        return shlex.quote(word)
    return "$'" + "".join(c if c in _PLAIN else _escaped(c) for c in word) + "'"


def _escaped(character: str) -> str:
    try:
        content = os.fsencode(character)
    except UnicodeEncodeError:  # half a pair, which a log may hold and no file name does
        content = character.encode("utf-8", "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in content)


def quoted_path(path: str | os.PathLike[str]) -> str:
    """A path as an argument; one that begins with a dash is no option."""
    word = os.fspath(path)
    return quoted(f"./{word}" if word.startswith("-") else word)


def quoted_command(words: Iterable[str]) -> str:
    """A command with its arguments."""
    return " ".join(map(quoted, words))
