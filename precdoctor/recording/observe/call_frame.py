"""A module call in progress, and how it is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

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
