"""Caps on directories, parts, rows and memory: a command refuses a log above them. A small file can claim much work.

Also cuts names that are longer than a person would read.
"""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from pathlib import Path
from typing import ClassVar, Final

from precdoctor.errors import RunTooLargeError

#: Set by ``precdoctor --any-size``; the processes that a command starts inherit it.
ANY_SIZE: Final = "PRECDOCTOR_ANY_SIZE"
#: Processes of a run, all attempts together.
MAX_DIRECTORIES: Final = 1 << 14
#: Parts of all processes together; a process that trains for a month leaves some ten thousand.
MAX_PARTS: Final = 1 << 18
#: Rows of a table that parts.jsonl lists, all processes together.
MAX_ROWS: Final = {"tensors": 1 << 28, "steps": 1 << 26, "events": 1 << 20, "ops": 1 << 22}
#: Bytes of memory for everything that stays loaded of the open runs: documents, steps, events, names of tensors.
MAX_MEMORY: Final = 900_000_000
#: Most bytes of the Python object that a character of JSON announces: an object, a list, a key, a further value.
JSON_COSTS: Final = {"{": 240, "[": 100, ":": 140, ",": 72}
#: Rows of one step of one process, about 2 kB each in memory: a model of 50 000 modules has as many.
MAX_STEP_ROWS: Final = 1 << 18


def hold(count: int, limit: int, what: str) -> None:
    """Check a count against its cap, unless the user has lifted the caps (``--any-size``).

    ``what`` is the text of the error, with ``{}`` in place of the count: ``runs/a holds {} rank directories``.

    Raises:
        RunTooLargeError: ``count`` is above ``limit``.
    """
    if count > limit and not os.environ.get(ANY_SIZE):
        raise RunTooLargeError(
            f"{what.format(f'{count:,}')}, more than the {limit:,} that are read by default; to read them all, type: "
            "precdoctor --any-size, then the command"
        )


class Budget:
    """Counts the memory that one run, or one document, takes. All budgets alive share one cap, :data:`MAX_MEMORY`."""

    _open: ClassVar[weakref.WeakSet[Budget]] = weakref.WeakSet()

    def __init__(self, run: Path) -> None:
        self._run = run
        self._kept: dict[str, int] = {}
        self._open.add(self)

    def keep(self, what: str, size: int) -> None:
        """Set the bytes that ``what`` takes to ``size``; a smaller size than before is ignored.

        Raises:
            RunTooLargeError: all budgets together are above :data:`MAX_MEMORY`.
        """
        self._kept[what] = max(size, self._kept.get(what, 0))
        if self._total() > MAX_MEMORY:
            gc.collect()  # budgets of runs that are no longer referenced may still be counted
        own, total = sum(self._kept.values()), self._total()
        others = "" if own == total else ", with what is kept of other runs,"
        hold(total >> 20, MAX_MEMORY >> 20, f"{self._run}{others} unfolds to {{}} MiB in memory")

    def _total(self) -> int:
        return sum(sum(budget._kept.values()) for budget in self._open)


def json_cost(text: bytes) -> int:
    """Upper bound of the bytes that the values of a JSON document take in memory."""
    wide = 1 if text.isascii() and b"\\u" not in text else 4
    return 2 * wide * len(text) + sum(text.count(sign.encode()) * cost for sign, cost in JSON_COSTS.items())


#: Most characters of a source line or a name in an event.
MAX_NAME: Final = 1 << 16
_DIGEST: Final = 8


def shortened(text: str, limit: int = MAX_NAME) -> str:
    """``text``; if it has more than ``limit`` characters, its beginning and a digest of the whole, ``limit`` in all."""
    if len(text) <= limit:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST // 2).hexdigest()
    return f"{text[: limit - _DIGEST - 1]}…{digest}"
