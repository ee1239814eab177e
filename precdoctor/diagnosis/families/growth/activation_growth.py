"""PD602: activations that grow towards the limit of their format, with a forecast of when they reach it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.analyses.histories import History, forward_histories
from precdoctor.diagnosis.analyses.op_dtypes import op_dtypes
from precdoctor.diagnosis.analyses.parameters import HALF
from precdoctor.diagnosis.analyses.scans import Fact, Group, check_facts, short_name
from precdoctor.diagnosis.analyses.trends import Trend, fit
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import same_module, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.growth.wider_format import widening
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, Key, TensorRow, grouped, tensor_evidence
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Inputs and outputs of modules whose largest magnitude grows exponentially and is already within `max_headroom` binades
of the largest number of their format. The rule fits a straight line through log2(amax) over the newer half of the
recorded steps. Its slope must be above zero with 95 % certainty (for residuals autocorrelated at lag one) and at least
half the slope of the whole run, and the line must have climbed `min_growth` binades. A series that jumped once, so that
two constants fit it far better than the line, has no trend. The forecast is the headroom over the slope, and its
interval comes from the slope's. It may look ahead at most `horizon` times the recorded steps: the fast growth of the
first steps of any run levels off.

Logits have their own limit, far below the format's largest number. The operand of a softmax in BF16 or FP16 counts if
it has grown to `logit_growth` times its initial size and its neighbours in the format are at least `logit_spacing`
nats apart (from 256 on in BF16, from 2048 on in FP16), on half of the newest eight recorded steps. Deep scans show
which outputs these are.

Weights that the script itself multiplies by a number above 1 on every scanned step (a decay with the wrong sign) count
if that makes them `amplified` times as large over the run, whatever the gradient does.
""",
    matters="""
Attention logits, residual streams and gated products that drift upwards stay finite until one step; then the loss is
NaN and the last days of training are lost. A straight line in log2 predicts that day.

A softmax depends only on differences of logits. If the format rounds each of them by up to a nat, probabilities are
wrong by a factor of e, and the softmax is as good as one-hot: it passes almost no gradient back.
""",
    example="""
Attention logits without query-key normalisation at a high learning rate: amax 4,100 at step 200, 8,300 at step 300.
One binade per 100 steps; 65504 comes at about step 600.
""",
    remedy="""
Stop the growth at its source: normalise queries and keys, cap or regularise logits (z-loss), lower the learning rate or
raise weight decay on the named layer. FP32 or BF16 for the module removes the limit but not the growth. Divide
attention logits by sqrt(d), and clamp a learnt temperature.
""",
    confidence="""
0.85; 0.7 if the interval of the forecast spans more than a factor of four or fewer than 24 steps were fitted, and for
logits: some runs end well with a one-hot softmax.
""",
    references=(
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, arXiv:2309.14322",
        "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, arXiv:2302.05442 (QK normalisation)",
        "Gemma Team, Gemma 2, arXiv:2408.00118, section 2 (logit soft-capping, 50 for attention)",
    ),
)
#: Number of recorded steps at the start and at the end of a history whose medians are compared; chosen empirically.
_FIRST, _NEWEST = 4, 8
#: Gemma 2's soft cap of attention logits.
_CAP = 50.0
_SOFTMAX = ("softmax", "log_softmax", "softmax_backward_data", "log_softmax_backward_data", "logsumexp")


