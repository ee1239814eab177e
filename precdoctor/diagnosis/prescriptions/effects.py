"""Predicted effects of changes: :mod:`.measures` computed again from the log as if the change had been made.

An effect that cannot be computed is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from precdoctor.diagnosis.advice.larger_loss_scale import share_flushed
from precdoctor.diagnosis.analyses.gradient_underflow import computed_in, examined_steps
from precdoctor.diagnosis.claims.finding import Finding, Prescription
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_at
from precdoctor.diagnosis.offline.replay.gradients import run_gradients
from precdoctor.diagnosis.offline.replay.loss_scale import default_process
from precdoctor.diagnosis.offline.replay.updates import recorded_policy
from precdoctor.diagnosis.prescriptions import measures
from precdoctor.diagnosis.prescriptions.measures import MEASURES, Measure, Scope
from precdoctor.diagnosis.survey.rows import TensorRow
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import BF16, FP32, Format
from precdoctor.numerics.loss_scaling import ScalerPolicy, simulate
from precdoctor.runlog.changes import Change


@dataclass(frozen=True)
class Effect:
    """The predicted effect of a change on one measure.

    Attributes:
        scope: the tensor or module it is about.
        before: its value in the diagnosed run.
        after: the predicted value.
        steps: number of steps of the diagnosed run if the measure counts steps, else None; counts of another run are
            compared in proportion.
    """

    measure: Measure
    scope: Scope
    before: float
    after: float
    steps: int | None = None


def effects(view: RunView, finding: Finding, rule: Prescription, changes: Sequence[Change]) -> list[Effect]:
    """Return the effects of a set of changes that can be computed from the log; empty if none can.

    Args:
        rule: the rule's own prescription, which may predict counts that only the rule computed.
    """
    names = {c.setting for c in changes}
    if any(n.startswith("scaler.") for n in names):
        return [*_of_scaler(view, changes), *_of_gradient(view, finding, changes)]
    makers: Mapping[str, Callable[[], list[Effect]]] = {
        "module.dtype": lambda: _of_module(view, finding, rule, changes[0]),
        "autocast.dtype": lambda: [*_nonfinite(view, finding, BF16), *_of_gradient(view, finding, changes)],
        "optimizer.eps": lambda: _of_eps(view, finding, float(changes[0].to)),
        "optimizer.master_weights": lambda: _of_master_weights(view, finding),
    }
    return [e for name in names if name in makers for e in makers[name]()]


def _effect(view: RunView, name: str, after: float | None, scope: Scope | None = None) -> list[Effect]:
    """Return one effect in a list; empty if the value before or after is unknown or not finite."""
    measure, scope = MEASURES[name], scope or Scope()
    before = measure.take(view, scope)
    if before is None or after is None or not (math.isfinite(before) and math.isfinite(after)):
        return []
    return [Effect(measure, scope, before, after, measures.steps_in(view) if measure.unit == "steps" else None)]


# -- loss scalers -----------------------------------------------------------------------------------------------------


def _of_scaler(view: RunView, changes: Sequence[Change]) -> list[Effect]:
    """Simulate every scaler update of the run with the changed policy."""
    settings = {c.setting.removeprefix("scaler."): c.to for c in changes}
    if settings.get("enabled") is False:
        return _effect(view, "scaled_steps", 0.0)
    process = default_process(view)
    policy = _changed_policy(recorded_policy(view, process) or ScalerPolicy(), settings)
    run = run_gradients(view, process)
    if not run.updates:
        return []
    played = simulate(policy, run.gradients)
    skipped = _effect(view, "skipped_steps", float(len(played.overflow_steps)))
    flushed = _effect(view, "flushed_share", played.flushed.estimate if played.flushed is not None else None)
    return skipped + [e for e in flushed if e.before or e.after]


def _changed_policy(policy: ScalerPolicy, settings: Mapping[str, bool | int | float | str]) -> ScalerPolicy:
    init, interval = settings.get("init_scale"), settings.get("growth_interval")
    floor = float(settings.get("min_scale", policy.min_scale))
    init = float(init) if init is not None else policy.init
    return replace(
        policy,
        init=max(init, floor),
        interval=int(interval) if interval is not None else policy.interval,
        min_scale=floor,
    )


# -- flushed gradients ------------------------------------------------------------------------------------------------


def _of_gradient(view: RunView, finding: Finding, changes: Sequence[Change]) -> list[Effect]:
    """Predict the flushed share of the finding's own gradient at another loss scale or in BF16."""
    if finding.location.kind not in ("grad_output", "weight_grad") or not finding.code.startswith("PD2"):
        return []
    scope = _tensor(finding)
    series = measures.series(view, scope) if scope is not None else None
    if scope is None or series is None:
        return []
    init = next((float(c.to) for c in changes if c.setting == "scaler.init_scale"), None)
    wide = any(c.setting == "autocast.dtype" for c in changes)
    if init is None and not wide:
        return []
    shares = []
    for row in _rows(view, scope):
        if (fmt := computed_in(view, row)) is not None:
            target, factor = (BF16, 1.0) if wide else (fmt, (init or 1.0) / (row.scale or 1.0))
            shares.append(share_flushed(row, fmt, target, factor))
    return _effect(view, "flushed_share", median(shares) if shares else None, scope)


