"""PD602: activations that grow towards the limit of their format, with a forecast of when they reach it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.growth.coarse_logits import CoarseLogits, coarse_logits, spacing
from precdoctor.diagnosis.families.growth.wider_format import widening
from precdoctor.diagnosis.survey.histories import History, forward_histories
from precdoctor.diagnosis.survey.rows import Key, TensorRow, known_format, path_evidence, path_to, range_evidence
from precdoctor.diagnosis.survey.trends import Trend, fit
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Inputs and outputs of modules whose largest magnitude grows exponentially and is already within `max_headroom` binades
of the largest number of their format. Fit: a straight line through log2(amax) over the newer half of the recorded
steps; its slope must be above zero with 95 % certainty (residuals taken as autocorrelated at lag one), must not have
slackened to less than half the slope of the whole run, and the line must have climbed `min_growth` binades. The
forecast is the headroom over the slope, and its interval comes from the slope's. It is given only where it looks no
further ahead than `horizon` times what was recorded: the fast growth of the first steps of any run levels off.

Logits have a limit of their own, far below the largest number: what a softmax reads, in BF16 or FP16, when it has grown
to `logit_growth` times its size at first and neighbours in its format are `logit_spacing` nats or more apart (from 256
on in BF16, from 2048 on in FP16) on half of the newest eight recorded steps. Deep scans tell which outputs these are.
""",
    matters="""
Attention logits, residual streams and gated products that drift upwards are finite until the step at which they are
not; then the loss is NaN and the last days of training are to be repeated. A straight line in log2 tells the day.

A softmax sees differences of logits only. Where the format rounds each of them by up to a nat, probabilities are wrong
by a factor of e, and the softmax is as good as one-hot: it passes almost no gradient back.
""",
    example="""
Attention logits without query-key normalisation at a high learning rate: amax 4,100 at step 200, 8,300 at step 300.
One binade per 100 steps; 65504 comes at about step 600.
""",
    remedy="""
Stop the growth at its source: normalise queries and keys, cap or regularise logits (z-loss), lower the learning rate or
raise weight decay on the named layer. Running the module in FP32 or BF16 takes the limit away but not the growth.
Attention logits want the division by sqrt(d); a learnt temperature wants a clamp.
""",
    confidence="""
0.85; 0.7 when the interval of the forecast spans more than a factor of four or fewer than 24 steps were fitted, and for
logits: some runs end well with a one-hot softmax.
""",
    references=(
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, arXiv:2309.14322",
        "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, arXiv:2302.05442 (QK normalisation)",
        "Gemma Team, Gemma 2, arXiv:2408.00118, section 2 (logit soft-capping, 50 for attention)",
    ),
)


#: Where Gemma 2 caps the logits of attention.
_CAP = 50.0


def check(view: RunView, options: Options) -> Checked:
    """One finding: the tensor that reaches its limit first."""
    histories = forward_histories(view)
    if not histories:
        return Checked.not_applicable("no activation was recorded on a healthy step")
    longest = max(len(h.amax) for h in histories.values())
    seen = plural(len(histories), "activation")
    if longest < 2 * options["min_points"]:
        return Checked((), f"{seen} on {plural(longest, 'step')}, too few for a trend")
    growing: dict[Key, Trend] = {}
    for key, history in histories.items():
        trend = _growing(history, options)
        if trend is not None:
            growing[key] = trend
    coarse = {} if growing else coarse_logits(view, options["logit_spacing"], options["logit_growth"])
    if coarse:
        finding = _coarse_finding(coarse, options)
        return Checked([finding], f"{plural(len(coarse), 'output')} of {seen}: logits too large for their format",
                       Status.FAILED)  # fmt: skip
    if not growing:
        return Checked((), f"{seen}: none grows within {options['max_headroom']:g} binades of its limit")
    key = min(growing, key=lambda k: growing[k].steps_to(_limit(histories[k]))[1])
    finding = _finding(view, key, histories[key], growing, options)
    return Checked([finding], f"{len(growing):,} of {seen} grow into their limit", Status.FAILED)


def _limit(history: History) -> float:
    fmt = known_format(history.dtype)
    return fmt.max if fmt is not None else math.inf


def _growing(history: History, options: Options) -> Trend | None:
    points = history.points()
    if len(points) < 2 * options["min_points"] or history.at_max:
        return None
    if history.headroom(max(a for _, a in points[-8:])) > options["max_headroom"]:
        return None
    trend = fit(points)
    if trend is None or trend.low <= 0.0 or trend.climbed < options["min_growth"]:
        return None
    if trend.slope < 0.5 * trend.overall:
        return None
    recorded = points[-1][0] - points[0][0]
    return trend if trend.steps_to(_limit(history))[1] <= options["horizon"] * recorded else None


