"""Finds the line of the user's code to which an op belongs."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from precdoctor.recording.process.attach import is_installed, is_main_code, shown

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with file names of frames, once per op
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120 - the same
#: The folder of Python's own modules, which also holds installed packages.
_PYTHON = sysconfig.get_path("stdlib") + os.sep
#: Beginnings of the file names of code that is not the user's: ours, torch's, made at run time.
_FOREIGN = (_OWN, _TORCH, "<")

#: Kinds of files by name, for files met so far; bounded, because a process may make up file names at run time.
_USERS, _SKIPPED, _OURS, _UNNAMED = 0, 1, 2, 3
_kinds: dict[str, int] = {}
_MAX_KINDS = 1 << 12
#: Folders of our wrappers around functions that the user calls (``Tensor.to``): their frames start no replay.
_WRAPPERS = (_OWN + "fp8" + os.sep, _OWN + "applying" + os.sep)


class Line(NamedTuple):
    """A line of code: the file as frames spell it, and its number."""

    file: str
    number: int

    @property
    def shown(self) -> str:
        """The path as it is displayed."""
        return shown(self.file)

    @property
    def code(self) -> str | None:
        """The text of the line; None if the source is not available."""
        return linecache.getline(self.file, self.number).strip() or None

    @property
    def in_library(self) -> bool:
        """Whether the line belongs to an installed package."""
        return is_installed(self.file)


def line_columns(line: Line | None) -> dict[str, Any]:
    """Return the columns ``file``, ``line`` and ``code`` of an event; empty without a line."""
    return {} if line is None else {"file": line.shown, "line": line.number, "code": line.code}


def is_foreign(file: str) -> bool:
    """Return whether code of that file is not the user's: torch's, ours or made at run time."""
    return file.startswith(_FOREIGN)


def _kind_of(file: str) -> int:
    if len(_kinds) >= _MAX_KINDS:
        _kinds.clear()
    ours = file.startswith(_OWN) and not file.startswith(_WRAPPERS)
    unnamed = _UNNAMED if file.startswith("<") else _USERS
    foreign = file.startswith((_OWN, _TORCH)) or (file.startswith(_PYTHON) and not is_installed(file))
    found = _kinds[file] = _OURS if ours else _SKIPPED if foreign else unnamed
    return found


def innermost_user_line(*, past_own: bool = False, past_libraries: bool = False) -> Line | None:
    """Return the line of the innermost frame that is neither torch's nor ours; None if there is none.

    The search ends at the frame that started autograd's engine or a replay of ours: that line belongs to no op.

    Args:
        past_own: go past our frames: they are wrappers around torch's functions and have started nothing.
        past_libraries: whether to also go past installed packages.
    """
    frame: FrameType | None = sys._getframe(1)
    left_own = False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if (kind := _kinds.get(file)) is None:
            kind = _kind_of(file)
        if kind == _OURS:
            if left_own and not past_own:
                return None
        else:
            left_own = True
            if code.co_name == "_engine_run_backward":
                return None
            own = kind == _USERS and not (past_libraries and is_installed(file))
            if own or (kind == _UNNAMED and is_main_code(frame)):
                return tuple.__new__(Line, (file, frame.f_lineno or code.co_firstlineno))
        frame = frame.f_back
    return None


def op_lines() -> tuple[Line | None, Line | None]:
    """Return the innermost line behind the running op, and the user's line behind it if it is in a library."""
    line = innermost_user_line(past_own=True)
    caller = innermost_user_line(past_own=True, past_libraries=True) if line is not None and line.in_library else None
    return line, caller


def calls_in_progress(module: nn.Module, among: int | None = None) -> int:
    """Return how many calls of a module are on this thread's stack.

    Args:
        among: number of innermost frames to search; None: all.
    """
    frame: FrameType | None = sys._getframe(1)
    calls = looked_at = 0
    while frame is not None and looked_at != among:
        calls += frame.f_code.co_name == "_wrapped_call_impl" and frame.f_locals.get("self") is module
        frame, looked_at = frame.f_back, looked_at + 1
    return calls