def _tensor(finding: Finding) -> Scope | None:
    place, path = finding.location, finding.evidence.get("path") or ()
    if not place.root or place.kind is None:
        return None
    name = next((str(p["name"]) for p in reversed(path) if p["module"] == (place.module or "")), "")
    return Scope(place.root, place.module or "", place.kind, name)


def _rows(view: RunView, scope: Scope) -> list[TensorRow]:
    """Return the finite rows of the scope's tensor on the examined steps."""
    found = []
    for step in examined_steps(view, int(measures.MAX_STEPS)):
        for process in view.processes:
            found += [r for r in view.rows(process, step) if r.key == scope.key and not r.bad]
    return found


# -- modules in a wider format ----------------------------------------------------------------------------------------


def _of_module(view: RunView, finding: Finding, rule: Prescription, change: Change) -> list[Effect]:
    """Predict the effect of a module in a wider format: on skipped steps, headroom or non-finite steps, by the rule."""
    fmt = FP32 if change.to == "float32" else BF16
    overflows = rule.predicted.get("overflows_in_examined_steps")
    if finding.code == "PD301" and isinstance(overflows, Mapping):  # the overflows that remain are of other modules
        skipped = MEASURES["skipped_steps"].take(view, Scope())
        left = float(overflows["to"]) / float(overflows["from"]) if overflows["from"] else 0.0
        return _effect(view, "skipped_steps", None if skipped is None else round(skipped * left))
    if finding.location.kind == "output" and finding.code.startswith("PD6"):
        scope = _tensor(finding)
        least = _least_headroom(view, scope, fmt) if scope is not None else None
        return _effect(view, "headroom_binades", least, scope)
    return _nonfinite(view, finding, fmt)


def _least_headroom(view: RunView, scope: Scope, fmt: Format) -> float | None:
    """Return the headroom that the scope's largest recorded amax has in ``fmt``, in binades; None without a value."""
    amax = float(view.measured((), (scope.kind,), columns=("amax",), where=scope.place_terms)["amax"].max())
    return fmt.headroom(amax) if amax > 0.0 else None


def _nonfinite(view: RunView, finding: Finding, fmt: Format) -> list[Effect]:
    """Predict no non-finite steps if the blamed op's result, computed in FP64, fits into ``fmt``; else nothing."""
    place = finding.location
    if not finding.code.startswith("PD1") or place.step is None:
        return []
    reach = exact_reach(view, finding)
    if reach is None or reach > fmt.max:
        return []
    scope = Scope(place.root or "", place.module) if place.root and place.module else Scope()
    return _effect(view, "nonfinite_steps", 0.0, scope)


def exact_reach(view: RunView, finding: Finding) -> float | None:
    """Return the amax of the blamed op's result in FP64; None if it was not computed or is not finite there."""
    place = finding.location
    for process in view.processes:
        if place.step is None or process.rank != (place.rank or 0):
            continue
        culprit = culprit_at(view, process, place.step)
        if culprit is not None and culprit.op.reference is not None and culprit.op.finite_in_fp64:
            return culprit.op.reference.amax
    return None


# -- optimizers -------------------------------------------------------------------------------------------------------


def _of_eps(view: RunView, finding: Finding, eps: float) -> list[Effect]:
    scope = _tensor(finding)
    if scope is None:
        return []
    gradients = measures.given_gradients(view, scope)
    found = _effect(view, "below_eps_share", measures.below_eps(gradients, eps), scope)
    return found + _effect(view, "step_size_factor", measures.step_size(gradients, eps), scope)


def _of_master_weights(view: RunView, finding: Finding) -> list[Effect]:
    """Predict the effect of FP32 master weights.

    Lost updates: half of those in FP32's last binade remain lost, all larger ones take effect. A division by zero in
    the optimizer: none remains if FP32 can represent eps.
    """
    if finding.code == "PD105":
        eps = measures.eps_of(view)
        divides = finding.cause == "optimizer-division-by-zero" and eps is not None and eps > FP32.flush_limit
        return _effect(view, "nonfinite_steps", 0.0) if divides else []
    found = measures.updates(view)
    at = measures.FP32_BINADES - found.relative.lo
    last = float(found.relative.counts[at]) if 0 <= at < found.relative.counts.size else 0.0
    return _effect(view, "lost_update_share", 0.5 * last / found.intended if found.intended else None)
