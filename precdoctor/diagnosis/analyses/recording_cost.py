"""The cost of recording: over the whole run, on its first steps, and on the steps after them."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pandas as pd

    from precdoctor.diagnosis.survey.view import RunView

#: Fewest steps that give a cost per step; fewer do not show what a longer run would pay.
_SETTLED_STEPS: Final = 16


def overhead(view: RunView) -> dict[str, Any]:
    """Return the cost of recording for the ``recorder`` entry of a report.

    - ``overhead_fraction``: host time inside the recorder over wall time; None if not measured. Without the time that
      hooks waited for a device: that is ``waited_fraction``, only there if they did.
    - ``cost``: only there if the budget chose the sampled steps and more than half of the cost was on the first ones.
      ``full_steps``: number of steps at the start that were recorded in full; ``scanned_steps``: number of them that
      were deep-scanned; ``budget``: a fraction; ``step_ns``: mean time of such a step without the recorder;
      ``settled_fraction`` and ``settled_ns``: cost on the later steps and per later step; None if they are too few.
    - ``between``: only there if the median step between samples exceeds the budget: its ``fraction`` and ``step_ns``.
    """
    known = view.steps[["step", "sampled", "recorder_ns", "step_ns"]].dropna()
    total, spent = float(known["step_ns"].sum()), float(known["recorder_ns"].sum())
    if total <= 0.0:
        return {"overhead_fraction": None}
    found: dict[str, Any] = {"overhead_fraction": round(spent / total, 6)}
    if (waited := float(view.steps["wait_ns"].sum())) > 0.0:
        found["waited_fraction"] = round(waited / total, 6)
    options = view.run.info.get("options") or {}
    auto, budget = options.get("every", 1) is None, options.get("budget")
    if auto and budget is not None and (between := _cost_between(known)) is not None and between["fraction"] > budget:
        found["between"] = between
    sampled = known.groupby("step")["sampled"].max()
    full = sum(1 for _ in takewhile(bool, sampled))
    first_steps = sampled.index[:full]
    on_first = known["step"].isin(first_steps)
    if not auto or 2.0 * float(known["recorder_ns"][on_first].sum()) <= spent:
        return found
    later = known[~on_first]
    later_ns, later_spent = float(later["step_ns"].sum()), float(later["recorder_ns"].sum())
    settled = len(sampled) - full >= _SETTLED_STEPS and later_ns > 0.0
    scans = {e["step"] for e in view.events_of("scan") if e["data"].get("outcome") == "done"}
    return found | {
        "cost": {
            "full_steps": full,
            "scanned_steps": len(scans & set(first_steps.tolist())),
            "budget": budget,
            "step_ns": round(float((known["step_ns"] - known["recorder_ns"])[on_first].mean())),
            "settled_fraction": round(later_spent / later_ns, 6) if settled else None,
            "settled_ns": round(later_spent / len(later)) if settled else None,
        }
    }


def _cost_between(known: pd.DataFrame) -> dict[str, Any] | None:
    """Return the recorder's share and the time of the median unsampled step; None if there are too few."""
    unsampled = known[~known["sampled"].astype(bool)]
    if len(unsampled) < _SETTLED_STEPS:
        return None
    step, spent = float(unsampled["step_ns"].median()), float(unsampled["recorder_ns"].median())
    return {"fraction": round(spent / step, 6), "step_ns": round(step)} if step > 0.0 else None
