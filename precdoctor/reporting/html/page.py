"""Renders the report of a run as one HTML file: no external resources, one script, every recorded name escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

import precdoctor
from precdoctor.diagnosis.analyses.op_dtypes import op_dtypes, patterns
from precdoctor.diagnosis.claims.finding import Diagnosis, RuleOutcome, Status
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.engine import RuleOptions, diagnose_view, resolve_options, view_of
from precdoctor.diagnosis.ranking.ending import ending
from precdoctor.diagnosis.registry import select_rules
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import E4M3FN
from precdoctor.reporting.html import about, cards, heatmap, rangemap, trends, versus
from precdoctor.reporting.html.survey import Survey
from precdoctor.reporting.html.timeline import timeline
from precdoctor.reporting.run_head import run_facts, run_name
from precdoctor.reporting.show_view import pattern_cells
from precdoctor.reporting.terminal import MARKS, verdict_line
from precdoctor.reporting.text import clean, number
from precdoctor.runlog.reader import Run

#: Target size of a report; histograms of steps are dropped until it fits.
MOST_BYTES = 2_000_000
#: Findings beyond this many get one line each.
FULL_FINDINGS = 12
#: The first bytes of every report. Only a file that begins with them may be overwritten by a newer report.
MARK = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="precdoctor '
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Subject:
    """A run with its survey and its diagnosis, ready to be rendered."""

    view: RunView
    survey: Survey
    diagnosis: Diagnosis
    name: str


def subject(run: Run, options: RuleOptions | None = None) -> Subject:
    """Diagnose and survey a run.

    Raises:
        NothingRecordedError: the run holds no training step.
    """
    view = view_of(run)
    diagnosis = diagnose_view(view, select_rules(), resolve_options(options or {}))
    return Subject(view, Survey(view), diagnosis, run_name(run.path))


def render(run: Run, against: Run | None = None, *, options: RuleOptions | None = None) -> str:
    """The report of ``run`` as HTML, of at most :data:`MOST_BYTES` if dropping histograms of steps achieves that.

    Args:
        against: a second run to overlay in another colour.
        options: changed thresholds, by rule, as for :func:`precdoctor.diagnosis.engine.diagnose`.

    Raises:
        NothingRecordedError: a run holds no training step.
    """
    ours = subject(run, options)
    other = None if against is None else subject(against, options)
    wanted = rangemap.steps_of_interest(ours.view, ours.diagnosis.findings)
    ranges = rangemap.RangeMap(ours.view, ours.survey, wanted)
    others = None
    if other is not None:
        others = rangemap.RangeMap(other.view, other.survey, ranges.steps, shared=ranges)
    context = _context(ours, other)
    while True:
        page = _write(context, ranges, others)
        if len(page.encode()) <= MOST_BYTES or not (ranges.thin_out() | (others is not None and others.thin_out())):
            return page


def _write(context: Mapping[str, Any], ranges: rangemap.RangeMap, others: rangemap.RangeMap | None) -> str:
    data = {
        "start": context["start"],
        "formats": [rangemap.format_data(f) for f in rangemap.FORMATS],
        "kinds": rangemap.kind_data(ranges.tensors),
        "tensors": rangemap.tensor_data(ranges.tensors),
        "run": ranges.data(),
        "against": None if others is None else others.data(),
    }
    style, script = asset("report.css"), asset("predict.js") + asset("report.js")
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return template("report.html.j2").render(
        **context,
        style=Markup(style),  # noqa: S704 - a file of the package
        script=Markup(script),  # noqa: S704 - files of the package
        policy=policy,
        data=script_json(data),
        version=precdoctor.__version__,
    )


def script_json(data: Any) -> Markup:
    """JSON for a script element, escaped so that it can neither end the element nor begin a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - just escaped


