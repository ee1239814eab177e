"""Parses and checks ``--fail-if METRIC[.KIND]:MODULE_GLOB:LIMIT``, such as ``flushed.grad_output:blocks.*:2%``.

limit   = metric ["." kind] ":" glob ":" ["+"] number ["%"]
metric  = a figure of a tensor or of the run, see METRIC_DOCS
kind    = a kind of tensor, such as output or weight_grad; without it, every kind that has the metric
glob    = shell pattern over FQNs below the root; "*" matches every module and the root
number  = the largest value that passes; for headroom the smallest
"+"     = number is the largest change for the worse against the baseline
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from precdoctor.comparison.baseline import Baseline
from precdoctor.comparison.lines import Line, location_of
from precdoctor.comparison.pairing import subject
from precdoctor.comparison.steps import KINDS
from precdoctor.comparison.summary import METRICS, Summary
from precdoctor.diagnosis.analyses.shadow_errors import Shadowed
from precdoctor.diagnosis.claims.finding import Location, Severity
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.registry import nearest
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.errors import UsageError

CHECK = "PD815 limit-exceeded"
#: Metrics of the run as a whole; their glob must be ``*``.
RUN_METRICS = ("loss", "skipped")
#: Every metric and its meaning, for help and errors.
METRIC_DOCS: Mapping[str, str] = {
    **{metric.name: metric.doc for metric in METRICS},
    "amax": "the largest magnitude, as it lies in memory",
    "nonfinite": "elements that are NaN or infinite, over all steps",
    "rounding": "a module's own error beside FP32, in u of the narrowest format; of runs made by precdoctor shadow",
    "loss": "the median loss over the last quarter of the steps",
    "skipped": "steps that a loss scaler skipped",
}
_FRACTIONS = {*(m.name for m in METRICS if m.unit == "fraction"), "skipped"}
_NUMBER = re.compile(r"(\+?)(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|-?\.\d+(?:[eE][-+]?\d+)?)\s*(%?)")
_SHAPE = "METRIC:MODULE_GLOB:LIMIT, such as flushed:blocks.*:2%"


@dataclass(frozen=True)
class Limit:
    """A parsed ``--fail-if``.

    Attributes:
        text: as the user wrote it.
        metric: a key of :data:`METRIC_DOCS`.
        kind: only tensors of this kind; None: all.
        glob: shell pattern over FQNs.
        value: the limit.
        relative: the limit applies to the change against the baseline.
    """

    text: str
    metric: str
    kind: str | None
    glob: str
    value: float
    relative: bool

    @property
    def lower(self) -> bool:
        """Whether lower values are worse."""
        return self.metric == "headroom"

    def words(self, value: float) -> str:
        """``value`` formatted for the report."""
        return percent(value) if self.metric in _FRACTIONS else f"{value:.4g}"


def parse_limit(text: str) -> Limit:
    """Parse a limit.

    Raises:
        UsageError: ``text`` does not match the grammar, or a name is unknown; the message suggests a similar one.
    """
    head, first, rest = text.partition(":")
    glob, second, number = rest.rpartition(":")
    if not first or not second or not head.strip() or not glob.strip():
        raise UsageError(f"--fail-if takes {_SHAPE}, got {text!r}")
    metric, dot, kind = (part.strip() for part in head.partition("."))
    if metric not in METRIC_DOCS:
        raise UsageError(f"--fail-if {text!r}: no metric is called {metric!r}{nearest(metric, METRIC_DOCS)}")
    if dot and kind not in KINDS:
        raise UsageError(f"--fail-if {text!r}: no kind of tensor is called {kind!r}{nearest(kind, KINDS)}")
    if metric == "rounding" and dot:
        raise UsageError(f"--fail-if {text!r}: rounding is of a module, not of a kind of tensor; write rounding:{rest}")
    if metric in RUN_METRICS and (dot or glob.strip() != "*"):
        raise UsageError(f"--fail-if {text!r}: {metric} is of the run, not of a module; write {metric}:*:{number}")
    match = _NUMBER.fullmatch(number.strip())
    if match is None:
        raise UsageError(f"--fail-if {text!r}: {number!r} is not a limit; write a number such as 2%, 0.02, 1e4 or +1%")
    if match[3] and metric not in _FRACTIONS:
        raise UsageError(f"--fail-if {text!r}: {metric} is no fraction, so its limit has no percent sign")
    value = float(match[2]) / (100.0 if match[3] else 1.0)
    if metric in _FRACTIONS and not 0.0 <= value <= 1.0:
        raise UsageError(f"--fail-if {text!r}: {metric} lies between 0 and 1; for percent write {match[2]}%")
    return Limit(text, metric, kind or None, glob.strip(), value, bool(match[1]))


def judge_limit(
    limit: Limit,
    found: Mapping[Key, Summary],
    run: Mapping[str, float | None],
    baseline: Baseline | None,
    shadow: Shadowed | None = None,
) -> list[Line]:
    """A line for each tensor that ``limit`` matches.

    Args:
        limit: the limit.
        found: the run's tensors, under the baseline's names.
        run: the figures of the whole run, by :data:`RUN_METRICS`.
        baseline: the reference of a relative limit.
        shadow: the run's comparison with FP32, if it was made by ``precdoctor shadow``.

    Raises:
        UsageError: no module or tensor matches, or a relative limit has no baseline.
    """
    if limit.relative and baseline is None:
        raise UsageError(f"--fail-if {limit.text!r}: +{limit.value:g} is relative to a baseline; give one, or no plus")
    if limit.metric == "rounding":
        return _of_modules(limit, shadow)
    if limit.metric in RUN_METRICS:
        return _of_run(limit, run[limit.metric], baseline)
    modules = _matching(limit, (key[1] for key in found))
    lines = []
    for key in (key for key in found if key[1] in modules):
        value = _figure(limit.metric, found[key], key[2])
        if value is None or limit.kind not in (None, key[2]):
            continue
        before = _before(limit.metric, key, baseline) if limit.relative else None
        if limit.relative and before is None:
            continue
        lines.append(_line(limit, subject(key), value, before, location_of(key, module_class=found[key].module_class)))
    if not lines:
        kinds = f" of kind {limit.kind}" if limit.kind else ""
        raise UsageError(f"--fail-if {limit.text!r}: no tensor{kinds} in {limit.glob!r} has this figure")
    return lines


def _of_run(limit: Limit, value: float | None, baseline: Baseline | None) -> list[Line]:
    if value is None:
        return []
    before = None
    if limit.relative and baseline is not None:
        learned = baseline.loss if limit.metric == "loss" else baseline.skipped
        before = learned.center if learned is not None else None
        if before is None:
            return []
    return [_line(limit, METRIC_DOCS[limit.metric], value, before, Location())]


def _of_modules(limit: Limit, shadow: Shadowed | None) -> list[Line]:
    """A line for each module that ``limit`` matches, on its own error beside FP32."""
    if limit.relative:
        raise UsageError(f"--fail-if {limit.text!r}: rounding has no baseline to be relative to; leave out the plus")
    if shadow is None or not shadow.steps:
        raise UsageError(f"--fail-if {limit.text!r}: the run was not compared with FP32; precdoctor shadow does that")
    errors = {place: error / shadow.u for place, error in shadow.layers().items()}
    matched = _matching(limit, (module for _, module in errors))
    return [
        _line(limit, module or root, error, None, Location(root=root, module=module or None))
        for (root, module), error in errors.items()
        if module in matched
    ]


def _matching(limit: Limit, modules: Iterable[str]) -> set[str]:
    """The FQNs that the limit's pattern matches; UsageError if there are none."""
    known = set(modules)
    matched = {module for module in known if fnmatchcase(module, limit.glob)}
    if not matched:
        known.discard("")
        near = nearest(limit.glob, known)
        near = near if len(known) <= 12 or "did you mean" in near else ""
        raise UsageError(f"--fail-if {limit.text!r}: no module matches {limit.glob!r}{near}")
    return matched


