"""The measures that evaluate a change: numbers computed the same way from the run before and the run after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.gradient_underflow import GradientSeries, survey
from precdoctor.diagnosis.analyses.parameters import is_adam, parameter_groups
from precdoctor.diagnosis.families.nonfinite.bad_steps import incident_steps
from precdoctor.diagnosis.families.nonfinite.incident import Incident
from precdoctor.diagnosis.families.nonfinite.incident_search import incidents
from precdoctor.diagnosis.offline.replay.gradients import run_gradients
from precdoctor.diagnosis.offline.replay.loss_scale import recorded_flushed
from precdoctor.diagnosis.offline.replay.updates import updates_of
from precdoctor.diagnosis.survey.frames import histograms
from precdoctor.diagnosis.survey.rows import Key, known_format, number
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError
from precdoctor.numerics.formats import FP32
from precdoctor.numerics.histogram import ExponentHistogram

#: Most examined steps of a gradient: the default of the PD2xx rules.
MAX_STEPS = 64.0
#: Flushed share from which a following gradient of zeros counts as flushed: the default of PD201.
DYING_SHARE = 0.04
#: Exponent of an update relative to its weight below which it is lost even in FP32.
FP32_BINADES = -(FP32.mantissa_bits + 1)


@dataclass(frozen=True)
class Scope:
    """The tensor or module that a measure is about; the whole run if all fields are empty."""

    root: str = ""
    module: str = ""
    kind: str = ""
    name: str = ""
    call: int = 0

    @property
    def key(self) -> Key:
        return (self.root, self.module, self.kind, self.name, self.call)

    @property
    def place_terms(self) -> list[tuple[str, str, Any]]:
        return [("root", "==", self.root), ("module", "==", self.module), ("name", "==", self.name)]


@dataclass(frozen=True)
class Measure:
    """A number that can be computed from any run.

    Attributes:
        name: its name in prescription files.
        unit: ``share`` (0 to 1), ``steps``, ``binades`` or ``ratio``.
        doc: meaning, one clause.
        take: computes the number; None if the run lacks the data.
    """

    name: str
    unit: str
    doc: str
    take: Callable[[RunView, Scope], float | None]


def _skipped_steps(view: RunView, _scope: Scope) -> float | None:
    counts = [sum(u.overflow for u in updates_of(view, p)) for p in view.processes]
    return float(max(counts)) if counts else None


def _scaled_steps(view: RunView, _scope: Scope) -> float | None:
    counts = [sum(s.loss_scale is not None for s in steps) for steps in view.timeline.values()]
    return float(max(counts)) if counts else None


def _nonfinite_steps(view: RunView, scope: Scope) -> float | None:
    """Count the non-finite steps; with a module in the scope, only those whose origin it is.

    Others are left out because a different module may fail once this one is cured.
    """
    if not scope.module:
        return float(max((len(steps) for steps in incident_steps(view).values()), default=0))
    return float(sum(i.bad_steps for i in incidents(view) if _origin(i) == (scope.root, scope.module)))


def _origin(incident: Incident) -> tuple[str, str | None]:
    if incident.culprit is not None:
        return incident.culprit.replay.root, incident.culprit.op.module
    return (incident.origin.root, incident.origin.module) if incident.origin is not None else ("", None)


def series(view: RunView, scope: Scope) -> GradientSeries | None:
    """Return the flushed shares of the scope's gradient, computed as in the PD2xx rules; None without rows."""
    found = survey(view, max_steps=MAX_STEPS, dying_share=DYING_SHARE, kind=scope.kind)
    return found.tensors.get(scope.key)


def _flushed_share(view: RunView, scope: Scope) -> float | None:
    if scope.kind:
        if (found := series(view, scope)) is not None:
            return found.share
        return 0.0 if _is_wide(view, scope) else None
    process = next((p for p, steps in view.timeline.items() if any(s.loss_scale is not None for s in steps)), None)
    if process is None:
        return None
    share = recorded_flushed(run_gradients(view, process))
    return share.estimate if share is not None else None


def _is_wide(view: RunView, scope: Scope) -> bool:
    """Return whether the gradient was recorded in FP32, which flushes nothing that FP16 or BF16 can hold."""
    terms = [("root", "==", scope.root), ("module", "==", scope.module), ("dtype", "==", "float32")]
    return len(view.measured((), (scope.kind,), where=terms)) > 0


def _headroom(view: RunView, scope: Scope) -> float | None:
    terms = [*scope.place_terms, ("call", "==", scope.call), ("amax", ">", 0.0)]
    rows = view.measured((), (scope.kind,), columns=("amax", "dtype"), where=terms)
    largest = rows.groupby("dtype", observed=True)["amax"].max()
    return min((f.headroom(a) for d, a in largest.items() if (f := known_format(str(d))) is not None), default=None)


