"""Loss scalers, changed as the script makes them: initial scale, growth interval, a floor, or switched off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from precdoctor.recording.applying.ledger import Ledger
from precdoctor.runlog.changes import Change

#: Attribute of ``torch.amp.GradScaler`` per setting, feature-tested when a scaler is made.
_ATTRIBUTES = {
    "scaler.init_scale": "_init_scale",
    "scaler.growth_interval": "_growth_interval",
    "scaler.enabled": "_enabled",
}


def install(changes: Sequence[Change], ledger: Ledger) -> None:
    """Patch ``torch.amp.GradScaler``, which every scaler of torch derives from."""
    kind: Any = torch.amp.GradScaler
    for change in changes:
        if change.setting == "scaler.min_scale":
            kind.update = _with_floor(kind.update, change, ledger)
            continue
        kind.__init__ = _constructed(kind.__init__, change, ledger)
        if change.setting == "scaler.growth_interval":  # a checkpoint brings the old one back
            kind.load_state_dict = _constructed(kind.load_state_dict, change, ledger)


def _constructed(original: Callable[..., Any], change: Change, ledger: Ledger) -> Callable[..., Any]:
    attribute = _ATTRIBUTES[change.setting]

    @functools.wraps(original)
    def then_change(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if not scaler.is_enabled():
            return result
        was = getattr(scaler, attribute, None)
        if was is None:
            ledger.refused(change, f"this torch's GradScaler has no {attribute}")
        else:
            setattr(scaler, attribute, type(was)(change.to))
            ledger.done(change, type(scaler).__name__, was)
        return result

    return then_change


def _with_floor(original: Callable[..., Any], change: Change, ledger: Ledger) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if scaler.is_enabled() and scaler._scale is not None:
            scaler._scale.clamp_(min=float(change.to))  # on the device: nobody waits for it
            ledger.done(change, type(scaler).__name__, 0.0)
        return result

    return update
