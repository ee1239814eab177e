"""The command of a run in a file that is committed: without the values of options that name a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "<hidden>"
#: Parts of an option's name that say its value is nobody's business.
_SECRET = frozenset(["auth", "credential", "credentials", "key", "passwd", "password", "pat", "secret", "token"])
_NAME = re.compile(r"-{0,2}([A-Za-z][\w.-]*)")


def without_secrets(command: Iterable[str]) -> list[str]:
    """``--api-key abc`` and ``HF_TOKEN=abc`` with ``<hidden>`` for ``abc``; numbers (``--max-token 512``) stay."""
    out: list[str] = []
    hide = False
    for word in command:
        name, equals, value = word.partition("=")
        if hide and not word.startswith("-"):
            out.append(word if _is_number(word) else HIDDEN)
            hide = False
            continue
        hide = not equals and word.startswith("-") and _is_secret(name)
        out.append(f"{name}={HIDDEN}" if equals and _is_secret(name) and not _is_number(value) else word)
    return out


def _is_secret(name: str) -> bool:
    found = _NAME.fullmatch(name)
    return found is not None and not _SECRET.isdisjoint(re.split(r"[._-]", found[1].lower()))


def _is_number(value: str) -> bool:
    return re.fullmatch(r"[-+.\deE]+", value) is not None
