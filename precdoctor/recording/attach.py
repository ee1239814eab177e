"""What the recorder needs from the process it finds itself in: its rank, its exits, and a place to say one sentence."""

from __future__ import annotations

import atexit
import fnmatch
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parent.parent)


def say(message: str) -> None:
    """One line on stderr. Never raises: the script may have closed it."""
    try:
        print(f"precdoctor: {message}", file=sys.stderr, flush=True)  # noqa: T201 -- inside the user's process
    except (OSError, ValueError):
        pass


def global_rank() -> int:
    """The rank of this process: the process group's if there is one by now, else what a launcher set, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return 0


def at_exit(close: Callable[[], None]) -> None:
    """Run ``close`` at a clean end of this process, also of a ``multiprocessing`` child, which skips ``atexit``."""
    atexit.register(close)
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import process, util

        if process.parent_process() is not None:
            util.Finalize(None, close, exitpriority=0)


def glob_allows(include: Sequence[str], exclude: Sequence[str], module: str) -> bool:
    """Whether module globs let a FQN through: some ``include`` matches (none given: all do) and no ``exclude`` does."""
    if include and not any(fnmatch.fnmatchcase(module, glob) for glob in include):
        return False
    return not any(fnmatch.fnmatchcase(module, glob) for glob in exclude)


def innermost_own_frame(error: BaseException) -> str | None:
    """``file:line`` of the deepest frame of an exception inside this package, relative to it."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    return f"{own[-1].filename[len(_PACKAGE) + 1 :]}:{own[-1].lineno}" if own else None


def caller_outside(*packages: str) -> tuple[str, int] | None:
    """File and line of the innermost caller that is neither ours nor in one of the named packages' directories.

    Falls back to the innermost one outside torch when every frame is in an installed package.
    """
    frame = sys._getframe(1)
    fallback = None
    while frame is not None:
        file = frame.f_code.co_filename
        ours = (
            file.startswith(_PACKAGE) or file.startswith("<") or any(f"{os.sep}{p}{os.sep}" in file for p in packages)
        )
        if not ours:
            if f"{os.sep}site-packages{os.sep}" not in file and f"{os.sep}dist-packages{os.sep}" not in file:
                return file, frame.f_lineno
            fallback = fallback or (file, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return fallback
