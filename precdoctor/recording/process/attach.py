"""Facts of the process that the recorder runs in: its rank, its exits, its callers; and a way to print a sentence."""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_RECORDER = str(Path(__file__).resolve().parents[1]) + os.sep
_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
#: Exit status of ``record`` when precdoctor itself stopped the run (docs/exit-codes.md).
STOPPED_BY_US = 66
#: Working directory at the start of recording, with a separator; empty: paths are shown in full.
_start_directory = ""


def say(message: str, *, prefix: str = "precdoctor: ") -> None:
    """Print one line on stderr. Never raises: the script may have closed stderr or replaced it."""
    if sys.stderr is None:
        return  # print would write to stdout
    with contextlib.suppress(Exception):  # there is no other place to print to
        print(f"{prefix}{message}", file=sys.stderr, flush=True)  # noqa: T201 - inside the user's process


def call_all(functions: Iterable[Callable[[], None]]) -> None:
    """Call the functions in order."""
    for function in functions:
        function()


def in_data_loader_worker() -> bool:
    """Return whether this process is a worker of a DataLoader."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and module.get_worker_info() is not None


def global_rank() -> int:
    """Return the rank of this process: in its process group, else from a launcher's variables, else 0."""
    if is_distributed():
        return int(sys.modules["torch.distributed"].get_rank())
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return 0


def is_distributed() -> bool:
    """Return whether this process has joined a process group."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed is not None and distributed.is_available() and distributed.is_initialized())


def has_other_ranks() -> bool:
    """Return whether this process has joined a process group with other processes."""
    return is_distributed() and bool(sys.modules["torch.distributed"].get_world_size() > 1)


def at_exit(close: Callable[[], None]) -> None:
    """Run ``close`` at a clean end of this process; also in a ``multiprocessing`` child, which skips ``atexit``."""
    atexit.register(close)
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import process, util

        if process.parent_process() is not None:
            util.Finalize(None, close, exitpriority=0)


def glob_allows(include: Sequence[str], exclude: Sequence[str], module: str) -> bool:
    """Return whether module globs admit a FQN: an ``include`` matches (or there is none) and no ``exclude`` does."""
    if include and not any(fnmatch.fnmatchcase(module, glob) for glob in include):
        return False
    return not any(fnmatch.fnmatchcase(module, glob) for glob in exclude)


def sentence(error: BaseException) -> str:
    """Return type, message and place of an exception, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + where


def innermost_own_frame(error: BaseException) -> str | None:
    """Return ``file:line`` of the deepest frame of an exception in this package, relative to it; or None."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    return f"{own[-1].filename[len(_PACKAGE) :]}:{own[-1].lineno}" if own else None


def raised_by_an_object(error: BaseException) -> bool:
    """Return whether an exception comes from a special method (``__eq__``) of the user's or another package's class."""
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame.f_code
    known = _directories_of(("torch", "numpy", "os"), len(sys.modules))
    if innermost is None or innermost.co_filename.startswith((_PACKAGE, *known)):
        return False
    return any(
        frame.f_code.co_name.startswith("__") and not frame.f_code.co_filename.startswith((_PACKAGE, *known))
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def raised_by_signal_handler(error: BaseException) -> bool:
    """Return whether an exception comes from a user's signal handler that ran inside one of our hooks."""
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(_code_of(signal.getsignal(number)) in frames for number in signal.valid_signals())


def let_through(error: BaseException) -> None:
    """Raise ``error`` if a user's signal handler raised it. For ``except`` clauses meant for our own errors."""
    if raised_by_signal_handler(error):
        raise error


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None  # SIG_DFL, SIG_IGN, or not set from Python
    code = getattr(handler, "__code__", None)  # a function or a method, else an object with __call__
    return code if code is not None else getattr(type(handler).__call__, "__code__", None)


def caller_outside(*packages: str) -> tuple[str, int] | None:
    """Return file and line of the innermost caller that is neither ours nor in one of the named packages.

    Prefers the user's own files to installed packages. None if there is no such caller.
    """
    kinds = _kinds_of_callers(packages, len(sys.modules))
    frame: FrameType | None = sys._getframe(1)
    fallback = None
    while frame is not None:
        file = frame.f_code.co_filename
        if (kind := kinds.get(file)) is None:
            kind = kinds[file] = kind_of_file(file, packages)
        if kind == "user" or (kind == "unnamed" and is_main_code(frame)):
            return shown(file), frame.f_lineno
        if kind == "installed":
            fallback = fallback or (shown(file), frame.f_lineno)
        frame = frame.f_back
    return fallback


@functools.lru_cache(maxsize=8)
def _kinds_of_callers(_packages: tuple[str, ...], _loaded: int) -> dict[str, str]:
    """Return the cache of :func:`caller_outside`: file to kind, until another module is loaded. Runs every step."""
    return {}


def is_main_code(frame: FrameType) -> bool:
    """Return whether code without a file is the user's: run by ``python -``, ``-c`` or a notebook's ``%%time``."""
    return dict.get(frame.f_globals, "__name__") == "__main__"


def kind_of_file(file: str, packages: tuple[str, ...]) -> str:
    """Return ``user``, ``installed``, ``left out`` (ours, or in one of the packages), or ``unnamed``."""
    if file.startswith("<"):
        return "unnamed"
    if file.startswith(_directories_of(packages, len(sys.modules))):
        return "left out"
    return "installed" if is_installed(file) else "user"


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


def begin_here() -> None:
    """Show paths relative to the current working directory from now on; the script may leave or remove it."""
    global _start_directory  # noqa: PLW0603 - the process has one
    try:
        _start_directory = str(Path.cwd()) + os.sep
    except OSError:
        _start_directory = ""


def shown(file: str) -> str:
    """Return a path for people: relative to the directory that recording began in, if it is below that."""
    return file.removeprefix(_start_directory)


@functools.lru_cache(maxsize=8)
def _directories_of(packages: tuple[str, ...], _loaded: int) -> tuple[str, ...]:
    """Return the directories of our files and of those packages that are loaded."""
    return (_RECORDER, "<", *(d for p in packages if (d := _directory_of(p)) is not None))


def _directory_of(package: str) -> str | None:
    file = getattr(sys.modules.get(package), "__file__", None)
    return None if file is None else os.path.dirname(file) + os.sep  # noqa: PTH120 - once per step, so no pathlib
