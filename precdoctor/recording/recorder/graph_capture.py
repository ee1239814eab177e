"""Detects CUDA graph capture: every replay repeats the launches made during it, and no value can be read during it."""

from __future__ import annotations

from collections.abc import Callable

from precdoctor.recording.slots.deferred import CUDA, is_capturing

_SENTENCE = (
    "a training step is captured in a CUDA graph: its replays are not recorded as steps; their statistics are added "
    "up in the next step outside of the graph"
)


class Capture:
    """Reports whether a CUDA graph is being captured: hooks may then launch statistics, and nothing else."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned = False

    @property
    def runs(self) -> bool:
        """Whether a CUDA graph is being captured. Warns the first time: only backward and step hooks read this."""
        if not CUDA.get("_initialized", True) or not is_capturing():  # the flag answers without a call
            return False
        if not self._warned:
            self._warned = True
            self._warn(_SENTENCE)
        return True
