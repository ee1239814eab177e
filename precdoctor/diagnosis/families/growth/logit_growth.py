"""PD606: logits of attention, of the output or of a router that grow until their softmax is one-hot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.growth.logit_growth_histories import (
    ONE_HOT,
    LogitHistory,
    LossCourse,
    logit_histories,
    loss_course,
)
from precdoctor.diagnosis.families.growth.logit_prescriptions import cures
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.trends import Trend, fit
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Logits, as softmaxes read them on the recorded steps, that have grown beyond what any softmax needs. Masked positions do
not count. Limits: `attention_limit` for the largest logit of an attention head, `output_limit` for the magnitude of
what the loss's cross-entropy reads, `router_limit` for that of a router (a softmax that chooses by top-k). Reported is

- *large*: above its limit on most of the newest recorded steps, and `growth` times its first size or more; for
  attention also without growth, where at least `one_hot_heads` of the heads are as good as one-hot;
- *growing*: attention or router logits above `near` of their limit whose newer half rises on a straight line in log2 by
  a binade or more, has not slackened, and reaches the limit within `horizon` times the recorded steps;
- *collapsed*: the entropy of at least `one_hot_heads` of all heads of a layer has fallen below 5 % of the logarithm of
  the number of keys, after more than 20 % in the first steps, with logits above half their limit.

Sharp attention is what retrieval, copying and routing learn, so the loss is asked as well. It *stalls* where it is not
a tenth lower than in its first steps, or has lost a quarter of what it had gained. Collapsed heads, and heads that were
one-hot from the start, are reported only where it stalls; large logits also while it falls, when they still rise by a
binade in the newer half, or are ten times their limit; growing ones unless it fell by a tenth in the newer half.
Nothing is said where it has fallen to a tenth or less and stays there. Output logits must still be rising.
""",
    matters="""
A softmax sees differences in nats. Where one logit leads by 20, the others get 2e-9 of the weight and next to no
gradient: the head attends to one position and cannot learn any other. Growth feeds itself, because the gradient of
queries grows with keys and the reverse. The loss diverges long before a format overflows; in BF16 logits of 100 are
also half a nat coarse.
""",
    example="""
Attention without normalised queries and keys, at a high learning rate: largest logit 8 at step 0, 37 at step 20, 160 at
step 40, and all heads one-hot.

    scores = q @ k.transpose(-2, -1)   # and not divided by sqrt(d)
""",
    remedy="""
Attention: normalise queries and keys (qk-norm), rescale their weights when a logit passes 100 (qk-clip), divide by
sqrt(d), lower the learning rate of the query and key projections. Output: z-loss, soft-capping, weight decay on the
head. Router: router z-loss, FP32 logits. A temperature that is learnt wants a clamp.
""",
    confidence="""
0.8; 0.7 for a forecast and for outputs, which some trainings bear. Of long sequences some query positions are measured,
so that the largest logit of all can be larger.
""",
    references=(
        "Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, arXiv:2302.05442 (qk-norm)",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, arXiv:2309.14322",
        "Kimi Team, Kimi K2, arXiv:2507.20534 (qk-clip at 100)",
        "Gemma Team, Gemma 2, arXiv:2408.00118, section 2 (soft-capping: attention at 50, output at 30)",
        "Chowdhery et al., PaLM, arXiv:2204.02311, section 5 (z-loss)",
        "Zoph et al., ST-MoE, arXiv:2202.08906 (router z-loss)",
        "Zhai et al., Stabilizing Transformer Training by Preventing Attention Entropy Collapse, arXiv:2303.06296",
    ),
)
#: Recorded steps without which nothing is said.
_MIN_POINTS = 8
#: Relative entropy that heads had at first, and the part of the limit that collapsed logits are above.
_OPEN, _HALF = 0.2, 0.5
#: Times its limit: no logits that grew there are what a training wants. Divergence is reported from 1,000 on.
_FAR = 10.0
_WHAT = {"attention": "attention", "output": "output", "router": "router"}


@dataclass(frozen=True)
class _Case:
    """How the logits of one softmax went wrong: large, growing or collapsed."""

    what: str
    history: LogitHistory
    limit: float
    trend: Trend | None
    one_hot: float

    @property
    def step(self) -> int:
        """The first recorded step above the limit; of a forecast, the last."""
        points = self.history.points()
        return next((p.step for p in points if p.level >= self.limit), points[-1].step)


def check(view: RunView, options: Options) -> Checked:
    """One finding: attention before routers before outputs, the largest beside its limit first."""
    histories = logit_histories(view)
    if not histories:
        return Checked.not_applicable("no softmax whose use is known was recorded on a healthy step")
    longest = max(len(h.points()) for h in histories.values())
    seen = plural(len(histories), "softmax")
    if longest < _MIN_POINTS:
        return Checked((), f"{seen} on {plural(longest, 'step')}, too few for a trend")
    loss = loss_course(view)
    cases = {k: case for k, h in histories.items() if (case := _case(h, options, loss)) is not None}
    if not cases:
        largest = max(h.last for h in histories.values())
        return Checked((), f"{seen}: the largest logit is {largest:.3g}")
    order = ("attention", "router", "output")
    key = min(cases, key=lambda k: (order.index(cases[k].history.role), -cases[k].history.last / cases[k].limit))
    finding = _finding(key, cases, loss)
    return Checked([finding], f"{len(cases):,} of {seen}: logits too large", Status.FAILED)


def _limits(options: Options) -> dict[str, float]:
    return {
        "attention": options["attention_limit"],
        "output": options["output_limit"],
        "router": options["router_limit"],
    }


