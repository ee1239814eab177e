"""Which line of the user's code an operation belongs to."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from precdoctor.recording.process.attach import is_installed, is_main_code, shown

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared with file names of frames, once per op
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120 - the same
#: How the files of code begin that is none of the user's: torch's, ours, made at run time.
_FOREIGN = (_OWN, _TORCH, "<")

#: Kinds of files by name, as far as they have been met; a process may make files up at run time, so not for ever.
_USERS, _SKIPPED, _OURS, _UNNAMED = 0, 1, 2, 3
_kinds: dict[str, int] = {}
_MAX_KINDS = 1 << 12
#: Wrappers of ours around functions the user calls (``Tensor.to``): they start nothing.
_WRAPPERS = (_OWN + "fp8" + os.sep, _OWN + "applying" + os.sep)


class Line(NamedTuple):
    """A line of code: the file as frames spell it, and its number."""

    file: str
    number: int

    @property
    def shown(self) -> str:
        """The path as people want to read it."""
        return shown(self.file)

    @property
    def code(self) -> str | None:
        """Its text; None where the source is not at hand."""
        return linecache.getline(self.file, self.number).strip() or None

    @property
    def in_library(self) -> bool:
        """Whether it is one of an installed package."""
        return is_installed(self.file)


def is_foreign(file: str) -> bool:
    """Whether code of that file is torch's, ours or made at run time: none of the user's."""
    return file.startswith(_FOREIGN)


def _kind_of(file: str) -> int:
    if len(_kinds) >= _MAX_KINDS:
        _kinds.clear()
    ours = file.startswith(_OWN) and not file.startswith(_WRAPPERS)
    unnamed = _UNNAMED if file.startswith("<") else _USERS
    found = _kinds[file] = _OURS if ours else _SKIPPED if file.startswith((_OWN, _TORCH)) else unnamed
    return found


def innermost_user_line(*, past_own: bool = False, past_libraries: bool = False) -> Line | None:
    """The innermost frame that is neither torch's nor ours, from the caller outwards.

    Goes no further than to where autograd's engine or a replay of ours was started: the line that did that is not the
    line of any op.

    Args:
        past_own: nothing was started by us; frames of ours are wrappers around torch's functions.
        past_libraries: installed packages do not count.
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


def calls_in_progress(module: nn.Module, among: int | None = None) -> int:
    """How many calls of a module this thread is in.

    Args:
        among: so many innermost frames; null for all.
    """
    frame: FrameType | None = sys._getframe(1)
    calls = looked_at = 0
    while frame is not None and looked_at != among:
        calls += frame.f_code.co_name == "_wrapped_call_impl" and frame.f_locals.get("self") is module
        frame, looked_at = frame.f_back, looked_at + 1
    return calls
