"""What a change is judged by: numbers that are read off any run in the same way, before a change and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from precdoctor.diagnosis.families.nonfinite.bad_steps import incident_steps
from precdoctor.diagnosis.families.nonfinite.incident import Incident
from precdoctor.diagnosis.families.nonfinite.incident_search import incidents
from precdoctor.diagnosis.offline.replay.gradients import run_gradients
from precdoctor.diagnosis.offline.replay.loss_scale import recorded_flushed
from precdoctor.diagnosis.offline.replay.updates import updates_of
from precdoctor.diagnosis.survey.gradient_underflow import GradientSeries, survey
from precdoctor.diagnosis.survey.parameters import adam_groups
from precdoctor.diagnosis.survey.rows import Key, integer, known_format, number
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
    return any(len(f) for f in view.scan(["numel"], (scope.kind,), where=terms))


def _headroom(view: RunView, scope: Scope) -> float | None:
    least = math.inf
    terms = [("root", "==", scope.root), ("module", "==", scope.module), ("name", "==", scope.name)]
    for r in view.scan_records(["amax", "dtype", "call"], (scope.kind,), where=terms):
        fmt, amax = known_format(str(r["dtype"])), number(r["amax"])
        if fmt is not None and amax and integer(r["call"]) == scope.call:
            least = min(least, fmt.headroom(amax))
    return least if least < math.inf else None


def eps_of(view: RunView) -> float | None:
    """The smallest eps of an Adam or AdamW group that is above 0."""
    return min((e for g in adam_groups(view) if (e := number(g.get("eps"))) is not None and e > 0.0), default=None)


def given_gradients(view: RunView, scope: Scope) -> list[tuple[ExponentHistogram, float]]:
    """Per sampled step exponents and RMS of a gradient as the optimizer was given it, the loss scale taken out."""
    terms = [("root", "==", scope.root), ("module", "==", scope.module), ("name", "==", scope.name)]
    found = []
    for r in view.scan_records(["exp_lo", "exp_hist", "numel", "sum_sq", "scale", "nan"], (scope.kind,), where=terms):
        histogram, squares = ExponentHistogram.of(integer(r["exp_lo"]), r["exp_hist"]), number(r["sum_sq"])
        scale = number(r["scale"]) or 1.0
        if histogram.total and squares is not None and not r["nan"] and scale == 1.0:
            found.append((histogram, math.sqrt(squares / int(r["numel"]))))
    return found


def below_eps(gradients: list[tuple[ExponentHistogram, float]], eps: float) -> float | None:
    """Share of the non-zero elements below ``eps``, median over steps."""
    shares = [h.at_most(eps).low / h.total for h, _ in gradients]
    return median(shares) if shares else None


def step_size(gradients: list[tuple[ExponentHistogram, float]], eps: float) -> float | None:
    """``g / (g + eps)`` at the RMS g of the gradient, median over steps: what eps leaves of a step of Adam."""
    factors = [rms / (rms + eps) for _, rms in gradients if rms > 0.0]
    return median(factors) if factors else None


def _below_eps_share(view: RunView, scope: Scope) -> float | None:
    eps = eps_of(view)
    return None if eps is None else below_eps(given_gradients(view, scope), eps)


def _step_size_factor(view: RunView, scope: Scope) -> float | None:
    eps = eps_of(view)
    return None if eps is None else step_size(given_gradients(view, scope), eps)


@dataclass
class Updates:
    """The intended updates of all weights together, trivial ones left out."""

    relative: ExponentHistogram
    intended: float = 0.0
    lost: float = 0.0


def updates(view: RunView) -> Updates:
    """Counted over all ``update`` rows; what is :data:`FP32_BINADES` below its weight is trivial."""
    found = Updates(ExponentHistogram.of(None, None))
    for r in view.scan_records(["unchanged", "zero", "numel", "rel_lo", "rel_hist"], ("update",)):
        unchanged = integer(r["unchanged"])
        if unchanged is None:
            continue
        relative = ExponentHistogram.of(integer(r["rel_lo"]), r["rel_hist"])
        kept = relative[FP32_BINADES:]
        trivial = relative.total - kept.total
        found.relative = found.relative.merge(kept)
        found.intended += max(0.0, int(r["numel"]) - int(r["zero"]) + unchanged - trivial)
        found.lost += max(0.0, unchanged - trivial)
    return found


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
