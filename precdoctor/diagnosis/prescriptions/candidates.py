"""Translates a rule's prescription to changes of :mod:`precdoctor.runlog.changes`, or to why that is not possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.analyses.loss_scales import enabled_scalers
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription
from precdoctor.diagnosis.prescriptions.effects import exact_reach
from precdoctor.diagnosis.survey.rows import integer, number, text
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError
from precdoctor.numerics.formats import BF16, FP16, FP32
from precdoctor.runlog.changes import Change, Value

_EDIT = "it takes an edit of the script"
_NO_SCALER = "the script makes no GradScaler, and putting one in takes an edit"
_NO_AUTOCAST = "the script enters no FP16 autocast, and its formats are set in the script"


@dataclass(frozen=True)
class Candidate:
    """One way to carry out a prescription.

    Attributes:
        title: what to do.
        changes: the changes to make together; empty if the script must be edited.
        why_not: the reason why it must, as a clause; empty if there are changes.
    """

    title: str
    changes: tuple[Change, ...]
    why_not: str = ""


def candidates(view: RunView, finding: Finding, prescription: Prescription) -> Iterator[Candidate]:
    """Yield the rule's own prescription first, then alternatives that need no edit of the script."""
    changes, why_not = _translation(view, finding, prescription.change)
    yield Candidate(prescription.title, changes, why_not)
    for other in _alternatives(view, finding, has_changes=bool(changes)):
        if other.changes != changes:
            yield other


_Translation = tuple[tuple[Change, ...], str]


def _translation(view: RunView, finding: Finding, change: Mapping[str, Any]) -> _Translation:
    """Return the changes of a rule's prescription, or no changes and the reason."""
    for key, translate in _BY_KEY.items():
        if key in change:
            try:
                found = translate if isinstance(translate, str) else translate(view, finding, change)
                return (found, "") if isinstance(found, tuple) else ((), found)
            except UsageError:  # the setting cannot take the value: a damaged log, or another meaning
                return (), _EDIT
    return (), _EDIT


def _ends(value: Any) -> tuple[Value | None, Value | None]:
    """Return the values before and after of ``{"from": ..., "to": ...}``, or None and a bare new value."""
    return (value.get("from"), value.get("to")) if isinstance(value, Mapping) else (None, value)


def _change(setting: str, before: Value | None, to: Value | None, root: str = "", module: str = "") -> Change:
    """Build a change with the checks of one read from a file; UsageError if the setting cannot take the value."""
    place = {"root": root, "module": module} if module or root else {}
    return Change.of({"setting": setting, **place, "from": before, "to": to}, "prescription")


def _module_format(view: RunView, finding: Finding, change: Mapping[str, Any]) -> tuple[Change, ...] | str:
    place, (before, to) = finding.location, _ends(change["dtype"])
    module = text(change.get("module"))
    if not module and to == BF16.dtype:
        return _autocast(view, finding, {"autocast_dtype": change["dtype"]})
    if "module" not in change or not (module or place.root):
        return _EDIT
    if place.kind == "input" and finding.code.startswith("PD6"):
        return "the tensor is made outside any module; its format is set in the script"
    return (_change("module.dtype", before, to, place.root or "", module),)


def _autocast(view: RunView, _finding: Finding, change: Mapping[str, Any]) -> tuple[Change, ...] | str:
    if not autocasts_to_fp16(view):
        return _NO_AUTOCAST
    return (_change("autocast.dtype", *_ends(change["autocast_dtype"])),)


def _scaler(view: RunView, _finding: Finding, change: Mapping[str, Any]) -> tuple[Change, ...] | str:
    made = scaler_facts(view)
    if made is None:
        return _NO_SCALER
    init = change.get("init_scale", change.get("loss_scale"))
    found = []
    if (scale := number(_ends(init)[1])) is not None:
        found.append(_change("scaler.init_scale", number(made.get("init_scale")), scale))
    if (interval := number(_ends(change.get("growth_interval"))[1])) is not None:
        found.append(_change("scaler.growth_interval", integer(made.get("growth_interval")), int(interval)))
    return tuple(found) or _EDIT


def _scaler_off(view: RunView, _finding: Finding, _wanted: Mapping[str, Any]) -> tuple[Change, ...] | str:
    return (_change("scaler.enabled", True, False),) if scaler_facts(view) is not None else _NO_SCALER


def _eps(_view: RunView, finding: Finding, change: Mapping[str, Any]) -> tuple[Change, ...] | str:
    if finding.location.phase is not Phase.OPTIMIZER:
        return _EDIT  # the eps of a division in the user's code
    return (_change("optimizer.eps", *_ends(change["eps"])),)


def _master_weights(_view: RunView, _finding: Finding, change: Mapping[str, Any]) -> tuple[Change, ...] | str:
    return (_change("optimizer.master_weights", *_ends(change["weight_dtype"])),)


#: What makes the changes of a prescription with this key, or why they take an edit.
_BY_KEY: Mapping[str, Callable[[RunView, Finding, Mapping[str, Any]], tuple[Change, ...] | str] | str] = {
    "buffer": "the buffer is made in the script",
    "dtype": _module_format,
    "autocast_dtype": _autocast,
    "loss_scale": _scaler,
    "init_scale": _scaler,
    "growth_interval": _scaler,
    "scaler_enabled": _scaler_off,
    "eps": _eps,
    "weight_dtype": _master_weights,
    "unscale_before_clip": "the order of calls is the script's: unscale the gradients before clipping",
}


def _alternatives(view: RunView, finding: Finding, *, has_changes: bool) -> Iterator[Candidate]:
    """Yield FP32 for a module whose exact results exceed FP16, and BF16 autocast for overflow or underflow of FP16."""
    place = finding.location
    if finding.code == "PD101" and place.root and place.module is not None:
        reach = exact_reach(view, finding)
        if reach is not None and FP16.max < reach <= FP32.max:
            yield Candidate(
                f"run `{place.module or place.root}` in FP32: the exact result reaches {reach:.4g}, "
                f"{FP16.name} ends at {FP16.max:g}",
                (_change("module.dtype", FP16.dtype, FP32.dtype, place.root, place.module),),
            )
    if not has_changes and finding.code in ("PD101", "PD103", "PD201", "PD202", "PD305") and autocasts_to_fp16(view):
        yield Candidate(
            f"use BF16 autocast: it reaches from {BF16.min_normal:.2g} to {BF16.max:.2g}, "
            f"FP16 from {FP16.min_normal:.2g} to {FP16.max:g}",
            (_change("autocast.dtype", FP16.dtype, BF16.dtype),),
        )


def scaler_facts(view: RunView) -> Mapping[str, Any] | None:
    """Return the recorded settings of the first enabled loss scaler; None without one."""
    return next((s for p in view.processes for s in enabled_scalers(view, p)), None)


def autocasts_to_fp16(view: RunView) -> bool:
    """Return whether any step ran under FP16 autocast."""
    return any(s.autocast_dtype == FP16.dtype for steps in view.timeline.values() for s in steps)