def eps_of(view: RunView) -> float | None:
    """Return the smallest positive eps of all Adam and AdamW parameter groups; None without one."""
    return min(
        (e for g in parameter_groups(view, is_adam) if (e := number(g.get("eps"))) is not None and e > 0.0),
        default=None,
    )


def given_gradients(view: RunView, scope: Scope) -> pd.DataFrame:
    """Return the rows of the scope's gradient as passed to the optimizer, if they carry no loss scale.

    One row per sampled step, with ``exp_lo``, ``exp_hist``, ``numel`` and ``sum_sq``.
    """
    columns = ("exp_lo", "exp_hist", "numel", "sum_sq", "nan")
    rows = view.measured(("multiplier",), (scope.kind,), columns=columns, where=scope.place_terms)
    rows = rows[rows["sum_sq"].notna() & (rows["nan"] == 0) & (rows["multiplier"] == 1.0)]
    return rows[histograms(rows).total > 0]


def below_eps(gradients: pd.DataFrame, eps: float) -> float | None:
    """Return the share of the non-zero elements below ``eps``, median over steps; None without rows."""
    held = histograms(gradients)
    low, _ = held.at_most(np.full(len(gradients), eps))
    return float(np.median(low / held.total)) if len(gradients) else None


def step_size(gradients: pd.DataFrame, eps: float) -> float | None:
    """Return ``g / (g + eps)`` for the RMS g of the gradient, median over steps: the share of Adam's step that eps
    leaves. None without rows.
    """
    rms = np.sqrt((gradients["sum_sq"] / gradients["numel"]).to_numpy())
    rms = rms[rms > 0.0]
    return float(np.median(rms / (rms + eps))) if rms.size else None


def _below_eps_share(view: RunView, scope: Scope) -> float | None:
    eps = eps_of(view)
    return None if eps is None else below_eps(given_gradients(view, scope), eps)


def _step_size_factor(view: RunView, scope: Scope) -> float | None:
    eps = eps_of(view)
    return None if eps is None else step_size(given_gradients(view, scope), eps)


@dataclass(frozen=True)
class Updates:
    """The intended updates of all weights together, without those that are lost even in FP32.

    Attributes:
        relative: histogram of the update's binade relative to its weight.
        intended: number of elements.
        lost: number of elements whose weight kept its bits.
    """

    relative: ExponentHistogram
    intended: float
    lost: float


def updates(view: RunView) -> Updates:
    """Count the updates over all ``update`` rows; elements below :data:`FP32_BINADES` are left out."""
    rows = view.measured(("intended",), ("update",), columns=("unchanged", "rel_lo", "rel_hist"))
    rows = rows[rows["unchanged"].notna()]
    relative = histograms(rows, "rel")
    trivial = relative.below(FP32_BINADES)
    kept = relative.merged(np.zeros(len(rows), np.int64), 1).row(0)[FP32_BINADES:]
    intended, lost = (float(np.maximum(rows[c].to_numpy() - trivial, 0.0).sum()) for c in ("intended", "unchanged"))
    return Updates(kept, intended, lost)


def _lost_updates(view: RunView, _scope: Scope) -> float | None:
    found = updates(view)
    return found.lost / found.intended if found.intended else None


MEASURES: Mapping[str, Measure] = {
    m.name: m
    for m in (
        Measure("skipped_steps", "steps", "steps the loss scaler skipped", _skipped_steps),
        Measure("scaled_steps", "steps", "steps run with a loss scale", _scaled_steps),
        Measure("nonfinite_steps", "steps", "steps gone wrong: not finite, and nothing handled it", _nonfinite_steps),
        Measure("flushed_share", "share", "gradient elements flushed to zero", _flushed_share),
        Measure("headroom_binades", "binades", "least distance of amax from the format's maximum", _headroom),
        Measure("below_eps_share", "share", "non-zero gradient elements below Adam's eps", _below_eps_share),
        Measure("step_size_factor", "ratio", "what eps leaves of an Adam step", _step_size_factor),
        Measure("lost_update_share", "share", "intended weight updates that changed nothing", _lost_updates),
    )
}


def measure_named(name: Any, origin: str) -> Measure:
    """Return the measure of this name; ``origin`` is the file, for the error message.

    Raises:
        UsageError: there is none.
    """
    if isinstance(name, str) and name in MEASURES:
        return MEASURES[name]
    raise UsageError(f"{origin}: no measure {name!r}; known: {', '.join(MEASURES)}")


def steps_in(view: RunView) -> int:
    """Return the number of complete steps of the longest process, to compare counts of runs of different lengths."""
    return max((sum(s.complete for s in steps) for steps in view.timeline.values()), default=0)
