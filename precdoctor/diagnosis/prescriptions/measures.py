"""What a change is judged by: numbers that are read off any run in the same way, before a change and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from precdoctor.diagnosis.families.nonfinite.bad_steps import incident_steps
from precdoctor.diagnosis.families.nonfinite.incident import Incident
from precdoctor.diagnosis.families.nonfinite.incident_search import incidents
from precdoctor.diagnosis.offline.replay.gradients import run_gradients
from precdoctor.diagnosis.offline.replay.loss_scale import recorded_flushed
from precdoctor.diagnosis.offline.replay.updates import updates_of
from precdoctor.diagnosis.survey.frames import histograms
from precdoctor.diagnosis.survey.gradient_underflow import GradientSeries, survey
from precdoctor.diagnosis.survey.parameters import adam_groups
from precdoctor.diagnosis.survey.rows import Key, known_format, number
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError
from precdoctor.numerics.formats import FP32
from precdoctor.numerics.histogram import ExponentHistogram

#: Sampled steps a gradient is looked at on, as the rules of PD2xx do by default.
MAX_STEPS = 64.0
#: As the default of PD201: from this flushed share on a gradient of zeros is taken for a flushed one.
DYING_SHARE = 0.04
#: Updates further below the weight than FP32's significand are lost in any format training uses.
FP32_BINADES = -(FP32.mantissa_bits + 1)


@dataclass(frozen=True)
class Scope:
    """What a measure is taken on; all empty: the whole run."""

    root: str = ""
    module: str = ""
    kind: str = ""
    name: str = ""
    call: int = 0

    @property
    def key(self) -> Key:
        """Of the tensor."""
        return (self.root, self.module, self.kind, self.name, self.call)


@dataclass(frozen=True)
class Measure:
    """A number of a run.

    Attributes:
        name: as in prescription files.
        unit: ``share`` (0 to 1), ``steps``, ``binades`` or ``ratio``.
        doc: what it is, one clause.
        take: reads it off a run; None where the run does not have it.
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
    """With a module: those whose first non-finite value was led back to it; another one may fail after it is mended."""
    if not scope.module:
        return float(max((len(steps) for steps in incident_steps(view).values()), default=0))
    return float(sum(i.bad_steps for i in incidents(view) if _origin(i) == (scope.root, scope.module)))


def _origin(incident: Incident) -> tuple[str, str | None]:
    if incident.culprit is not None:
        return incident.culprit.replay.root, incident.culprit.module
    return (incident.origin.root, incident.origin.module) if incident.origin is not None else ("", None)


def series(view: RunView, scope: Scope) -> GradientSeries | None:
    """The flushed shares of one gradient over the examined steps, as the rules of PD2xx see them."""
    found = survey(view, max_steps=MAX_STEPS, dying_share=DYING_SHARE, kind=scope.kind)
    return found.tensors.get(scope.key)


def _flushed_share(view: RunView, scope: Scope) -> float | None:
    if scope.kind:
        found = series(view, scope)
        if found is not None:
            return found.share
        return 0.0 if _is_wide(view, scope) else None
    process = next((p for p, steps in view.timeline.items() if any(s.loss_scale is not None for s in steps)), None)
    if process is None:
        return None
    share = recorded_flushed(run_gradients(view, process))
    return share.estimate if share is not None else None


def _is_wide(view: RunView, scope: Scope) -> bool:
    """The gradient is there, in FP32, which flushes nothing that FP16 or BF16 holds."""
    terms = [("root", "==", scope.root), ("module", "==", scope.module), ("dtype", "==", "float32")]
    return len(view.measured((), (scope.kind,), where=terms)) > 0


def _headroom(view: RunView, scope: Scope) -> float | None:
    terms = [*_where(scope), ("call", "==", scope.call), ("amax", ">", 0.0)]
    rows = view.measured((), (scope.kind,), columns=("amax", "dtype"), where=terms)
    largest = rows.groupby("dtype", observed=True)["amax"].max()
    return min((f.headroom(a) for d, a in largest.items() if (f := known_format(str(d))) is not None), default=None)


def _where(scope: Scope) -> list[tuple[str, str, Any]]:
    return [("root", "==", scope.root), ("module", "==", scope.module), ("name", "==", scope.name)]


def eps_of(view: RunView) -> float | None:
    """The smallest eps of an Adam or AdamW group that is above 0."""
    return min((e for g in adam_groups(view) if (e := number(g.get("eps"))) is not None and e > 0.0), default=None)


def given_gradients(view: RunView, scope: Scope) -> pd.DataFrame:
    """Per sampled step exponents and mean square of a gradient as the optimizer was given it, without a loss scale."""
    columns = ("exp_lo", "exp_hist", "numel", "sum_sq", "nan")
    rows = view.measured(("multiplier",), (scope.kind,), columns=columns, where=_where(scope))
    rows = rows[rows["sum_sq"].notna() & (rows["nan"] == 0) & (rows["multiplier"] == 1.0)]
    held: pd.DataFrame = rows[histograms(rows).total > 0]
    return held


def below_eps(gradients: pd.DataFrame, eps: float) -> float | None:
    """Share of the non-zero elements below ``eps``, median over steps."""
    held = histograms(gradients)
    low, _ = held.at_most(np.full(len(gradients), eps))
    return float(np.median(low / held.total)) if len(gradients) else None


def step_size(gradients: pd.DataFrame, eps: float) -> float | None:
    """``g / (g + eps)`` at the RMS g of the gradient, median over steps: what eps leaves of a step of Adam."""
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
    """The intended updates of all weights together, trivial ones left out."""

    relative: ExponentHistogram
    intended: float
    lost: float


def updates(view: RunView) -> Updates:
    """Counted over all ``update`` rows; what is :data:`FP32_BINADES` below its weight is trivial."""
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
    """A measure by its name.

    Raises:
        UsageError: there is none.
    """
    if isinstance(name, str) and name in MEASURES:
        return MEASURES[name]
    raise UsageError(f"{origin}: no measure {name!r}; known: {', '.join(MEASURES)}")


def steps_in(view: RunView) -> int:
    """Complete steps of the longest process, which counts of steps are held against."""
    return max((sum(s.complete for s in steps) for steps in view.timeline.values()), default=0)
