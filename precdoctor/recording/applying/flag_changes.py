"""Flags of torch, and the format of autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from precdoctor.recording.applying.ledger import Ledger
from precdoctor.recording.process import attach
from precdoctor.recording.recorder.step_context import StepContext
from precdoctor.runlog.changes import Change, Value


def install_flags(changes: Sequence[Change], ledger: Ledger, context: StepContext) -> None:
    """Set them now, and once more when training begins: scripts set such flags on their first lines."""
    first = {change: _tried(change, ledger) for change in changes}

    def again() -> None:
        for change, before in first.items():
            was = _tried(change, ledger)
            if was is not None:
                ledger.done(change, f"torch {torch.__version__}", was if was != change.to else before)

    context.when_armed.insert(0, again)


def _tried(change: Change, ledger: Ledger) -> Value | None:
    try:
        return _set(change)
    except RuntimeError as error:  # torch refuses a mixture of its older and newer spellings
        attach.let_through(error)
        ledger.refused(change, f"torch refuses it: {error}")
        return None


def _set(change: Change) -> Value:
    name = change.setting.removeprefix("flag.")
    if name == "float32_matmul_precision":
        before: Value = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(str(change.to))
        return before
    if name == "cudnn_allow_tf32":
        holder, attribute = torch.backends.cudnn, "allow_tf32"
    else:
        holder, attribute = torch.backends.cuda.matmul, name.removeprefix("matmul_")  # type: ignore[assignment]
    was = getattr(holder, attribute)
    setattr(holder, attribute, change.to)
    return was if isinstance(was, (bool, int, float, str)) else str(was)


def install_autocast(change: Change, ledger: Ledger) -> None:
    """Have every autocast region that would be float16 be bfloat16."""
    kind: Any = torch.amp.autocast_mode.autocast
    kind.__init__ = _in_bfloat16(kind.__init__, change, ledger)


def _in_bfloat16(original: Callable[..., Any], change: Change, ledger: Ledger) -> Callable[..., Any]:
    @functools.wraps(original)
    def then_change(region: Any, *args: Any, **kwargs: Any) -> None:
        original(region, *args, **kwargs)
        if getattr(region, "fast_dtype", None) is torch.float16:
            region.fast_dtype = torch.bfloat16
            ledger.done(change, f"autocast on {region.device}", "float16")

    return then_change