def _figure(metric: str, summary: Summary, kind: str) -> float | None:
    if metric == "amax":
        return summary.amax
    if metric == "nonfinite":
        return float(summary.bad_elements)
    definition = next(m for m in METRICS if m.name == metric)
    return definition.of(summary) if not definition.kinds or kind in definition.kinds else None


def _before(metric: str, key: Key, baseline: Baseline | None) -> float | None:
    expected = baseline.tensors.get(key) if baseline is not None else None
    learned = expected.metrics.get(metric) if expected is not None else None
    return learned.center if learned is not None else None


def _line(limit: Limit, what: str, value: float, before: float | None, location: Location) -> Line:
    sign = -1.0 if limit.lower else 1.0
    worse = sign * (value - (before or 0.0))
    bound = limit.value if before is not None else sign * limit.value
    passed = worse <= bound
    # for bounds that are zero or negative too, the excess is above 1 if and only if the limit is exceeded
    beyond = abs(worse - bound) / max(abs(bound), 1e-12)
    edge = "at least" if limit.lower else "at most"
    relative = f"{'-' if limit.lower else '+'}{limit.words(limit.value)}"
    return Line(
        CHECK,
        f"{what} ({limit.metric})",
        limit.words(before) if before is not None else f"{edge} {limit.words(limit.value)}",
        limit.words(value),
        relative if before is not None else limit.words(limit.value),
        passed,
        Severity.ERROR,
        location,
        (value, before if before is not None else limit.value),
        1.0 / (1.0 + beyond) if passed else 1.0 + beyond,
    )
