"""Who called a module, as far as the frames above it tell."""

from __future__ import annotations

import os
import sys
from types import FrameType

#: ``Function.apply`` of custom autograd functions, reentrant checkpointing among them.
_FUNCTION_FILE = f"{os.sep}torch{os.sep}autograd{os.sep}function.py"
_MAX_FRAMES = 40
#: The module of pipeline stages; where it is not loaded there are none, and nobody need ask.
STAGES = "torch.distributed.pipelining.stage"
#: Where a pipeline stage finds out shapes, under the names that torch has had for it.
_STAGE_FILE = f"{os.sep}torch{os.sep}distributed{os.sep}pipelining{os.sep}stage.py"
_SHAPE_RUNS = ("_forward_metadata_inference", "_shape_inference")


def inside_function() -> bool:
    """Whether gradients are off only because a custom autograd function will compute them itself.

    Reentrant checkpointing is one. Looks no further up than to the module call this one stands in.
    """
    frame, calls = sys._getframe(1), 0
    for _ in range(_MAX_FRAMES):
        code = frame.f_code
        calls += code.co_name == "_call_impl"
        if code.co_name == "apply" and code.co_filename.endswith(_FUNCTION_FILE):
            return True
        if calls == 2 or frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def asks_for_shapes() -> bool:
    """Whether a pipeline stage is run on memory that nobody has written to, for the shapes of its outputs alone."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name in _SHAPE_RUNS and code.co_filename.endswith(_STAGE_FILE):
            return True
        frame = frame.f_back
    return False
