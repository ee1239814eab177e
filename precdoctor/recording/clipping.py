"""The patches around torch's functions that clip gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.guarded import guarded
from precdoctor.recording.recorder import Recorder

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_")


def install(
    recorder: Recorder,
    note: Callable[[Any, list[Tensor]], None],
    covered: Callable[[list[Tensor]], bool],
    stays: Callable[[list[Tensor]], None],
) -> None:
    """Call ``note`` with limit and parameters before each clipping; ``stays`` after it, if they were ``covered``."""
    calls = (guarded(recorder)(note), guarded(recorder)(covered), guarded(recorder)(stays))
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
        limit = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        if limit is not None:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            note(limit, parameters)
        known = covered(parameters)
        result = original(parameters, *args, **kwargs)
        if known:
            stays(parameters)
        return result

    return clip


def on_device(value: object) -> bool:
    """Whether reading this setting would wait for a device."""
    return isinstance(value, Tensor) and not value.is_cpu