def prose(text: str) -> Markup:
    """Escaped text, with `names` in backticks as code elements."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 - escaped first


def breakable(name: str) -> Markup:
    """An escaped name with optional line breaks after dots and underscores; they do not appear in copied text."""
    return Markup(re.sub(r"([._])(?=[^._])", r"\1<wbr>", str(escape(name))))  # noqa: S704 - escaped first


def _context(ours: Subject, other: Subject | None) -> dict[str, Any]:
    view, survey, diagnosis = ours.view, ours.survey, ours.diagnosis
    views = [view] if other is None else [view, other.view]
    lines = timeline(views, diagnosis.findings)
    return {
        **_about(ours, "the command"),
        "path": clean(diagnosis.run.get("path", "")),
        "verdict": diagnosis.verdict,
        "cards": [cards.card(view, f) for f in diagnosis.findings[:FULL_FINDINGS]],
        "more": [clean(f"{f.code} {f.title}", 400) for f in diagnosis.findings[FULL_FINDINGS:]],
        "evaluated": [_outcome(r) for r in diagnosis.rules if r.status is not Status.NOT_APPLICABLE],
        "inapplicable": [_outcome(r) for r in diagnosis.rules if r.status is Status.NOT_APPLICABLE],
        "timeline": lines,
        "underflow": heatmap.underflow(view, survey),
        "saturation": heatmap.saturation(view, survey),
        "updates": trends.updates(view, survey),
        "forecasts": trends.forecasts(view, survey),
        "coverage": about.coverage(survey),
        "ops": list(map(pattern_cells, patterns(op_dtypes(view)))),
        "recording": about.facts(view, survey),
        "gaps": about.not_recorded(view, survey),
        "other": None if other is None else {**_about(other, "its command"), "findings": _titles(other)},
        "versus": None if other is None else versus.side_by_side(survey, other.survey),
        "start": _start(ours),
        "steps": plural(len(ours.view.sampled_steps) or 1, "step"),
        "rows": number(survey.rows),
    }


def _start(ours: Subject) -> dict[str, Any]:
    """The initial state of the range map: kind and step of the first finding on a tensor, else the activations.

    The format is that of the finding's tensor, or the run's own; for a run with FP8 operands E4M3, scaled per tensor.
    """
    located = next((f for f in ours.diagnosis.findings if f.location.kind is not None), None)
    evidence = located.evidence.get("range") if located is not None else None
    fmt = rangemap.offered(str(evidence.get("dtype"))) if isinstance(evidence, Mapping) else None
    own = fmt or rangemap.own_format(ours.survey)
    return {
        "kind": "output" if located is None else clean(located.location.kind),
        "step": None if located is None else located.location.step,
        "format": own.name,
        "fill": fmt is None and own is E4M3FN,
    }


def _outcome(rule: RuleOutcome) -> tuple[str, str, str, str, str]:
    """``(code, name, status, reason, mark of the status)``."""
    return (clean(rule.code, 20), clean(rule.name, 80), rule.status.value, clean(rule.reason), MARKS[rule.status][0])


def _about(subject: Subject, command: str) -> dict[str, str]:
    """The facts of a run, for the template; ``command`` is the subject of the sentence on how it ended."""
    diagnosis = subject.diagnosis
    return {
        "name": subject.name,
        "facts": run_facts(diagnosis.run),
        "ending": clean(ending(diagnosis.run, command) or ""),
        "headline": verdict_line(diagnosis),
    }


def _titles(other: Subject) -> list[tuple[str, str, str]]:
    return [(f.code, f.severity.value, clean(f.title)) for f in other.diagnosis.findings[:FULL_FINDINGS]]


def asset(name: str) -> str:
    """The text of a style sheet or script of the package."""
    return (resources.files("precdoctor.reporting.html") / "templates" / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """The SHA-256 by which a content security policy permits an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@lru_cache
def template(name: str) -> Any:
    """A Jinja template of the package: values are escaped, and a missing value is an error."""
    environment = Environment(
        loader=PackageLoader("precdoctor.reporting.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    environment.filters["breakable"] = breakable
    environment.globals["plural"] = plural
    return environment.get_template(name)
