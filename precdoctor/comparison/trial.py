"""Judges a trial of a plan: compares a run with the plan's casts applied with the unchanged run, from the same seed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precdoctor.comparison.loss_gap import LossGap, loss_gap
from precdoctor.comparison.paired_rows import pair_rows
from precdoctor.comparison.predictions import POINTS, RELATIVE
from precdoctor.comparison.steps import clean_rows, mean_losses, sampled_by_all, usable_steps
from precdoctor.diagnosis.claims.finding import Finding, Severity
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.engine import RuleOptions, diagnose_view, resolve_options
from precdoctor.diagnosis.offline.whatif.forecast import forecast_of
from precdoctor.diagnosis.offline.whatif.gather import Selection, gather
from precdoctor.diagnosis.offline.whatif.operands import modules_with_operands
from precdoctor.diagnosis.offline.whatif.plan_file import Figures, PlanFile, PlannedCast
from precdoctor.diagnosis.registry import select_rules
from precdoctor.diagnosis.survey.measures import column
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.prediction import Prediction

_KINDS = ("batch", "input", "output", "weight", "grad_output")
#: Largest error of a predicted SQNR that came true, in decibels. Chosen empirically; no published source.
DECIBELS = 3.0


@dataclass(frozen=True)
class CastOutcome:
    """The cast of one operand: prediction and measurement.

    Attributes:
        planned: the cast in the plan.
        name: name of the tensor, if the module has several in this role.
        figures: the plan's figures; None if the plan was edited, or they are of another tensor of the module.
        step: the predicted step, the worst one of the unchanged run; None if nothing could be predicted.
        prediction: prediction from the log of the unchanged run.
        at_step: figures of the applied cast on that step; None if it was not made on that step.
        overall: figures of the applied cast over all steps.
        misses: limits of the plan's target that ``overall`` exceeds: ``flushed``, ``saturated``, ``sqnr``.
    """

    planned: PlannedCast
    name: str
    figures: Figures | None
    step: int | None
    prediction: Prediction | None
    at_step: Figures | None
    overall: Figures
    misses: tuple[str, ...]

    @property
    def predicted(self) -> Figures | None:
        """The likely values of the prediction."""
        p = self.prediction
        return None if p is None else Figures(p.flushed.estimate, p.saturated.estimate, p.sqnr_db.estimate)

    @property
    def came_true(self) -> bool | None:
        """Whether the prediction holds: shares lie in its interval, widened as in ``compare``, and the SQNR is off by
        at most :data:`DECIBELS`. None if there is no prediction or no measurement.
        """
        predicted, measured = self.prediction, self.at_step
        if predicted is None or measured is None:
            return None
        for interval, share in ((predicted.flushed, measured.flushed), (predicted.saturated, measured.saturated)):
            spare = max(RELATIVE * share, POINTS)
            if not interval.low - spare <= share <= interval.high + spare:
                return False
        likely = predicted.sqnr_db.estimate
        return likely == measured.sqnr_db or abs(likely - measured.sqnr_db) <= DECIBELS


@dataclass(frozen=True)
class GradientRatio:
    """Norm of the weight gradients of one module, with the plan divided by without.

    Attributes:
        first: on the first step, on which both runs have the same weights; None if the norm without the plan is zero.
        typical: median over the steps with a finite ratio; None if there are none.
        zeros: median change of the share of zeros.
    """

    root: str
    module: str
    first: float | None
    typical: float | None
    zeros: float


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        steps: number of complete steps that both runs have.
        casts: the applied casts, those furthest beyond the target first.
        gap: gap of the losses; None if too few steps have a loss.
        not_finite_at: the first step whose loss is non-finite with the plan only; None if there is none.
        gradients: one ratio per module.
        gained, lost: findings that only the run with the plan has, and only the run without.
        failures: why the plan does not hold, the most important first; one clause each.
        doubts: why the plan cannot be judged; one clause each.
    """

    plan: PlanFile
    steps: int
    casts: tuple[CastOutcome, ...]
    gap: LossGap | None
    not_finite_at: int | None
    gradients: tuple[GradientRatio, ...]
    gained: tuple[Finding, ...]
    lost: tuple[Finding, ...]
    failures: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0: the plan holds; 1: it does not; 3: there are no failures, but doubts."""
        return 1 if self.failures else 3 if self.doubts else 0


def not_applied(view: RunView) -> str | None:
    """Why a change of the plan was not made, as a sentence without a full stop; None if all were made."""
    refused = [e for e in view.events_of("applied") if not e["data"].get("done")]
    if not refused:
        return None
    event = refused[0]
    others = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    name = event.get("module") or event.get("root") or "a module"
    return f"the plan cannot be applied to `{name}`{others}, because {event['data'].get('why')}"


def judge_trial(
    plan: PlanFile, before: RunView, after: RunView, share: float, options: RuleOptions, ended: str | None = None
) -> Trial:
    """Compare the run with the plan, ``after``, with the unchanged run, ``before``.

    Args:
        share: largest allowed loss gap, as a share of the loss.
        options: options of rules, as for a diagnosis.
        ended: how the run with the plan failed, if the unchanged run did not; None otherwise.
    """
    ours, theirs = usable_steps(after), usable_steps(before)
    common = sorted(ours.keys() & theirs.keys())
    losses = mean_losses(before), mean_losses(after)
    bad = [s for s in common if not math.isfinite(losses[1].get(s, 0.0)) and math.isfinite(losses[0].get(s, 0.0))]
    casts = sorted(_casts(plan, before, after), key=lambda c: -_sort_key(plan, c))
    gap = loss_gap(losses[0], losses[1], share)
    gained, lost = _findings(before, after, options)
    unlike = _starts_differ(before, after, common[0]) if common else None
    failures = [cast_in_words(c) for c in casts if c.misses]
    failures += [f"the training {ended}"] if ended else []
    failures += [f"the loss is not finite from step {bad[0]} on"] if bad else []
    failures += (
        [f"the loss is {gap.mean:.3g} higher, more than {gap.allowed:.3g}"] if gap and gap.holds is False else []
    )
    failures += [f"{f.code} {f.title}" for f in gained if f.severity is not Severity.INFO]
    return Trial(
        plan=plan,
        steps=len(common),
        casts=tuple(casts),
        gap=gap,
        not_finite_at=bad[0] if bad else None,
        gradients=tuple(_gradients(before, after, sampled_by_all([ours, theirs]))),
        gained=tuple(gained),
        lost=tuple(lost),
        failures=() if unlike is not None else tuple(failures),
        doubts=tuple(_doubts(unlike, common, gap)),
    )


def cast_in_words(cast: CastOutcome) -> str:
    """A missed limit: ```blocks.0.up` grad_output in E4M3FN none: 100 % flushed on step 39 (predicted 100 %)``.

    Gives the figure of the predicted step if the cast was made on that step, else of all steps.
    """
    planned, predicted = cast.planned, cast.predicted
    done = cast.at_step or cast.overall
    miss = cast.misses[0]

    def shown(figures: Figures) -> str:
        return f"{figures.sqnr_db:.1f} dB" if miss == "sqnr" else percent(getattr(figures, miss))

    what = f"an SQNR of {shown(done)}" if miss == "sqnr" else f"{shown(done)} {miss}"
    known = f" on step {cast.step} (predicted {shown(predicted)})" if predicted is not None and cast.at_step else ""
    return f"`{planned.module or planned.root}` {planned.role} in {planned.cast}: {what}{known}"


def _doubts(unlike: str | None, common: Sequence[int], gap: LossGap | None) -> Iterator[str]:
    if not common:
        yield "the two runs have no complete step in common"
        return
    if unlike is not None:
        yield f"the two runs do not start alike ({unlike}); seed the script, as with torch.manual_seed(0)"
        return
    if gap is None:
        yield "too few steps have a loss in both runs; try more --steps"
    elif gap.holds is None:
        yield (
            f"the loss gap lies between {gap.low:.3g} and {gap.high:.3g}, on both sides of the {gap.allowed:.3g} that "
            "are allowed; try more --steps"
        )


def _starts_differ(before: RunView, after: RunView, step: int) -> str | None:
    """The first batch or weight whose bits differ on the first step, in words; None if all are equal.

    No cast has changed them yet, so a difference means that the script is not seeded.
    """

    def prints(view: RunView) -> dict[tuple[Any, ...], Any]:
        columns = ["kind", "root", "module", "name", "call", "fingerprint"]
        rows = (r for b in view.batches(columns, ("batch", "weight"), steps=[step]) for r in b.to_pylist())
        return {tuple(r[c] for c in ("kind", "root", "module", "name", "call")): r["fingerprint"] for r in rows}

    ours, theirs = prints(after), prints(before)
    for key in (k for kind in ("batch", "weight") for k in theirs if k[0] == kind):
        if key in ours and None not in (ours[key], theirs[key]) and ours[key] != theirs[key]:
            kind, root, module, name, _ = key
            return f"the batch of {root}" if kind == "batch" else ".".join(filter(None, (module, name)))
    return None


# -- casts ------------------------------------------------------------------------------------------------------------


def _casts(plan: PlanFile, before: RunView, after: RunView) -> Iterator[CastOutcome]:
    recipes = tuple(dict.fromkeys(c.recipe for c in plan.casts))
    gathered = gather(before.run, Selection(lambda _key: True, _KINDS), recipes, plan.target)
    operands = {(m.root, m.module): m for m in modules_with_operands(gathered.seen, before.run)}
    done: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for event in after.events_of("casts"):
        data = event["data"]
        place = (str(event.get("root") or ""), str(event.get("module") or ""), str(data.get("role")))
        done.setdefault(place, []).append(data)
    by_name = {(s.key.root, s.key.module, s.key.kind, s.key.name): s for s in gathered.seen}
    for planned in plan.casts:
        where = (planned.root, planned.module)
        main = dict(operands[where].recorded).get(planned.role) if where in operands else None
        for data in done.get((*where, planned.role), ()):
            name = str(data.get("name") or "")
            seen = by_name.get((*where, planned.role, name))
            if main is not None and (planned.role == "input" or main.key.module != planned.module):
                seen = main  # the operand is recorded under another module
            forecast = None
            if seen is not None:
                forecast = forecast_of(seen, planned.recipe, plan.target)
            counts = _counts(data)
            overall = _figures(counts.values())
            if overall is None:
                continue  # an output without a gradient
            prediction = forecast.prediction if forecast is not None else None
            step = forecast.step if forecast is not None and prediction is not None else None
            yield CastOutcome(
                planned=planned,
                name=name,
                figures=planned.figures if main is None or planned.role == "input" or main.key.name == name else None,
                step=step,
                prediction=prediction,
                at_step=_figures([counts[step]]) if step in counts else None,
                overall=overall,
                misses=_misses(plan, planned, overall),
            )


def _counts(data: Mapping[str, Any]) -> dict[int, tuple[float, ...]]:
    """``(elements, flushed, saturated, noise, signal)`` by step, from a ``casts`` event; invalid rows are left out."""
    columns = [data.get(name) for name in ("steps", "elements", "flushed", "saturated", "noise", "signal")]
    if not all(isinstance(c, list) for c in columns):
        return {}
    rows = zip(*columns, strict=False)
    return {
        row[0]: tuple(math.inf if v is None else float(v) for v in row[1:])
        for row in rows
        if isinstance(row[0], int) and all(v is None or isinstance(v, (int, float)) for v in row[1:])
    }


def _figures(counts: Any) -> Figures | None:
    rows = list(counts)
    elements, flushed, saturated, noise, signal = (sum(c) for c in zip(*rows, strict=True)) if rows else [0.0] * 5
    if not elements > 0.0:
        return None
    if noise == 0.0:
        sqnr = math.inf
    else:
        sqnr = 10.0 * math.log10(signal / noise) if signal > 0.0 and noise < math.inf else -math.inf
    return Figures(flushed / elements, saturated / elements, sqnr)


def _misses(plan: PlanFile, planned: PlannedCast, done: Figures) -> tuple[str, ...]:
    target, out = plan.target, []
    if done.flushed > target.max_flushed:
        out.append("flushed")
    if done.saturated > target.max_saturated and not planned.recipe.clips_by_design:
        out.append("saturated")
    if done.sqnr_db < target.min_sqnr_db:
        out.append("sqnr")
    return tuple(out)


def _sort_key(plan: PlanFile, cast: CastOutcome) -> float:
    """Sort key: how far the cast is beyond the target; casts that miss a limit get the largest keys."""
    beyond = min(max(plan.target.min_sqnr_db - cast.overall.sqnr_db, -200.0), 200.0)
    return 1e3 * len(cast.misses) + 100.0 * cast.overall.flushed + beyond


# -- gradients and findings -------------------------------------------------------------------------------------------


def _gradients(before: RunView, after: RunView, steps: Sequence[int]) -> Iterator[GradientRatio]:
    if not steps:
        return
    measures = ("rms", "multiplier", "zero_share")
    theirs, ours = (clean_rows(view, measures, ("weight_grad",), ("numel",), steps) for view in (before, after))
    pairs = pair_rows(theirs, ours, {})
    if not len(pairs.tensor):
        return
    table = pairs.first[["step", "root", "module"]].astype({"root": str, "module": str})
    for name, frame in (("before", pairs.first), ("after", pairs.second)):
        scaled = np.nan_to_num(column(frame, "rms") / column(frame, "multiplier"))
        table[name] = scaled**2 * column(frame, "numel")
        table[f"zeros_{name}"] = np.nan_to_num(column(frame, "zero_share")) * column(frame, "numel")
    table["numel"] = column(pairs.first, "numel")
    sums = table.groupby(["root", "module", "step"], sort=False).sum().reset_index()
    for (root, module), mine in sums.groupby(["root", "module"], sort=False):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.sqrt(mine["after"].to_numpy() / mine["before"].to_numpy())
        finite = ratio[np.isfinite(ratio)]
        zeros = (mine["zeros_after"] - mine["zeros_before"]) / mine["numel"]
        at_first = ratio[(mine["step"] == steps[0]).to_numpy()]
        first = float(at_first[0]) if at_first.size and np.isfinite(at_first[0]) else None
        typical = float(np.median(finite)) if finite.size else None
        yield GradientRatio(str(root), str(module), first, typical, float(zeros.median()))


def _findings(before: RunView, after: RunView, options: RuleOptions) -> tuple[list[Finding], list[Finding]]:
    """``(findings of after alone, findings of before alone)``, matched by code and module."""
    rules, settings = select_rules((), ()), resolve_options(options)
    theirs, ours = (diagnose_view(view, rules, settings).findings for view in (before, after))

    def key(f: Finding) -> tuple[Any, ...]:
        return f.code, f.location.module

    return (
        [f for f in ours if key(f) not in set(map(key, theirs))],
        [f for f in theirs if key(f) not in set(map(key, ours))],
    )