def check(view: RunView, options: Options) -> Checked:
    """One finding: weights that are multiplied up, else the first tensor to reach its limit, else coarse logits."""

    def guilty(fact: Fact) -> float:
        """Return the weight's growth over the run; 0 below the limit."""
        factor = _growth_over_run(view, fact)
        return factor if factor >= options["amplified"] else 0.0

    multiplied = check_facts(
        view, ("amplified",), guilty, lambda g: _amplified_finding(view, g, options), seen="no weight is multiplied up",
        keep=lambda g: g.stands,
    )  # fmt: skip
    if multiplied.findings:
        return multiplied
    histories = forward_histories(view)
    if not histories:
        return Checked.not_applicable("no activation was recorded on a healthy step")
    longest = max(len(h.amax) for h in histories.values())
    seen = plural(len(histories), "activation")
    if longest < 2 * options["min_points"]:
        return Checked.not_applicable(f"{seen} on {plural(longest, 'step')}: too few for a trend")
    growing = {k: trend for k, h in histories.items() if (trend := _amax_trend(h, options)) is not None}
    coarse = {} if growing else _coarse_logits(view, options)
    if coarse:
        reason = f"{plural(len(coarse), 'output')} of {seen}: logits too large for their format"
        return Checked([_coarse_finding(coarse, options)], reason)
    if not growing:
        return Checked((), f"{seen}: none grows within {options['max_headroom']:g} binades of its limit")
    key = min(growing, key=lambda k: growing[k].steps_to(histories[k].fmt.max).estimate)
    finding = _finding(view, key, histories[key], growing, options)
    return Checked([finding], f"{len(growing):,} of {seen} grow into their limit")


def _growth_over_run(view: RunView, fact: Fact) -> float:
    """Return the factor per step to the power of the run's steps; at most e^700."""
    return math.exp(min(700.0, (view.last_step + 1) * math.log(max(fact.number("factor"), 1.0))))


def _amplified_finding(view: RunView, group: Group, options: Options) -> Finding:
    fact, whole = group.worst, _growth_over_run(view, group.worst)
    factor, name = fact.number("factor"), str(fact.data.get("name"))
    less = f"{1.0 / factor:.6g}"
    return group.finding(
        RULE,
        title=f"{fact.short} multiplies weights (`{name}`) by {factor:.6g} on every step{fact.line}: {whole:.3g} times "
        f"over {plural(view.last_step + 1, 'step')}",
        message=f"{fact.op_words} multiplies the weight by {factor:.6g}, whatever its gradient. Over the run that is a"
        f" factor of {whole:.3g} (limit {options['amplified']:g}). Decay shrinks weights; this grows them."
        f"{group.elsewhere_words}",
        certain=(0.9, "the factor was measured on the weight itself"),
        limits={"amplified": options["amplified"]},
        prescription=Prescription(
            title=f"turn the sign{fact.own_line}: factor per step {factor:.6g} -> {less}",
            change={"factor_per_step": {"from": factor, "to": 1.0 / factor}, "op": fact.op},
            predicted={"growth_over_run": {"from": whole, "to": 1.0 / whole}},
            snippet=f"weight.mul_({less})  # weight decay shrinks\n",
        ),
    )


def _amax_trend(history: History, options: Options) -> Trend | None:
    """Return the trend of amax; None unless it is near its format's limit and reaches it within `horizon`."""
    points = history.points()
    if len(points) < 2 * options["min_points"] or history.at_max:
        return None
    if history.fmt.headroom(max(a for _, a in points[-_NEWEST:])) > options["max_headroom"]:
        return None
    trend = fit(points)
    if trend is None or not trend.rises or trend.climbed < options["min_growth"]:
        return None
    recorded = points[-1][0] - points[0][0]
    return trend if trend.steps_to(history.fmt.max).estimate <= options["horizon"] * recorded else None


