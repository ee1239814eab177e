"""CUDA graphs under capture: whatever is launched then is launched again at every replay, and nothing can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precdoctor.recording.process import attach
from precdoctor.recording.slots.step_batch import _cuda, is_capturing

if TYPE_CHECKING:
    from precdoctor.recording.recorder import Recorder

_SENTENCE = (
    "a training step is captured in a CUDA graph: its replays are not recorded as steps; their statistics are added "
    "up in the next step outside of the graph"
)


class Capture:
    """Asked before anything but statistics: while a graph is captured, nothing else of ours may be launched."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told = False

    @property
    def runs(self) -> bool:
        """Whether a backward pass or an optimizer step is being captured; the log and the user learn that once."""
        if not _cuda.get("_initialized", True) or not is_capturing():  # the first is the same, without a call
            return False
        if not self._told:
            self._told = True
            self._recorder.event("warning", data={"message": _SENTENCE})
            attach.say(_SENTENCE)
        return True
