"""What got worse against a baseline run, tensor by tensor. One baseline run, fixed limits; nothing statistical yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from precdoctor.comparison.pairing import Pairing, Summary, subject
from precdoctor.diagnosis.finding import Finding, Location, Phase, Severity
from precdoctor.diagnosis.rows import Key
from precdoctor.diagnosis.rule import Options, RuleOption
from precdoctor.diagnosis.telling import percent, plural


@dataclass(frozen=True)
class Line:
    """One comparison: what was expected (the baseline), what was found, and how far apart the two may be."""

    check: str
    subject: str
    expected: str
    found: str
    limit: str
    passed: bool
    severity: Severity
    #: For the finding, when it did not pass.
    location: Location | None = None
    numbers: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Regression:
    """One way of getting worse. ``compare`` gives a line per offending tensor, or one passing line for the worst."""

    code: str
    name: str
    severity: Severity
    doc: str
    options: tuple[RuleOption, ...]
    compare: Callable[[Regression, Pairing, Options], list[Line]]


@dataclass(frozen=True)
class _Share:
    """A share of elements that may not grow beyond a limit."""

    of: Callable[[Summary], float]
    kinds: tuple[str, ...]
    option: str

    def __call__(self, regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
        limit = options[self.option]
        return _compared(
            regression,
            [(k, self.of(a), self.of(b)) for k, a, b in pairing.common if k[2] in self.kinds],
            lambda found, expected: found - expected - limit,
            percent,
            f"+{percent(limit)}",
        )


def _headroom(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    limit = options["binades"]
    pairs = [(k, a.headroom, b.headroom) for k, a, b in pairing.common if a.dtype == b.dtype and k[2] != "loss"]
    known = [(k, a, b) for k, a, b in pairs if a is not None and b is not None]
    lines = _compared(
        regression, known, lambda found, expected: expected - found - limit, _binades, f"-{limit:g} binades"
    )
    return [_by_distance(line, options["near"]) for line in lines]


def _by_distance(line: Line, near: float) -> Line:
    """Growth far from the limit is a warning; what has come near it is an error."""
    found = line.numbers[0]
    severe = found is not None and found < near
    return Line(**{**line.__dict__, "severity": Severity.ERROR if severe else Severity.WARNING})


def _compared(
    regression: Regression,
    pairs: Sequence[tuple[Key, float, float]],
    excess: Callable[[float, float], float],
    words: Callable[[float], str],
    limit: str,
) -> list[Line]:
    """A line per pair above its limit, worst first; or one line for the pair that came nearest to it."""
    if not pairs:
        return []
    ranked = sorted(pairs, key=lambda p: -excess(p[1], p[2]))
    failed = [p for p in ranked if excess(p[1], p[2]) > 0]
    return [
        Line(
            f"{regression.code} {regression.name}",
            subject(key),
            words(expected),
            words(found),
            limit,
            not failed,
            regression.severity,
            _location(key),
            (found, expected),
        )
        for key, found, expected in (failed or ranked[:1])
    ]


def _location(key: Key, step: int | None = None) -> Location:
    phases = {"batch": Phase.DATA, "loss": Phase.LOSS, "grad_output": Phase.BACKWARD, "weight_grad": Phase.BACKWARD}
    phase = phases.get(key[2], Phase.OPTIMIZER if key[2] in ("weight", "update", "weight_grad_step") else Phase.FORWARD)
    return Location(root=key[0], module=key[1], kind=key[2], phase=phase, step=step)


def _binades(value: float) -> str:
    return f"{value:.1f} binades"


def _loss(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """The median over the last quarter of the common steps; a single non-finite loss is enough."""
    if not pairing.losses:
        return []
    check, limit = f"{regression.code} {regression.name}", options
    place = Location(phase=Phase.LOSS, kind="loss")
    broken = [(s, a) for s, a, b in pairing.losses if math.isfinite(b) and not math.isfinite(a)]
    if broken:
        step = broken[0][0]
        found = f"not finite on {plural(len(broken), 'step')}, first {step}"
        return [Line(check, "loss", "finite", found, "0 steps", False, regression.severity, place)]
    last = pairing.losses[-max(1, len(pairing.losses) // 4) :]
    finite = [(a, b) for _, a, b in last if math.isfinite(a) and math.isfinite(b)]
    if not finite:
        return []
    found_loss, expected_loss = median(a for a, _ in finite), median(b for _, b in finite)
    allowed = max(limit["nats"], limit["relative"] * abs(expected_loss))
    passed = found_loss - expected_loss <= allowed
    return [
        Line(
            check,
            f"loss, median of steps {last[0][0]} to {last[-1][0]}",
            f"{expected_loss:.4g}",
            f"{found_loss:.4g}",
            f"+{allowed:.2g}",
            passed,
            regression.severity,
            place,
            (found_loss, expected_loss),
        )
    ]


def _nonfinite(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """Tensors that are non-finite in a way they are not in the baseline; one line, for the first of them."""
    del options  # the limit is zero
    check = f"{regression.code} {regression.name}"
    new = [(a.first_bad_step or 0, k, a) for k, a, b in pairing.common if a.badness - b.badness]
    if not new:
        return [Line(check, "all tensors", "0 new", "0 new", "0", True, regression.severity)]
    step, key, _ = min(new, key=lambda n: n[0])
    found = f"{plural(len(new), 'tensor')}, first at step {step}"
    return [Line(check, subject(key), "finite", found, "0", False, regression.severity, _location(key, step))]


def _tensors(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """Tensors of one run only. A changed model is worth a word, and part of it was not compared."""
    missing, new = pairing.expected.keys() - pairing.found.keys(), pairing.found.keys() - pairing.expected.keys()
    share = len(missing) / max(1, len(pairing.expected))
    passed = share <= options["missing_share"]
    named = sorted(missing or new)
    example = f", such as {subject(named[0])}" if named else ""
    return [
        Line(
            f"{regression.code} {regression.name}",
            f"tensors{example}",
            f"{len(pairing.expected):,}",
            f"{len(pairing.found):,} ({len(missing):,} missing, {len(new):,} new)",
            f"{percent(options['missing_share'])} missing",
            passed,
            regression.severity,
            Location(),
            (float(len(missing)), 0.0),
        )
    ]


def _dtypes(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """Tensors in another dtype, one line per change; its first tensor stands for the others."""
    del options  # any change counts
    check = f"{regression.code} {regression.name}"
    changes: dict[tuple[str, str], list[Key]] = {}
    for key, found, expected in pairing.common:
        if found.dtype != expected.dtype:
            changes.setdefault((expected.dtype, found.dtype), []).append(key)
    if not changes:
        return [Line(check, "all tensors", "0 changed", "0 changed", "0", True, regression.severity)]
    lines = []
    for (old, new), keys in changes.items():
        more = f" and {plural(len(keys) - 1, 'more tensor')}" if len(keys) > 1 else ""
        what = f"{subject(keys[0])}{more}"
        lines.append(Line(check, what, old, new, "no change", False, regression.severity, _location(keys[0])))
    return lines


def _option(name: str, default: float, unit: str, doc: str, source: str, maximum: float = math.inf) -> RuleOption:
    return RuleOption(name, default, unit, doc, source, maximum=maximum)


_OWN = "Precdoctor's own; a measured run-to-run spread will replace it."

REGRESSIONS: tuple[Regression, ...] = (
    Regression(
        "PD801", "underflow-increased", Severity.ERROR,
        "More of a tensor's intended non-zero elements are rounded to zero than in the baseline.",
        (_option("flushed_share", 0.02, "fraction", "Largest increase.", f"Half of PD201's own limit. {_OWN}", 1.0),),
        _Share(lambda s: s.flushed_share, ("output", "input", "grad_output", "weight_grad"), "flushed_share"),
    ),
    Regression(
        "PD802", "saturation-increased", Severity.ERROR,
        "More of a tensor's elements sit at the dtype's largest value than in the baseline.",
        (_option("at_max_share", 0.01, "fraction", "Largest increase.", f"Half of PD401's own limit. {_OWN}", 1.0),),
        _Share(lambda s: s.at_max_share, ("output", "input", "grad_output", "weight", "weight_grad"), "at_max_share"),
    ),
    Regression(
        "PD803", "headroom-lost", Severity.WARNING,
        "A tensor's largest element came nearer to the dtype's limit; an error when it is close to it.",
        (
            _option("binades", 3.0, "binades", "Largest loss of headroom.", f"A factor of 8. {_OWN}"),
            _option("near", 3.0, "binades", "With less headroom than this the loss is an error.", _OWN),
        ),
        _headroom,
    ),
    Regression(
        "PD804", "loss-increased", Severity.ERROR,
        "The loss of the last quarter of the common steps is higher, or non-finite where the baseline's was not.",
        (
            _option("nats", 0.01, "nats", "Largest increase, whatever the loss.", "The usual leading indicator."),
            _option("relative", 0.05, "fraction", "Largest increase relative to the baseline's loss.", _OWN),
        ),
        _loss,
    ),
    Regression(
        "PD805", "new-nonfinite-tensors", Severity.ERROR,
        "Tensors hold NaN or infinities where the baseline's do not; steps a loss scaler skipped are left out.",
        (), _nonfinite,
    ),
    Regression(
        "PD806", "lost-updates-increased", Severity.ERROR,
        "More of a weight's intended updates leave it unchanged than in the baseline.",
        (_option("lost_share", 0.1, "fraction", "Largest increase.", _OWN, 1.0),),
        _Share(lambda s: s.lost_share, ("update",), "lost_share"),
    ),
    Regression(
        "PD807", "tensors-missing", Severity.WARNING,
        "Tensors of the baseline do not occur in the run, so nothing was compared there.",
        (_option("missing_share", 0.05, "fraction", "Largest share of the baseline's tensors.", _OWN, 1.0),),
        _tensors,
    ),
    Regression(
        "PD808", "dtype-changed", Severity.WARNING,
        "A tensor is stored in another dtype than in the baseline.",
        (), _dtypes,
    ),
)  # fmt: skip


def findings_of(lines: Sequence[Line]) -> list[Finding]:
    """One finding per regression: its worst line, the others as evidence."""
    failed: dict[str, list[Line]] = {}
    for line in lines:
        if not line.passed:
            failed.setdefault(line.check, []).append(line)
    return [_finding(group) for group in failed.values()]


def _finding(lines: Sequence[Line]) -> Finding:
    line = max(lines, key=lambda candidate: candidate.severity.weight)
    code, _, name = line.check.partition(" ")
    more = f" {plural(len(lines) - 1, 'more subject')} above the limit." if len(lines) > 1 else ""
    evidence: dict[str, Any] = {
        "expected": line.numbers[1] if line.numbers[1] is not None else line.expected,
        "found": line.numbers[0] if line.numbers[0] is not None else line.found,
        "limit": line.limit,
        "subjects": [{"subject": x.subject, "expected": x.expected, "found": x.found} for x in lines[:16]],
    }
    return Finding(
        code=code,
        name=name,
        severity=line.severity,
        confidence=0.8,
        title=f"{name.replace('-', ' ')}: {line.subject}",
        message=f"{line.subject}: expected {line.expected}, found {line.found}, limit {line.limit}.{more}",
        location=line.location or Location(),
        evidence={**evidence, "confidence_reason": "one baseline run, no measured run-to-run spread"},
    )