def _case(history: LogitHistory, options: Options, loss: LossCourse) -> _Case | None:
    points, newest = history.points(), history.newest()
    if len(points) < _MIN_POINTS or loss.learnt:
        return None
    limit = _limits(options)[history.role]
    trend = fit([(p.step, p.level) for p in points if p.level > 0.0])
    one_hot = median(p.one_hot for p in newest)
    rising = trend is not None and trend.low > 0.0 and trend.slope >= 0.5 * trend.overall
    doubles = rising and trend is not None and trend.climbed >= 1.0
    above = 2 * sum(p.level >= limit for p in newest) > len(newest)
    grown = history.grown >= options["growth"]
    if history.role == "output":
        return _Case("large", history, limit, trend, one_hot) if above and grown and rising else None
    sharp = history.role == "attention" and one_hot >= options["one_hot_heads"]
    harms = loss.stalls or (grown and (doubles or history.last >= _FAR * limit))
    if above and (grown or sharp) and harms:
        return _Case("large", history, limit, trend, one_hot)
    if doubles and trend is not None and grown and 2.0**trend.level >= options["near"] * limit and not loss.falls:
        recorded = points[-1].step - points[0].step
        if trend.steps_to(limit)[1] <= options["horizon"] * recorded:
            return _Case("growing", history, limit, trend, one_hot)
    heads = [h for p in points[:4] for h in p.heads]
    opened = bool(heads) and median(heads) > _OPEN
    if sharp and opened and grown and history.last >= _HALF * limit and loss.stalls:
        return _Case("collapsed", history, limit, trend, one_hot)
    return None


def _finding(key: Key, cases: Mapping[Key, _Case], loss: LossCourse) -> Finding:
    case = cases[key]
    history, trend = case.history, case.trend
    points, last = history.points(), history.newest()[-1]
    place, what = key[1] or key[0] or "the loss", _WHAT[history.role]
    slope = trend.slope if trend is not None and trend.low > 0.0 else None
    first = (
        f"The largest {what} logit of `{place}` went from {history.first:.3g} at step {points[0].step} to "
        f"{history.last:.3g} at step {points[-1].step} (limit {case.limit:g})."
    )
    words = [first]
    if slope is not None:
        words.append(f"It grows by a factor of {2.0**slope:.3g} per step.")
    if case.what == "growing" and trend is not None:
        words.append(f"At this rate it passes {case.limit:g} in {trend.steps_to(case.limit)[1]:,.0f} steps.")
    if history.role == "attention" and last.heads:
        words.append(f"{percent(case.one_hot)} of its {plural(len(last.heads), 'head')} are as good as one-hot.")
    if len(cases) > 1:
        words.append(f"{plural(len(cases), 'softmax')} in all.")
    title = f"{what} logits of `{place}` have grown from {history.first:.3g} to {history.last:.3g}"
    if case.what == "collapsed":
        title = f"attention of `{place}` has collapsed: {percent(case.one_hot)} of its heads are one-hot"
    elif history.grown < 1.5:
        title = f"{what} logits of `{place}` are {history.last:.3g}"
    evidence = {
        "state": case.what,
        "role": history.role,
        "max_logit": history.last,
        "max_logit_at_first": history.first,
        "limit": case.limit,
        "one_hot_heads": case.one_hot,
        "one_hot_below": ONE_HOT,
        "growth_per_step": 2.0**slope if slope is not None else None,
        "last_bad_step": points[-1].step,
        "loss_fell_to_a_tenth": loss.learnt,
        "loss_stalls": loss.stalls,
        "logits": history.as_evidence(),
        "tensors": [
            {"root": k[0], "module": k[1], "kind": k[2], "name": k[3], "call": k[4], "role": c.history.role,
             "max_logit": c.history.last}
            for k, c in sorted(cases.items(), key=lambda item: -item[1].history.last)[:16]
        ],
        "confidence_reason": "a forecast" if case.what == "growing" else "logits measured as the softmax reads them",
    }  # fmt: skip
    phase = Phase.LOSS if history.role == "output" else Phase.FORWARD
    return RULE.finding(
        confidence=0.7 if case.what == "growing" or history.role == "output" else 0.8,
        title=title,
        message=" ".join(words),
        location=Location(key[0], key[1], history.module_class or None, "logits", phase, 0, case.step),
        evidence=evidence,
        prescriptions=cures(key, history, slope),
    )


RULE = Rule(
    code="PD606",
    name="logit-growth",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("attention_limit", 100.0, "nats", "Largest attention logit.",
                   "Kimi K2 clips at 100; ViT-22B and Wortsman et al. report divergence from 50 to 10,000 on."),
        RuleOption("output_limit", 110.0, "nats", "Largest magnitude of what the cross-entropy reads.",
                   "CLIP's clamped temperature reaches 100, and trains well; a tenth on top. Gemma 2 caps at 30."),
        RuleOption("router_limit", 50.0, "nats", "Largest magnitude of a router's logits.",
                   "Chosen empirically; ST-MoE's z-loss keeps them near 10."),
        RuleOption("growth", 4.0, "times", "How much larger than in the first four recorded steps the logits must be.",
                   "Chosen empirically: a large temperature that was chosen is no growth.", 1.0),
        RuleOption("near", 0.3, "fraction", "Part of its limit from which growth is forecast.",
                   "Chosen empirically: attention logits up to 20 or 30 are common in trained models.", maximum=1.0),
        RuleOption("horizon", 1.0, "times the run", "Forecasts that look further ahead than this are not made.",
                   "Chosen empirically: growth early in training levels off."),
        RuleOption("one_hot_heads", 0.75, "fraction", "Heads of a layer that are as good as one-hot.",
                   "Chosen empirically: single heads that copy a position are sharp in every trained model.",
                   maximum=1.0),
    ),
    kinds=("logits",),
    columns=("amax",),
    check=check,
)  # fmt: skip
