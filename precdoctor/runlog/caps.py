"""How much a log may hold before a command refuses to read it: work grows with what a log states, not with its size."""

from __future__ import annotations

import os
from typing import Final

from precdoctor.errors import RunTooLargeError

#: Set by ``precdoctor --any-size``; the processes that a command starts inherit it.
ANY_SIZE: Final = "PRECDOCTOR_ANY_SIZE"
#: Processes of a run, all attempts together.
MAX_DIRECTORIES: Final = 1 << 14
#: Parts of all processes together; a process that trains for a month leaves some ten thousand.
MAX_PARTS: Final = 1 << 18
#: Rows of a table that parts.jsonl lists, all processes together. What is kept of each step takes about 1 kB in memory.
MAX_ROWS: Final = {"tensors": 1 << 28, "steps": 1 << 20, "events": 1 << 20}
#: Rows of one step of one process, about 2 kB each in memory: a model of 50 000 modules has as many.
MAX_STEP_ROWS: Final = 1 << 18


def hold(count: int, limit: int, what: str) -> None:
    """Refuse what is beyond a cap, unless the user has lifted the caps.

    Raises:
        RunTooLargeError: ``count`` is above ``limit``; ``what`` names it: ``runs/a holds {} rank directories``.
    """
    if count > limit and not os.environ.get(ANY_SIZE):
        raise RunTooLargeError(
            f"{what.format(f'{count:,}')}, more than the {limit:,} that are read by default; to read them all, type: "
            "precdoctor --any-size, then the command"
        )