def _finding(view: RunView, key: Key, history: History, growing: Mapping[Key, Trend], options: Options) -> Finding:
    trend, limit = growing[key], history.fmt.max
    points = history.points()
    step, amax = points[-1]
    left, headroom = trend.steps_to(limit), history.fmt.headroom(amax)
    rows = view.any_rows(step)
    row = next((r for r in rows if r.key == key), None)
    label = row.label if row is not None else f"`{key[1] or key[0]}` {key[2]}"
    return RULE.finding(
        confidence=0.7 if left.is_wide or trend.is_short else 0.85,
        title=f"{label} grows into {history.dtype}'s limit: overflow in about {left.estimate:,.0f} steps",
        message=f"{label[0].upper()}{label[1:]} ({history.dtype}) grows by a factor of "
        f"{2.0 ** (100.0 * trend.slope):.3g} per 100 steps: amax {points[0][1]:.4g} at step {points[0][0]}, {amax:.4g} "
        f"at step {step}. That is {headroom:.1f} binades below {limit:g} (limit {options['max_headroom']:g}). At this "
        f"rate it overflows in {left.estimate:,.0f} steps (95 %: {left.interval_words}), about step "
        f"{step + round(left.estimate):,}. {plural(len(growing), 'tensor')} with such a trend.",
        location=Location(key[0], key[1], history.module_class or None, key[2], Phase.FORWARD, 0, step),
        evidence={
            "binades_per_100_steps": 100.0 * trend.slope,
            "slope_interval": [100.0 * trend.low, 100.0 * trend.high],
            "steps_to_overflow": left.estimate,
            "steps_to_overflow_interval": [left.low, left.high],
            "amax": amax,
            "headroom_binades": headroom,
            "limit": options["max_headroom"],
            "points_fitted": trend.points,
            "history": history.as_evidence(),
            "tensors": [
                {"root": k[0], "module": k[1], "kind": k[2], "binades_per_100_steps": 100.0 * t.slope}
                for k, t in sorted(growing.items(), key=lambda item: -item[1].slope)[:16]
            ],
            "confidence_reason": left.reason,
            **tensor_evidence(row, [r for r in rows if r.kind in FORWARD_KINDS]),
        },
        prescription=_prescribe(view, key, history, trend, rows),
    )


def _prescribe(view: RunView, key: Key, history: History, trend: Trend, rows: Sequence[TensorRow]) -> Prescription:
    change = widening(rows, key, history.dtype, view.device)
    expected, later = (trend.steps_to(fmt.max).estimate for fmt in (history.fmt, change.to))
    effect = f" for now: steps to overflow {expected:,.0f} -> {later:,.0f} at the same rate"
    return change.prescription(effect, {"steps_to_overflow": {"from": round(expected), "to": round(later)}})


# -- logits too coarse for a softmax ----------------------------------------------------------------------------------
#
# A softmax depends on differences of logits, in nats. Rounding moves a logit by up to half the spacing of its format,
# and the probability by a factor of e to that power: at a spacing of 2 nats, by a factor of e.


@dataclass(frozen=True)
class _CoarseLogits:
    """Logits whose format is too coarse at their amax.

    Attributes:
        first, last: median amax over the first recorded steps, and over those of the newest with a wide spacing.
        spacing: distance of neighbours in the format at ``last``, in nats.
    """

    history: History
    first: float
    last: float
    spacing: float


def _spacing(history: History, magnitude: float) -> float:
    """Distance of neighbours in the format at ``magnitude``, one ulp."""
    return 2.0 ** (math.floor(math.log2(magnitude)) - history.fmt.mantissa_bits)


def _coarse_logits(view: RunView, options: Options) -> Mapping[Key, _CoarseLogits]:
    """Return logits that have grown, with neighbours `logit_spacing` or more apart on most of the newest steps."""
    found = {}
    for key, history in _logits(view).items():
        points = [amax for _, amax in history.points()]
        if len(points) < 2 * _NEWEST:
            continue
        wide = [a for a in points[-_NEWEST:] if _spacing(history, a) >= options["logit_spacing"]]
        first = median(points[:_FIRST])
        if 2 * len(wide) >= _NEWEST and median(wide) >= options["logit_growth"] * first:
            found[key] = _CoarseLogits(history, first, median(wide), _spacing(history, median(wide)))
    return found


