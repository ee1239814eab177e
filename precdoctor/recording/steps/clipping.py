"""Patches torch's functions that clip gradients."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import static
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.step_context import StepContext

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")
#: Iterators, which can be read once only: the clipping function gets a list instead.
_ITERATORS = (types.GeneratorType, map, filter, itertools.chain)


def install(
    context: StepContext,
    note: Callable[[Any, list[Tensor]], None],
    covered: Callable[[list[Tensor]], bool],
    stays: Callable[[list[Tensor]], None],
) -> None:
    """Call ``note`` with limit and parameters before each clip; after it ``stays``, if ``covered`` returned True."""
    calls = (guarded(context)(note), guarded(context)(covered), guarded(context)(stays))
    for name in _FUNCTIONS:
        wrapped = _noting(getattr(torch.nn.utils, name), *calls)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(module, name, wrapped)


def _noting(
    original: Callable[..., Any],
    note: Callable[..., Any],
    covered: Callable[..., bool | None],
    stays: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        if limit is not None:
            parameters = list(parameters) if issubclass(type(parameters), _ITERATORS) else parameters
            note(limit, static.tensors(parameters))
        known = covered(static.tensors(parameters))
        result = original(parameters, *args, **kwargs)
        if known:
            stays(static.tensors(parameters))
        return result

    return clip


def number(limit: Any) -> float | None:
    """Return a limit as a number; None if reading it would wait for a device or run user code."""
    if issubclass(type(limit), Tensor):
        return float(limit) if limit.is_cpu and limit.numel() == 1 else None
    return static.number(limit)
