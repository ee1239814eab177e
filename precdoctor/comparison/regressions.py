"""The regressions (PD8xx): changes against a baseline that are large enough to matter and beyond the healthy spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from precdoctor.comparison.baseline import Expected, Learned
from precdoctor.comparison.lines import Line, location_of
from precdoctor.comparison.pairing import Pairing, subject
from precdoctor.comparison.rounding import deviations, same_start
from precdoctor.comparison.spread import OTHER_SEED_FACTOR, SINGLE_RUN_FACTOR, limit_factor
from precdoctor.comparison.steps import loss_window
from precdoctor.comparison.summary import METRICS, Metric, Summary
from precdoctor.diagnosis.claims.finding import Location, Phase, Severity
from precdoctor.diagnosis.claims.rule import Options, RuleOption, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import Key, known_format

#: Accepted probability that a healthy run fails by chance, over all comparisons with measured spreads together.
FALSE_ALARMS = 0.001
_METRIC = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True)
class Regression:
    """A check against another run.

    Attributes:
        doc: meaning and limits.
        compare: returns a line per subject, passed or failed; None if a command finds it in a way of its own.
        checked: when, and by which command.
    """

    code: str
    name: str
    severity: Severity
    doc: str
    options: tuple[RuleOption, ...] = ()
    compare: Callable[[Regression, Pairing, Options], list[Line]] | None = None
    checked: str = "Checked by gate with a baseline."

    @property
    def check(self) -> str:
        """Code and name, as in :attr:`.lines.Line.check`."""
        return f"{self.code} {self.name}"

    def lines(self, pairing: Pairing, options: Options) -> list[Line]:
        """The lines of ``compare``."""
        return [] if self.compare is None else self.compare(self, pairing, options)


@dataclass(frozen=True)
class _MetricChange:
    """Fails a tensor if one of ``metrics`` moved by more than the option ``option`` and the healthy spread.

    ``direction``: 1: an increase is worse; -1: a decrease; 0: either. ``same_dtype``: skip if the dtype changed.
    """

    metrics: tuple[str, ...]
    option: str
    direction: int = 1
    same_dtype: bool = False

    def __call__(self, regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
        factor, repeats = significance(pairing), pairing.baseline.repeats
        lines = []
        for key, found, expected in pairing.common:
            if self.same_dtype and found.dtype != expected.dtype:
                continue  # the range changed with the dtype; PD808 reports that
            judged = [
                line
                for metric in (_METRIC[name] for name in self.metrics)
                if (line := self._line(regression, metric, key, found, expected, options[self.option], factor, repeats))
            ]
            lines += [max(judged, key=lambda line: line.excess)] if judged else []
        return lines

    def _line(
        self,
        regression: Regression,
        metric: Metric,
        key: Key,
        found: Summary,
        expected: Expected,
        least: float,
        factor: float,
        repeats: int,
    ) -> Line | None:
        learned, value = expected.metrics.get(metric.name), metric.of(found)
        if learned is None or value is None:
            return None
        limit = max(least, factor * learned.spread)
        moved = value - learned.center
        excess = (abs(moved) if self.direction == 0 else moved * self.direction) / limit
        sign = {1: "+", -1: "-", 0: "±"}[self.direction]
        return Line(
            regression.check,
            subject(key),
            _expected_words(metric, learned, repeats),
            _value_words(metric, value),
            sign + (percent(limit) if metric.unit == "fraction" else f"{limit:.3g} binades"),
            excess <= 1.0,
            regression.severity,
            location_of(key, module_class=expected.module_class),
            (value, learned.center),
            excess,
            math.inf if expected.order is None else expected.order,
        )


def significance(pairing: Pairing, comparisons: int | None = None) -> float:
    """The allowed distance of a figure from the baseline's centre, in spreads; large for one run from another seed.

    ``comparisons`` is their number; None: one for every metric of every tensor.
    """
    if pairing.baseline.repeats < 2:
        return SINGLE_RUN_FACTOR if same_start(pairing) is not None else OTHER_SEED_FACTOR
    if comparisons is None:
        comparisons = sum(len(e.metrics) for _, _, e in pairing.common)
    return limit_factor(pairing.baseline.repeats, comparisons, FALSE_ALARMS)


def _value_words(metric: Metric, value: float) -> str:
    if metric.name.startswith("rms"):
        return f"{value:.4g} binades"
    return f"{value:.1f} binades" if metric.unit == "binades" else percent(value)


def _expected_words(metric: Metric, learned: Learned, repeats: int) -> str:
    """The centre, followed by the spread if there are several repeats to measure it."""
    center = _value_words(metric, learned.center)
    if repeats < 2:
        return center
    if metric.unit == "fraction":
        return f"{center} ± {percent(learned.spread)}"
    return f"{center.removesuffix(' binades')} ± {learned.spread:.2g} binades"


def _headroom(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """Lost headroom is a warning; an error if little headroom is left, and passed if much is left."""
    lines = _MetricChange(("headroom",), "binades", -1, same_dtype=True)(regression, pairing, options)
    return [line if line.passed else _graded_by_headroom(line, options) for line in lines]


def _graded_by_headroom(line: Line, options: Options) -> Line:
    left, far = line.numbers[0], options["far"]
    if left is None or left < options["near"]:
        return line if left is None else replace(line, severity=Severity.ERROR)
    return replace(line, passed=True, excess=0.0, limit=f"{far:g} binades left") if left > far else line


def _loss(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """Compares the median loss of the last quarter of the steps; one non-finite loss that the baseline lacks fails."""
    place = Location(phase=Phase.LOSS, kind="loss")
    if broken := sorted(pairing.bad_losses):
        found = f"not finite on {plural(len(broken), 'step')}, first {broken[0]}"
        return [
            Line(regression.check, "loss", "finite", found, "0 steps", False, regression.severity, place,
                 excess=math.inf, position=0.0)
        ]  # fmt: skip
    learned, loss = pairing.baseline.loss, pairing.loss
    if learned is None or loss is None:
        return []
    window = loss_window(pairing.steps)
    least = max(options["nats"], options["relative"] * abs(learned.center))
    allowed = max(least, significance(pairing, 1) * learned.spread)
    excess = (loss - learned.center) / allowed
    return [
        Line(
            regression.check,
            f"loss, median of steps {window[0]} to {window[-1]}",
            f"{learned.center:.4g}",
            f"{loss:.4g}",
            f"+{allowed:.2g}",
            excess <= 1.0,
            regression.severity,
            place,
            (loss, learned.center),
            excess,
        )
    ]


def _nonfinite(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """One line, for the first tensor with a kind of non-finite value that it does not have in the baseline."""
    del options  # the limit is zero
    new = [(a.first_bad_step or 0, k, a) for k, a, b in pairing.common if a.badness - b.badness]
    if not new:
        return [Line(regression.check, "all tensors", "0 new", "0 new", "0", True, regression.severity)]
    step, key, _ = min(new, key=lambda n: n[0])
    found = f"{plural(len(new), 'tensor')}, first at step {step}"
    place = location_of(key, step)
    return [
        Line(regression.check, subject(key), "finite", found, "0", False, regression.severity, place, excess=math.inf)
    ]


def _one_sided(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """One line on the tensors that only the baseline has, or only the run, so that nothing was compared there."""
    [(option, allowed)] = options.items()
    word, found, expected = option.removesuffix("_share"), pairing.found.keys(), pairing.expected.keys()
    keys = sorted(expected - found if word == "missing" else found - expected)
    share = len(keys) / max(1, len(expected))
    example = f", such as {subject(keys[0])}" if keys else ""
    return [
        Line(
            regression.check,
            f"tensors{example}",
            f"{len(expected):,}",
            f"{len(found):,} ({len(keys):,} {word})",
            f"{percent(allowed)} {word}",
            share <= allowed,
            regression.severity,
            location_of(keys[0]) if keys else Location(),
            (float(len(keys)), 0.0),
            share / allowed if allowed else (math.inf if keys else 0.0),
        )
    ]


def _dtypes(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """One line for each change of dtype, on the first tensor in execution order that has it."""
    del options  # any change counts
    changes: dict[tuple[str, str], list[tuple[float, Key, Expected]]] = {}
    for key, found, expected in pairing.common:
        if found.dtype != expected.dtype:
            position = math.inf if expected.order is None else float(expected.order)
            changes.setdefault((expected.dtype, found.dtype), []).append((position, key, expected))
    if not changes:
        return [Line(regression.check, "all tensors", "0 changed", "0 changed", "0", True, regression.severity)]
    lines = []
    for (old, new), tensors in changes.items():
        position, key, expected = min(tensors, key=lambda t: t[0])
        more = f" and {plural(len(tensors) - 1, 'more tensor')}" if len(tensors) > 1 else ""
        place = location_of(key, module_class=expected.module_class)
        severity = Severity.ERROR if _narrower(new, old) else Severity.WARNING
        lines.append(
            Line(regression.check, f"{subject(key)}{more}", old, new, "no change", False, severity, place,
                 excess=math.inf if severity is Severity.ERROR else 1.5, position=position)
        )  # fmt: skip
    return lines


def _narrower(new: str, old: str) -> bool:
    """Return whether dtype ``new`` has less precision or a smaller range than ``old``; False if either is unknown."""
    a, b = known_format(new), known_format(old)
    return a is not None and b is not None and (a.mantissa_bits < b.mantissa_bits or a.max < b.max)


def _skipped(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """One line on the share of steps that a loss scaler skipped."""
    learned = pairing.baseline.skipped
    limit = max(options["skipped_share"], significance(pairing, 1) * learned.spread)
    excess = (pairing.skipped - learned.center) / limit
    place = Location(phase=Phase.OPTIMIZER)
    return [
        Line(
            regression.check, f"steps skipped by the loss scaler, of {len(pairing.steps):,}", percent(learned.center),
            percent(pairing.skipped), f"+{percent(limit)}", excess <= 1.0, regression.severity, place,
            (pairing.skipped, learned.center), excess,
        )
    ]  # fmt: skip


def _rounding(regression: Regression, pairing: Pairing, options: Options) -> list[Line]:
    """One line, for the first tensor of the first step that differs by more than rounding; none for another start."""
    at = same_start(pairing)
    if at is None:
        return []
    found = list(deviations(pairing, at, options["growth"]))
    beyond = [d for d in found if d.excess > 1.0]
    shown = beyond[0] if beyond else max(found, key=lambda d: d.excess, default=None)
    if shown is None:
        return []
    more = f" and {plural(len(beyond) - 1, 'tensor')} after it" if len(beyond) > 1 else ""
    step = pairing.sampled[0]
    expected = pairing.expected[shown.key]
    return [
        Line(
            regression.check,
            f"{subject(shown.key)}, {shown.figure} at step {step}{more}",
            "equal up to rounding",
            f"{shown.error:.1e} apart (relative)",
            f"{shown.limit:.1e}",
            not beyond,
            regression.severity,
            location_of(shown.key, step, expected.module_class),
            (shown.error, 0.0),
            shown.excess if not beyond else math.inf,
            0.0,
        )
    ]


_OWN = "Precdoctor's own; the measured run-to-run spread counts where it is larger."

REGRESSIONS: tuple[Regression, ...] = (
    Regression(
        "PD801", "underflow-increased", Severity.ERROR,
        "More of a tensor's intended non-zero elements are rounded to zero than in the baseline.",
        (fraction("flushed_share", 0.02, "Least increase.", f"Half of PD201's own limit. {_OWN}"),),
        _MetricChange(("flushed",), "flushed_share"),
    ),
    Regression(
        "PD802", "saturation-increased", Severity.ERROR,
        "More of a tensor's elements sit at the dtype's largest value than in the baseline.",
        (fraction("at_max_share", 0.01, "Least increase.", f"Half of PD401's own limit. {_OWN}"),),
        _MetricChange(("saturated",), "at_max_share"),
    ),
    Regression(
        "PD803", "headroom-lost", Severity.WARNING,
        "A tensor's largest element came nearer to the dtype's limit; an error close to it, nothing far from it.",
        (
            RuleOption("binades", 3.0, "binades", "Least loss of headroom.", f"A factor of 8. {_OWN}"),
            RuleOption("near", 3.0, "binades", "With less headroom than this the loss is an error.", _OWN),
            RuleOption("far", 40.0, "binades", "With more headroom than this left, losing some is no regression.",
                    "All of FP16's range, subnormals included; FP32 and BF16 have 128 above 1."),
        ),
        _headroom,
    ),
    Regression(
        "PD804", "loss-increased", Severity.ERROR,
        "The loss of the last quarter of the common steps is higher, or non-finite where the baseline's was not.",
        (
            RuleOption("nats", 0.01, "nats", "Least increase, whatever the loss.", "The usual leading indicator."),
            RuleOption("relative", 0.05, "fraction", "Least increase relative to the baseline's loss.", _OWN),
        ),
        _loss,
    ),
    Regression(
        "PD805", "new-nonfinite-tensors", Severity.ERROR,
        "Tensors hold NaN or infinities where the baseline's do not; steps a loss scaler skipped are left out.",
        compare=_nonfinite,
    ),
    Regression(
        "PD806", "lost-updates-increased", Severity.ERROR,
        "More of a weight's intended updates leave it unchanged than in the baseline.",
        (fraction("lost_share", 0.1, "Least increase.", _OWN),),
        _MetricChange(("lost",), "lost_share"),
    ),
    Regression(
        "PD807", "tensors-missing", Severity.WARNING,
        "Tensors of the baseline do not occur in the run, so nothing was compared there.",
        (fraction("missing_share", 0.05, "Largest share of the baseline's tensors.", _OWN),),
        _one_sided,
    ),
    Regression(
        "PD808", "dtype-changed", Severity.ERROR,
        "A tensor is stored in another dtype than in the baseline; a warning if nothing is lost by it.",
        compare=_dtypes,
    ),
    Regression(
        "PD809", "tensors-new", Severity.WARNING,
        "Tensors occur in the run that the baseline does not have, so nothing is known of them.",
        (fraction("new_share", 0.05, "Largest number, as a share of the baseline's tensors.", _OWN),),
        _one_sided,
    ),
    Regression(
        "PD811", "magnitude-changed", Severity.ERROR,
        "A tensor's RMS lies outside the spread of the healthy repeats, over the run or on its first step.",
        (RuleOption("binades", 0.1, "binades", "Least change, either way.", f"7 %. {_OWN}"),),
        _MetricChange(("rms", "rms_first"), "binades", 0),
    ),
    Regression(
        "PD812", "zeros-increased", Severity.ERROR,
        "More of a gradient's elements are zero than in the healthy repeats.",
        (fraction("zero_share", 0.05, "Least increase.", _OWN),),
        _MetricChange(("zeros",), "zero_share"),
    ),
    Regression(
        "PD813", "rounding-increased", Severity.ERROR,
        "From the same weights and data, a tensor of the first step differs by more than rounding explains.",
        (
            RuleOption("growth", 5.0, "factor", "By how much rounding errors may grow between modules.",
                    "Measured in benchmarks/gating: other threads, libraries and kernels stayed below 0.85 of it."),
        ),
        _rounding,
    ),
    Regression(
        "PD814", "skipped-steps-increased", Severity.ERROR,
        "The loss scaler skips more steps than in the baseline.",
        (fraction("skipped_share", 0.1, "Least increase.", _OWN),),
        _skipped,
    ),
    Regression(
        "PD815", "limit-exceeded", Severity.ERROR,
        "A figure of a tensor is beyond a limit given with --fail-if.",
    ),
    Regression(
        "PD816", "allowance-expired", Severity.ERROR,
        "An entry of the allow-list is past its date: renew it with a reason, or remove what it allowed.",
    ),
)  # fmt: skip
