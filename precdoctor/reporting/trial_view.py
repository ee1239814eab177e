"""Renders a trial of a plan on a terminal and as JSON, in the form of ``schema/trial-1.schema.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from precdoctor.comparison.loss_gap import LossGap
from precdoctor.comparison.trial import CastOutcome, GradientRatio, Trial
from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.claims.words import module_label, percent, plural, several_models
from precdoctor.diagnosis.offline.whatif.plan_file import Figures
from precdoctor.reporting.json_report import head
from precdoctor.reporting.tables import Name, folded, right, table
from precdoctor.reporting.text import clean
from precdoctor.reporting.whatif_report import described
from precdoctor.reporting.whatif_view import decibels
from precdoctor.runlog.atomic import jsonable

_VERDICTS = {0: ("holds", "pd.good"), 1: ("does-not-hold", "pd.bad"), 3: ("cannot-be-judged", "pd.near")}
_CAME_TRUE = {True: ("as predicted", "pd.good"), False: ("missed", "pd.bad"), None: ("–", "pd.quiet")}


def verdict(trial: Trial) -> str:
    """The verdict as one sentence."""
    if trial.failures:
        more = f" (and {plural(len(trial.failures) - 1, 'reason')} more)" if len(trial.failures) > 1 else ""
        return f"The plan does not hold: {trial.failures[0]}{more}."
    if trial.doubts:
        return f"The plan cannot be judged: {trial.doubts[0]}."
    modules = plural(len(trial.plan.modules), "module")
    gap = "" if trial.gap is None else f": loss gap {_gap(trial.gap)}"
    return f"The plan holds for {modules} over {plural(trial.steps, 'step')}{gap}."


def print_trial(trial: Trial, place: str, console: Console, *, worst: int) -> None:
    """Print the verdict, then losses, casts, gradients and findings; tables have at most ``worst`` rows."""
    console.print(Text(clean(place), "pd.strong"), soft_wrap=True)
    console.print(Text(clean(verdict(trial), 400), _VERDICTS[trial.exit_code][1]))
    for line in (*trial.failures[1:6], *(trial.doubts if trial.failures else trial.doubts[1:])):
        console.print(Padding(Text(clean(line, 400)), (0, 0, 0, 2)))
    if trial.gap is not None:
        gap = trial.gap
        console.print(Text(f"\nLoss, steps {gap.first} to {gap.last}", "pd.strong"))
        console.print(f"  without the plan {gap.level:.6g}; with it {_gap(gap)}")
        console.print(f"  the run's own scatter from step to step is {gap.noise:.3g}; allowed is {gap.allowed:.3g}")
    _print_casts(trial, console, worst)
    _print_gradients(trial, console, worst)
    for title, findings in (("gained", trial.gained), ("lost", trial.lost)):
        console.print(Text(f"\nFindings {title}: {'none' if not findings else ''}", "pd.strong"))
        for f in findings:
            console.print(Padding(Text(clean(f"{f.severity.value} {f.code} {f.title}", 200)), (0, 0, 0, 2)))


def _gap(gap: LossGap) -> str:
    return f"{gap.mean:+.3g} (95 %: {gap.low:+.3g} to {gap.high:+.3g})"


def _print_casts(trial: Trial, console: Console, worst: int) -> None:
    judged = [c.came_true for c in trial.casts if c.came_true is not None]
    console.print(Text(f"\nCasts: {sum(judged)} of {len(judged)} did what was predicted", "pd.strong"))
    shown = table(*folded("module", "cast"), *right("step", "flushed", "saturated", "SQNR", ""))
    several = several_models((c.planned.root, c.planned.module) for c in trial.casts)
    for cast in sorted(trial.casts, key=lambda c: c.came_true is not False)[:worst]:
        words, style = _CAME_TRUE[cast.came_true]
        pairs = [
            _pair(cast, lambda f: percent(f.flushed)),
            _pair(cast, lambda f: percent(f.saturated)),
            _pair(cast, lambda f: decibels(f.sqnr_db)),
        ]
        at = "–" if cast.step is None else str(cast.step)
        place = f"{module_label(cast.planned.root, cast.planned.module, several=several)} {cast.name}".strip()
        shown.add_row(Name(place), clean(f"{cast.planned.role} {cast.planned.cast}"), at, *pairs, Text(words, style))
    console.print(Padding(shown, (0, 0, 0, 2)))
    console.print("  Each pair is predicted -> seen, on the worst step of the run without the plan.")
    _more(len(trial.casts), worst, console)


def _pair(cast: CastOutcome, shown: Any) -> str:
    predicted, measured = (shown(f) if f is not None else "–" for f in (cast.predicted, cast.at_step))
    return f"{predicted} -> {measured}"


def _print_gradients(trial: Trial, console: Console, worst: int) -> None:
    if not trial.gradients:
        return
    console.print(Text("\nNorms of weight gradients, with the plan over without", "pd.strong"))
    shown = table(*folded("module"), *right("first step", "median", "zeros"))
    several = several_models((g.root, g.module) for g in trial.gradients)
    for g in sorted(trial.gradients, key=_deviation, reverse=True)[:worst]:
        name = module_label(g.root, g.module, several=several)
        shown.add_row(Name(name), _ratio(g.first), _ratio(g.typical), f"{100 * g.zeros:+.2g} points")
    console.print(Padding(shown, (0, 0, 0, 2)))
    console.print("  The log keeps norms and exponents, not elements: it gives no angle between the two gradients.")
    _more(len(trial.gradients), worst, console)


def _deviation(g: GradientRatio) -> float:
    distances = [abs(math.log(x)) if x > 0.0 else math.inf for x in (g.first, g.typical) if x is not None]
    return max(distances, default=-1.0)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _more(count: int, worst: int, console: Console) -> None:
    if count > worst:
        console.print(f"  {count - worst} more in trial.json")


def document(trial: Trial, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The trial as JSON values; ``runs`` has ``original`` and ``planned``, each as in a diagnosis."""
    return {
        **head(),
        "verdict": _VERDICTS[trial.exit_code][0],
        "sentence": verdict(trial),
        "exit_code": trial.exit_code,
        "failures": list(trial.failures),
        "doubts": list(trial.doubts),
        "runs": jsonable(runs),
        "steps": trial.steps,
        "target": jsonable(trial.plan.target),
        "loss_gap": jsonable(trial.gap),
        "not_finite_at": trial.not_finite_at,
        "casts": [_cast(c) for c in trial.casts],
        "gradients": [jsonable(g) for g in trial.gradients],
        "findings_gained": [_finding(f) for f in trial.gained],
        "findings_lost": [_finding(f) for f in trial.lost],
    }


def _cast(cast: CastOutcome) -> dict[str, Any]:
    planned = cast.planned
    figures: dict[str, Figures | None] = {
        "planned": cast.figures,
        "predicted": cast.predicted,
        "seen": cast.at_step,
        "seen_overall": cast.overall,
    }
    return {
        "root": planned.root,
        "module": planned.module,
        "role": planned.role,
        "name": cast.name,
        **described(planned.recipe),
        "step": cast.step,
        **{name: jsonable(value) for name, value in figures.items()},
        "came_true": cast.came_true,
        "misses": list(cast.misses),
    }


def _finding(f: Finding) -> dict[str, Any]:
    return {"code": f.code, "severity": f.severity.value, "title": f.title, "module": f.location.module}
