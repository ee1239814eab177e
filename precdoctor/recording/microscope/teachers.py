"""Calling a module again that loss code calls without a gradient: a teacher, a frozen encoder, a target network."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from precdoctor.recording.microscope.pure import UnknownValueError, guarded
from precdoctor.recording.microscope.replay import eager
from precdoctor.recording.microscope.tracer import Tracer
from precdoctor.recording.model import static
from precdoctor.recording.scene.state_restore import Attributes, buffers_aside, without_hooks
from precdoctor.recording.scene.step_snapshot import why_not_replayable


def called_again(
    tracer: Tracer, module: nn.Module, args: list[Any], kwargs: dict[str, Any], *, bound: bool = False
) -> Any:
    """What it returns for copies of its arguments; hooks, buffers and attributes stay as they are.

    Args:
        bound: the arguments are those of ``functional_call``; it may be in training then.
        tracer: told by the frames themselves which lines run.

    Raises:
        UnknownValueError: it is in training, or cannot be run by itself.
    """
    modules = static.modules(module)
    if (any(map(static.is_training, modules)) and not bound) or why_not_replayable(module) is not None:
        raise UnknownValueError("a module in training")
    attributes = Attributes(modules)
    tracer.line = None
    with contextlib.ExitStack() as stack:
        stack.callback(attributes.restore)
        for context in (without_hooks(modules), buffers_aside(modules, {}), eager()):
            stack.enter_context(context)
        return (
            guarded(torch.func.functional_call, module, *args, **kwargs) if bound else guarded(module, *args, **kwargs)
        )
