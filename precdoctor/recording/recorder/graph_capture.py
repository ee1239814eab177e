"""CUDA graphs under capture: whatever is launched then is launched again at every replay, and nothing can be read."""

from __future__ import annotations

from collections.abc import Callable

from precdoctor.recording.slots.deferred import CUDA, is_capturing

_SENTENCE = (
    "a training step is captured in a CUDA graph: its replays are not recorded as steps; their statistics are added "
    "up in the next step outside of the graph"
)


class Capture:
    """Asked before anything but statistics: while a graph is captured, nothing else of ours may be launched.

    Args:
        warn: logs and shows a sentence.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned = False

    @property
    def runs(self) -> bool:
        """Whether a backward pass or an optimizer step is being captured; warns of it once."""
        if not CUDA.get("_initialized", True) or not is_capturing():  # the first is the same, without a call
            return False
        if not self._warned:
            self._warned = True
            self._warn(_SENTENCE)
        return True
