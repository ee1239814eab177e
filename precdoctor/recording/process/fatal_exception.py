"""Finds the exception or status that ends a process, for the log. Runs no code of the exception's class."""

from __future__ import annotations

import builtins
import functools
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from precdoctor.recording.process.attach import is_main_code, kind_of_file, shown

#: Most characters of a message in the log.
_LONGEST = 500
#: Torch's exceptions whose only argument is their text, by module.
_OF_TORCH = {
    "torch": ("OutOfMemoryError", "AcceleratorError"),
    "torch._C": ("_LinAlgError", "_DistError", "_DistBackendError", "_DistNetworkError", "_DistStoreError"),
}
#: Words of messages, and of code that raises, about values that are not finite.
_NONFINITE = re.compile(
    r"\b(nans?|infs?|is_?(nan|inf|finite)|(non-?|not |in)finite|infinity|invalid values)\b", re.IGNORECASE
)
_NAME = type.__dict__["__name__"]
_TRACEBACK, _ARGUMENTS = BaseException.__dict__["__traceback__"], BaseException.__dict__["args"]
_MODULE_OF_BUILTINS = vars(builtins)
#: The last argument of ``sys.exit``.
_exit_arguments: list[Any] = []
#: The exception that nobody caught before the recorded block began, in an interactive interpreter.
_earlier: list[object] = []


def note_exits(leaving: Callable[[FrameType], object]) -> None:
    """Patch ``sys.exit`` to remember its argument, because Python does not keep a ``SystemExit`` that ends it.

    Args:
        leaving: called first, with the frame that calls ``sys.exit``.
    """
    begin_anew()
    original = sys.exit

    @functools.wraps(original)
    def leave(status: Any = None, /) -> NoReturn:
        _exit_arguments[:] = [status]
        leaving(sys._getframe(1))
        original(status)

    sys.exit = leave


def begin_anew() -> None:
    """Forget how earlier code of the process ended: cells of a notebook fail, and tests catch ``SystemExit``."""
    _exit_arguments.clear()
    _earlier[:] = [getattr(sys, "last_value", None)]


def _uncaught() -> object:
    """Return the exception that Python has stored as uncaught since :func:`begin_anew`; None without one."""
    error = getattr(sys, "last_value", None)
    return None if _earlier and error is _earlier[0] else error


def calls_left() -> list[TracebackType]:
    """Return the calls that the exception which ends the process or the recorded block has left, innermost first."""
    error = sys.exc_info()[1] or _uncaught()
    trace, calls = _TRACEBACK.__get__(error) if isinstance(error, BaseException) else None, []
    while trace is not None:
        calls.append(trace)
        trace = trace.tb_next
    return calls[::-1]


def ends_badly() -> bool:
    """Return whether the process, or the recorded block, ends with an uncaught exception or a failure status."""
    error = sys.exc_info()[1] or _uncaught()
    if isinstance(error, SystemExit):
        return _is_failure(error.code)
    return isinstance(error, Exception) or any(map(_is_failure, _exit_arguments))


def _is_failure(status: object) -> bool:
    """Return whether Python turns this argument of ``sys.exit`` into a status other than 0."""
    return status is not None and not (issubclass(type(status), int) and int.__eq__(status, 0))  # type: ignore[operator]


def tells_of_nonfinite() -> bool:
    """Return whether the exception that ends the process, or the line that raised it, is about NaN or infinities.

    torch's distributions raise such exceptions, and so do assertions of the user's.
    """
    error = sys.exc_info()[1] or _uncaught()
    if not isinstance(error, Exception):
        return False
    texts = [x for x in _ARGUMENTS.__get__(error) if type(x) is str]
    texts += [linecache.getline(c.tb_frame.f_code.co_filename, c.tb_lineno) for c in calls_left()[:1]]
    return any(map(_NONFINITE.search, texts))


def fatal_exception(*, redact: bool = False) -> dict[str, Any] | None:
    """Return type, message, file and line of the exception that ends the main thread; None if there is none.

    Python stores an uncaught exception before it calls ``sys.excepthook``; ``sys.exit`` stores none.

    Args:
        redact: leave out the message, and of the file all but its name.
    """
    error = _uncaught()
    if not isinstance(error, BaseException):
        return None
    found: dict[str, Any] = {"type": _NAME.__get__(type(error))[:_LONGEST]}
    if not redact and (message := _message(error)):
        found["message"] = message[:_LONGEST]
    if (place := _last_line_of_user(_TRACEBACK.__get__(error))) is not None:
        file, found["line"] = place
        found["file"] = file.rpartition("/")[2] if redact else file
    return found


def _message(error: BaseException) -> str | None:
    """Return the message from the arguments of a known class; None for others, whose ``__str__`` may run user code."""
    if not _is_known(type(error)):
        return None
    args = error.args
    if isinstance(error, OSError) and len(args) == 2 and type(args[1]) is str:
        name = error.filename
        return f"{args[1]}: {name!r}" if type(name) is str else args[1]
    if len(args) != 1 or type(args[0]) not in (str, int):
        return None
    return repr(args[0]) if isinstance(error, KeyError) else str(args[0])


def _is_known(kind: type[BaseException]) -> bool:
    """Return whether an exception class is a builtin or one of torch's."""
    name = _NAME.__get__(kind)
    if _MODULE_OF_BUILTINS.get(name) is kind:
        return True
    modules = ((sys.modules.get(module), names) for module, names in _OF_TORCH.items())
    return any(vars(module).get(n) is kind for module, names in modules if module is not None for n in names)


def _last_line_of_user(trace: TracebackType | None) -> tuple[str, int] | None:
    """Return file and line of the deepest frame in the user's own code; None if there is none."""
    found = None
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        kind = kind_of_file(file, ("torch", "os"))
        if kind == "user" or (kind == "unnamed" and is_main_code(frame)):
            found = shown(file), line
    return found
