"""The run directory: schema, writer, reader, verification. Names are imported on first use, so that a process that only
writes does not pay for the reader, nor the reverse. Verification is :func:`precdoctor.runlog.verify.verify`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precdoctor.runlog.layout import create_rank_directory, create_run, newest_run
    from precdoctor.runlog.reader import RankLog, Run, open_run
    from precdoctor.runlog.sealing import seal
    from precdoctor.runlog.verify import Verification
    from precdoctor.runlog.writer import DiskBudgetReached, RankWriter

__all__ = [
    "DiskBudgetReached",
    "RankLog",
    "RankWriter",
    "Run",
    "Verification",
    "create_rank_directory",
    "create_run",
    "newest_run",
    "open_run",
    "seal",
]

_HOME = {
    "DiskBudgetReached": "writer",
    "RankLog": "reader",
    "RankWriter": "writer",
    "Run": "reader",
    "Verification": "verify",
    "create_rank_directory": "layout",
    "create_run": "layout",
    "newest_run": "layout",
    "open_run": "reader",
    "seal": "sealing",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value
