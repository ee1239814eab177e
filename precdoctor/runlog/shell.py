"""Quotes words so that they can be pasted into a shell, whatever characters a path or a recorded command holds."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

#: Characters that need no escape inside ``$'...'``: printable ASCII except backslash and apostrophe.
_PLAIN = frozenset('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 !"$%&()*+,-./:;<=>?@[]^_`{|}~')


def quoted(word: str) -> str:
    r"""One word for bash, zsh or ksh, on one line: control characters and undecodable bytes become ``$'\012'``.

    So does every ``#`` of a word with ``##``, because CI runners obey ``##[error]``.
    """
    if word.isprintable() and "##" not in word:
        return shlex.quote(word)
    return "$'" + "".join(c if c in _PLAIN else _escaped(c) for c in word) + "'"


def _escaped(character: str) -> str:
    try:
        content = os.fsencode(character)
    except UnicodeEncodeError:  # a lone surrogate: a hostile log may hold one, a file name does not
        content = character.encode("utf-8", "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in content)


def quoted_path(path: str | os.PathLike[str]) -> str:
    """A quoted path; ``./`` goes before a leading dash, so that it is not taken for an option."""
    word = os.fspath(path)
    return quoted(f"./{word}" if word.startswith("-") else word)


def quoted_command(words: Iterable[str]) -> str:
    """The quoted words of a command, joined by spaces."""
    return " ".join(map(quoted, words))
