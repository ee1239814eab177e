"""What the recorder needs from the process it runs in: its rank, its exits, and a place to print one sentence."""

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
#: Where the run began, with a separator at the end; empty: paths are shown whole.
_began_in = ""


def say(message: str, *, prefix: str = "precdoctor: ") -> None:
    """One line on stderr. Never raises: the script may have closed it, or put something else in its place."""
    if sys.stderr is None:
        return  # print would take stdout instead
    with contextlib.suppress(Exception):  # there is nowhere left to print it
        print(f"{prefix}{message}", file=sys.stderr, flush=True)  # noqa: T201 - inside the user's process


def call_all(functions: Iterable[Callable[[], None]]) -> None:
    """Call each of them, in their order."""
    for function in functions:
        function()


def in_data_loader_worker() -> bool:
    """Whether this process loads data for another one."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and module.get_worker_info() is not None


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


def is_distributed() -> bool:
    """Whether this process is in a process group by now."""
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed is not None and distributed.is_available() and distributed.is_initialized())


def has_other_ranks() -> bool:
    """Whether that group also has other processes."""
    return is_distributed() and bool(sys.modules["torch.distributed"].get_world_size() > 1)


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


def sentence(error: BaseException) -> str:
    """What has gone wrong, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:500] + where


def innermost_own_frame(error: BaseException) -> str | None:
    """``file:line`` of the deepest frame of an exception inside this package, relative to it."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(_PACKAGE)]
    return f"{own[-1].filename[len(_PACKAGE) :]}:{own[-1].lineno}" if own else None


def raised_by_an_object(error: BaseException) -> bool:
    """Whether an exception comes out of a special method (``__torch_function__``, ``__eq__``) of a class of others'."""
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
    """Whether an exception comes out of a handler of the user's that happened to run inside one of our hooks."""
    frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(_code_of(signal.getsignal(number)) in frames for number in signal.valid_signals())


def let_through(error: BaseException) -> None:
    """For ``except`` clauses that expect something else: what a signal handler of the user's raised is the user's.

    Raises:
        BaseException: ``error``, when it came out of such a handler.
    """
    if raised_by_signal_handler(error):
        raise error


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None  # SIG_DFL, SIG_IGN, or one that was not set from Python
    code = getattr(handler, "__code__", None)  # a function or a method, else an object with __call__
    return code if code is not None else getattr(type(handler).__call__, "__code__", None)


def caller_outside(*packages: str) -> tuple[str, int] | None:
    """File and line of the innermost caller that is neither ours nor in one of the named packages.

    Falls back to the innermost one outside of them when every frame is in an installed package.
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
    """What :func:`caller_outside` takes files for, until another module is loaded: this is asked in every step."""
    return {}


def is_main_code(frame: FrameType) -> bool:
    """Whether code without a file is the user's: what ``python -``, ``-c`` or a notebook's ``%%time`` runs."""
    return dict.get(frame.f_globals, "__name__") == "__main__"


def kind_of_file(file: str, packages: tuple[str, ...]) -> str:
    """``user``, ``installed``, ``left out`` (ours, or of one of the packages), or ``unnamed``."""
    if file.startswith("<"):
        return "unnamed"
    if file.startswith(_directories_of(packages, len(sys.modules))):
        return "left out"
    return "installed" if is_installed(file) else "user"


def is_installed(file: str) -> bool:
    """Whether a file is part of an installed package, and none that the user edits."""
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


def begin_here() -> None:
    """From now on paths are shown from the working directory there is; a script may leave it, or remove it."""
    global _began_in  # noqa: PLW0603 - the process has one
    try:
        _began_in = str(Path.cwd()) + os.sep
    except OSError:
        _began_in = ""


def shown(file: str) -> str:
    """A path as people want to read it: below the directory the recording began in, from there on."""
    return file.removeprefix(_began_in)


@functools.lru_cache(maxsize=8)
def _directories_of(packages: tuple[str, ...], _loaded: int) -> tuple[str, ...]:
    """Where our files and those of some packages are, as far as these are loaded."""
    return (_RECORDER, "<", *(d for p in packages if (d := _directory_of(p)) is not None))


def _directory_of(package: str) -> str | None:
    file = getattr(sys.modules.get(package), "__file__", None)
    return None if file is None else os.path.dirname(file) + os.sep  # noqa: PTH120 - once per step, so no pathlib