def _logits(view: RunView) -> dict[Key, History]:
    """Half-precision outputs that a softmax reads: deep scans show where softmaxes run and on how many elements.

    For each softmax this is the last output with as many elements inside the softmax's module, or of the whole model if
    it runs in the loss code.
    """
    softmaxes = [op for op in op_dtypes(view) if short_name(op.op) in _SOFTMAX and op.calls]
    sizes = grouped(((op.root, op.module), op.elements // op.calls) for op in softmaxes)
    histories = forward_histories(view)
    found: dict[Key, History] = {}
    for (root, module), wanted in sizes.items():
        inside = f"{module}." if module else ""
        near = [
            k
            for k, h in histories.items()
            if k[2] == "output" and h.dtype in HALF and h.numel in wanted
            if not root or (k[0] == root and (k[1] == module or k[1].startswith(inside)))
        ]
        if near:
            last = max(near, key=lambda k: histories[k].order)
            found[last] = histories[last]
    return found


def _coarse_finding(coarse: Mapping[Key, _CoarseLogits], options: Options) -> Finding:
    key = max(coarse, key=lambda k: coarse[k].spacing * coarse[k].last)
    logits = coarse[key]
    history, place = logits.history, key[1] or key[0]
    step = history.points()[-1][0]
    capped = _spacing(history, _CAP)
    return RULE.finding(
        confidence=0.7,
        title=f"the logits of `{place}` have grown to {logits.last:.3g}, where {history.dtype} resolves only "
        f"{logits.spacing:g} nats",
        message=f"The {history.dtype} logits from `{place}` to a softmax have grown from {logits.first:.3g} to "
        f"{logits.last:.3g} ({logits.last / logits.first:.2g} times, limit {options['logit_growth']:g}). Neighbours in "
        f"{history.dtype} are {logits.spacing:g} nats apart there (limit {options['logit_spacing']:g}). Rounding alone "
        f"changes a probability by up to {math.exp(logits.spacing / 2.0):.2g} times. "
        f"{plural(len(coarse), 'such output')} in all.",
        location=Location(key[0], key[1], history.module_class or None, key[2], Phase.FORWARD, 0, step),
        evidence={
            "amax": logits.last,
            "amax_at_first": logits.first,
            "spacing_nats": logits.spacing,
            "limit": options["logit_spacing"],
            "history": history.as_evidence(),
            "tensors": [
                {"root": k[0], "module": k[1], "kind": k[2], "spacing_nats": c.spacing} for k, c in coarse.items()
            ],
            "confidence_reason": "a softmax of as many elements follows it; the cost of the rounding is not measured",
        },
        prescription=Prescription(
            title=f"cap the logits softly at {_CAP:g}: spacing {logits.spacing:g} -> {capped:g} nats",
            change={"module": key[1], "logit_cap": _CAP},
            predicted={"spacing_nats": {"from": logits.spacing, "to": capped}},
            snippet=(
                "import torch\n\n"
                f"logits = {_CAP!r} * torch.tanh(logits / {_CAP!r})  # divide attention logits by sqrt(d) before\n"
            ),
        ),
    )


RULE = Rule(
    code="PD602",
    name="activation-growth",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("max_headroom", 5.0, "binades", "Maximum headroom of an evaluated tensor.",
                   "Chosen empirically: FP16 activations from 2,048 on; healthy ones rarely exceed 1,000."),
        RuleOption("min_growth", 0.5, "binades", "Minimum climb of the line over the newer half of the steps.",
                   "Chosen empirically: below it a forecast rests on noise."),
        RuleOption("min_points", 6.0, "steps", "Minimum number of recorded steps in the newer half.",
                   "A line and its error need a few points.", 4.0),
        RuleOption("horizon", 4.0, "times the run", "Maximum range of a forecast.",
                   "Chosen empirically: growth early in training levels off."),
        RuleOption("logit_spacing", 2.0, "nats", "Distance of neighbours in the format of the logits, at their amax.",
                   "Half of it is the rounding error: one nat changes a probability by a factor of e.", 0.0),
        RuleOption("logit_growth", 4.0, "times", "Minimum growth of the logits since the first four recorded steps.",
                   "Chosen empirically: a large temperature by design is no growth.", 1.0),
        RuleOption("amplified", 2.0, "times", "Least growth over the run of weights that the script multiplies up.",
                   "Twice the weights, by no gradient.", 1.0),
    ),
    explains=when(same_module, "PD406", "PD601"),
    check=check,
)  # fmt: skip
