"""Notes of the user's line at autograd's nodes, in the place where anomaly mode keeps torch's tracebacks."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

from precdoctor.recording.ops.source_lines import Line, innermost_user_line, is_foreign
from precdoctor.recording.process import attach

#: Key of the traceback in a node's metadata.
_KEY = "traceback_"
_MARK = "precdoctor\0"
#: Begins the note at a node whose saved tensors must not be read, because saved-tensor hooks were active.
HOOKED = f"{_MARK}hooked"
#: Maximum number of places whose note is cached.
_MAX_CACHED = 1 << 12


class LineNotes:
    """Makes notes, and caches them by the instruction that makes the node: a loop makes the same ones at every step."""

    def __init__(self) -> None:
        #: By code object (its ``id``) and instruction of the innermost frame; if that is torch's, of the one before as
        #: well. Beside each note its code objects, which so stay alive: an ``id`` is valid only while they do.
        self.cached: dict[tuple[int, ...], tuple[list[str], tuple[CodeType, ...]]] = {}

    def note_for(self, frame: FrameType | None, *, hooked: bool) -> list[str]:
        """Return the note at a node that a frame makes, as the list of lines that autograd expects.

        Args:
            frame: the innermost frame, None in autograd's threads for devices.
            hooked: whether saved-tensor hooks are active.
        """
        line = innermost_user_line()
        note = [f"{HOOKED if hooked else _MARK}\0{line[1]}\0{line[0]}" if line is not None else f"{_MARK}\0{0}\0"]
        if line is not None and frame is not None and not hooked and len(self.cached) < _MAX_CACHED:
            back = frame.f_back
            if _is_at(frame, line):
                self.cached[id(frame.f_code), frame.f_lasti] = note, (frame.f_code,)
            elif back is not None and _is_at(back, line) and is_foreign(frame.f_code.co_filename):
                place = (id(frame.f_code), frame.f_lasti, id(back.f_code), back.f_lasti)
                self.cached[place] = note, (frame.f_code, back.f_code)
        return note


def _is_at(frame: FrameType, line: Line) -> bool:
    return (frame.f_code.co_filename, frame.f_lineno) == line


def note_on(node: Any) -> str | None:
    """Return our note at a node; None if the node has none."""
    try:
        trace: list[str] | None = node.metadata.get(_KEY)
    except (AttributeError, RuntimeError) as error:
        attach.let_through(error)
        return None
    return trace[0] if trace and trace[0].startswith(_MARK) else None


def line_of(note: str) -> Line | None:
    """Return the line that a note names; None if the code is nobody's."""
    _, _, number, file = note.split("\0", 3)
    return Line(file, int(number)) if file else None