def _finding(view: RunView, key: Key, history: History, growing: Mapping[Key, Trend], options: Options) -> Finding:
    trend, limit = growing[key], _limit(history)
    points = history.points()
    step, amax = points[-1]
    soonest, expected, latest = trend.steps_to(limit)
    until = f"{soonest:,.0f} to {latest:,.0f}" if math.isfinite(latest) else f"{soonest:,.0f} or more"
    rows = next((r for p in view.processes if (r := view.rows(p, step))), ())
    row = next((r for r in rows if r.key == key), None)
    label = row.label if row is not None else f"`{key[1] or key[0]}` {key[2]}"
    message = (
        f"{label[0].upper()}{label[1:]} ({history.dtype}) grows by a factor of {2.0 ** (100.0 * trend.slope):.3g} per "
        f"100 steps: amax {points[0][1]:.4g} at step {points[0][0]}, {amax:.4g} at step {step}, "
        f"{history.headroom(amax):.1f} binades below {limit:g} (limit {options['max_headroom']:g}). At this rate it "
        f"overflows in {expected:,.0f} steps (95 %: {until}), about step {step + round(expected):,}. "
        f"{plural(len(growing), 'tensor')} on such a course."
    )
    wide = latest > 4.0 * max(soonest, 1.0)
    evidence = {
        "binades_per_100_steps": 100.0 * trend.slope,
        "slope_interval": [100.0 * trend.low, 100.0 * trend.high],
        "steps_to_overflow": expected,
        "steps_to_overflow_interval": [soonest, latest],
        "amax": amax,
        "headroom_binades": history.headroom(amax),
        "limit": options["max_headroom"],
        "points_fitted": trend.points,
        "history": history.as_evidence(),
        "tensors": [
            {"root": k[0], "module": k[1], "kind": k[2], "binades_per_100_steps": 100.0 * t.slope}
            for k, t in sorted(growing.items(), key=lambda item: -item[1].slope)[:16]
        ],
        "confidence_reason": "a straight line in log2 over the newer half of the steps"
        + (", with a wide interval" if wide else ""),
    }
    if row is not None:
        forward = [r for r in rows if r.kind in ("batch", "input", "output")]
        evidence |= {"range": range_evidence(row), "path": path_evidence(path_to(forward, row))}
    return RULE.finding(
        confidence=0.7 if wide or trend.points < 24 else 0.85,
        title=f"{label} grows into {history.dtype}'s limit: overflow in about {expected:,.0f} steps",
        message=message,
        location=Location(key[0], key[1], history.module_class or None, key[2], Phase.FORWARD, 0, step),
        evidence=evidence,
        prescriptions=(_prescribe(view, key, history, trend, expected, rows),),
    )


def _coarse_finding(coarse: Mapping[Key, CoarseLogits], options: Options) -> Finding:
    key = max(coarse, key=lambda k: coarse[k].spacing * coarse[k].last)
    logits = coarse[key]
    history, place = logits.history, key[1] or key[0]
    step = history.points()[-1][0]
    capped = spacing(history.dtype, _CAP)
    message = (
        f"The logits `{place}` hands to a softmax are {history.dtype} and have grown from {logits.first:.3g} to "
        f"{logits.last:.3g} ({logits.last / logits.first:.2g} times, limit {options['logit_growth']:g}). Neighbours in "
        f"{history.dtype} are {logits.spacing:g} nats apart there (limit {options['logit_spacing']:g}): rounding alone "
        f"changes a probability by up to {math.exp(logits.spacing / 2.0):.2g} times. "
        f"{plural(len(coarse), 'such output')} in all."
    )
    return RULE.finding(
        confidence=0.7,
        title=f"the logits of `{place}` have grown to {logits.last:.3g}, where {history.dtype} is {logits.spacing:g} "
        "nats coarse",
        message=message,
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
            "confidence_reason": "a softmax of as many elements follows it; what the rounding costs is not measured",
        },
        prescriptions=(
            Prescription(
                title=f"cap the logits softly at {_CAP:g}: spacing {logits.spacing:g} -> {capped:g} nats",
                change={"module": key[1], "logit_cap": _CAP},
                predicted={"spacing_nats": {"from": logits.spacing, "to": capped}},
                snippet=(
                    "import torch\n\n"
                    f"logits = {_CAP!r} * torch.tanh(logits / {_CAP!r})  # and divide attention's by sqrt(d) before\n"
                ),
            ),
        ),
    )


def _prescribe(
    view: RunView, key: Key, history: History, trend: Trend, expected: float, rows: Sequence[TensorRow]
) -> Prescription:
    change = widening(rows, key, history.dtype, view.device)
    later = trend.steps_to(change.to.max)[1]
    return Prescription(
        title=f"{change.title} for now: steps to overflow {expected:,.0f} -> {later:,.0f} at the same rate",
        change=change.change,
        predicted={"steps_to_overflow": {"from": round(expected), "to": round(later)}},
        snippet=change.snippet,
    )


RULE = Rule(
    code="PD602",
    name="activation-growth",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("max_headroom", 5.0, "binades", "Only tensors this near their limit are judged.",
                   "Chosen empirically: activations of 2,048 and more; healthy ones in FP16 rarely pass 1,000."),
        RuleOption("min_growth", 0.5, "binades", "Climbed by the line over the newer half of the steps.",
                   "Chosen empirically: below it a forecast rests on noise."),
        RuleOption("min_points", 6.0, "steps", "Recorded steps in the newer half, at least.",
                   "A line and its error need a few points.", 4.0),
        RuleOption("horizon", 4.0, "times the run", "Forecasts that look further ahead than this are not made.",
                   "Chosen empirically: growth early in training levels off."),
        RuleOption("logit_spacing", 2.0, "nats", "Distance of neighbours in the format of the logits, at their amax.",
                   "Half of it is the rounding error: one nat changes a probability by a factor of e.", 0.0),
        RuleOption("logit_growth", 4.0, "times",
                   "How much larger than in the first four recorded steps the logits must be.",
                   "Chosen empirically: a large temperature that was chosen is no growth.", 1.0),
    ),
    kinds=("input", "output"),
    columns=("dtype", "amax", "at_max"),
    check=check,
)  # fmt: skip
