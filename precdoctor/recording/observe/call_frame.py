"""A module call in progress, how it is recorded, and who called it as far as the frames above tell."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import Place

if TYPE_CHECKING:
    from precdoctor.recording.fp8.cast_scope import Call
    from precdoctor.recording.scene.step_snapshot import RootCall


class CallMode:
    """What a root call decides for all calls below it."""

    __slots__ = ("delegated", "evaluating", "name", "phase")

    def __init__(self, phase: str, *, evaluating: bool, delegated: bool = False) -> None:
        self.phase = phase
        self.evaluating = evaluating
        #: Gradients are off, and computed all the same: by the custom autograd function this runs in.
        self.delegated = delegated
        #: Calls are numbered apart by it, so that a look at the validation set does not shift the training calls.
        self.name = "eval" if evaluating else phase


class Frame:
    """One module call in progress."""

    __slots__ = (
        "call",
        "call_made",
        "first_node",
        "kept",
        "mode",
        "module",
        "outermost",
        "place",
        "recorded",
        "reopens",
    )

    def __init__(self, module: nn.Module, place: Place | None, mode: CallMode) -> None:
        self.module = module
        self.place = place
        self.mode = mode
        self.call = 0
        self.recorded = False
        #: Number of the first autograd node that the call could make.
        self.first_node = 0
        #: Top-level calls in training: what a replay of them needs.
        self.kept: RootCall | None = None
        #: It was called in the midst of loss code (a teacher, without gradients), which goes on after it.
        self.reopens = False
        #: Nothing but wrappers (DistributedDataParallel and the like) around it.
        self.outermost = False
        #: Once casts to float8 have been met: the call as those see it.
        self.call_made: Call | None = None


#: What stands for a module that has a name.
_STAND_INS = (torch.fx.GraphModule, torch.jit.ScriptModule)
#: What ``nn.DataParallel`` sets on a module that it has made for one batch.
_REPLICA = "_is_replica"
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


def inner_mode(above: CallMode) -> CallMode:
    """The mode of a call inside another one: without gradients (a frozen encoder, a teacher) it is marked as such."""
    if above.phase != "train" or above.delegated or torch.is_grad_enabled():
        return above
    delegated = inside_function()
    return CallMode("train" if delegated else "no_grad", evaluating=above.evaluating, delegated=delegated)


def has_no_identity(module: nn.Module) -> bool:
    """Compiled graphs, scripted modules and DataParallel replicas stand for a module that has one."""
    # Asked for every call: a module's getattr runs Python code, and isinstance may ask its __class__.
    return issubclass(type(module), _STAND_INS) or _REPLICA in static.module_dict(module)


def is_replica(module: nn.Module) -> bool:
    """Whether ``nn.DataParallel`` has made it for one batch."""
    return _REPLICA in static.module_dict(module)
