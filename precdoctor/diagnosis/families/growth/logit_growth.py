"""PD606: logits of attention, of the output or of a router that grow until their softmax is one-hot.

The histories of logits and loss are in :mod:`.logit_growth_histories`, learned scales in :mod:`.logit_growth_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.analyses.trends import Trend, fit
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.growth.logit_growth_histories import (
    ONE_HOT,
    LogitHistory,
    LossProgress,
    logit_histories,
    loss_progress,
)
from precdoctor.diagnosis.families.growth.logit_growth_scale import learned_scale_beyond, scale_finding
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Logits on the recorded steps, as the softmax reads them, that have grown beyond the needs of any softmax. Masked
positions do not count. Limits: `attention_limit` for the largest logit of an attention head, `output_limit` for the
magnitude of the operand of the loss's cross-entropy, `router_limit` for that of a router (a softmax followed by top-k).
The rule reports three states:

- *large*: logits above their limit on most of the newest recorded steps, and at least `growth` times their first size;
  attention logits also without growth, if at least `one_hot_heads` of the heads are as good as one-hot;
- *growing*: attention or router logits above `near` of their limit that rise on a straight line in log2 over the newer
  half of the steps, by at least a binade, in more than a single jump and without slackening, and reach the limit within
  `horizon` times the recorded steps;
- *collapsed*: the entropy of at least `one_hot_heads` of all heads of a layer has fallen below 5 % of the logarithm of
  the number of keys, from more than 20 % in the first steps, with logits above half their limit.

Retrieval, copying and routing need sharp attention, so the loss decides as well. It *stalls* if it is not a tenth lower
than in its first steps, or has lost a quarter of its progress. Collapsed heads, and heads that were one-hot from the
start, count only if it stalls. Large logits also count while it falls, if they still rise by a binade in the newer half
or are ten times their limit. With heads that were open at first and are one-hot now, twice the limit is enough where
the loss no longer falls. Growing logits count unless it fell by a tenth in the newer half. Nothing counts once it has
fallen to a tenth and stays there. Output logits must still be rising, or have been above their limit from the start,
with a loss that began at 8 times that of equal probabilities or more and has not come below a tenth of it: a
temperature that is too low, or inputs that are too large.

A learned *scale* of output logits (one parameter `s` whose exponential, magnitude or reciprocal stays above the largest
logit and near it, as for cosines) counts once it has passed `scale_limit` and still rises, whatever the loss does.
""",
    matters="""
A softmax depends on differences in nats. If one logit leads by 20, the others get 2e-9 of the weight and almost no
gradient: the head attends to one position and cannot learn any other. Growth feeds itself, because the gradient of
queries grows with keys and the reverse. The loss diverges long before a format overflows; in BF16, neighbours of 100
are also half a nat apart.
""",
    example="""
Attention without normalised queries and keys, at a high learning rate: largest logit 8 at step 0, 37 at step 20, 160 at
step 40, and all heads one-hot.

    scores = q @ k.transpose(-2, -1)   # and not divided by sqrt(d)
""",
    remedy="""
Attention: normalise queries and keys (qk-norm), rescale their weights when a logit passes 100 (qk-clip), divide by
sqrt(d), lower the learning rate of the query and key projections. Output: z-loss, soft-capping, weight decay on the
head. Router: router z-loss, FP32 logits. Clamp a learnt temperature.
""",
    confidence="""
0.8; 0.7 for a forecast and for outputs, which some trainings tolerate. In long sequences only some query positions are
measured, so the largest logit of all can be larger.
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
#: Least number of recorded steps for a verdict.
_MIN_POINTS = 8
#: Heads have collapsed if their relative entropy was above the first value, and their logits are now above the second,
#: a share of the limit. Chosen empirically.
_OPEN, _HALF = 0.2, 0.5
#: Logits that have grown beyond so many times their limit are reported whatever the loss does: no training needs them.
#: The literature reports divergence from 1,000 on.
_FAR = 10.0
#: Heads that became one-hot, with logits this many times their limit, are reported if the loss falls no more. Kimi K2
#: clips at half of it.
_CLOSED = 2.0
#: Output logits are confident and wrong if the loss is so many times that of equal probabilities, at first and at last.
_HOT, _STILL = 8.0, 0.1
#: Growth from which a title states it. Chosen empirically.
_VISIBLE = 1.5
#: Roles by importance.
_ROLES = ("attention", "router", "output")
#: Gemma 2's soft caps: of attention logits, and of those of the output.
_CAPS = {"attention": 50.0, "output": 30.0, "router": 30.0}
#: Coefficients of PaLM's z-loss (output) and ST-MoE's (router).
_Z_LOSS = {"output": 1e-4, "router": 1e-3}
#: Kimi K2's clip of attention logits.
_CLIP = 100.0
#: Assumed width of heads of unknown width: few are wider.
_WIDEST = 256


@dataclass(frozen=True)
class _Case:
    """The logits of one softmax; ``state``: large, growing or collapsed.

    ``one_hot``: share of heads as good as one-hot, median over the newest steps.
    """

    state: str
    history: LogitHistory
    limit: float
    trend: Trend | None
    one_hot: float

    @property
    def step(self) -> int:
        """The first recorded step at or above the limit, else the last recorded step."""
        above = self.history.steps[self.history.levels >= self.limit]
        return int(above[0] if above.size else self.history.steps[-1])


def check(view: RunView, options: Options) -> Checked:
    """One finding: attention before routers before outputs; of one role, the largest logits beside their limit."""
    histories = logit_histories(view)
    if not histories:
        return Checked.not_applicable("no softmax with a known use was recorded on a healthy step")
    longest = max(map(len, histories.values()))
    seen = plural(len(histories), "softmax")
    if longest < _MIN_POINTS:
        return Checked.not_applicable(f"{seen} on {plural(longest, 'step')}: too few for a trend")
    loss = loss_progress(view)
    cases = {k: case for k, h in histories.items() if (case := _case(h, options, loss)) is not None}
    if not cases:
        bound = options["scale_limit"]
        if scale := learned_scale_beyond(view, histories, bound, _MIN_POINTS):
            return Checked([scale_finding(RULE, scale, bound)], f"{seen}: a learned scale too large")
        largest = max(h.last for h in histories.values())
        return Checked((), f"{seen}: the largest logit is {largest:.3g}")
    key = min(cases, key=lambda k: (_ROLES.index(cases[k].history.role), -cases[k].history.last / cases[k].limit))
    return Checked([_finding(key, cases, loss)], f"{len(cases):,} of {seen}: logits too large")


def _limits(options: Options) -> dict[str, float]:
    attention, output, router = options["attention_limit"], options["output_limit"], options["router_limit"]
    return {"attention": attention, "output": output, "router": router}


def _case(history: LogitHistory, options: Options, loss: LossProgress) -> _Case | None:
    """Return what is wrong with the logits of a softmax; None if nothing is, or too few steps were recorded."""
    if len(history) < _MIN_POINTS:
        return None
    limit = _limits(options)[history.role]
    if history.role == "output" and history.shape and history.first >= limit and history.last >= limit:
        guess = math.log(max(history.shape[-1], 2))
        if loss.first >= _HOT * guess and loss.last >= _STILL * guess:
            return _Case("large", history, limit, None, 0.0)
    if loss.learnt:
        return None
    known, newest = history.levels > 0.0, history.levels[history.newest]
    trend = fit(list(zip(history.steps[known].tolist(), history.levels[known].tolist(), strict=True)))
    one_hot = float(np.median(history.one_hot[history.newest]))
    rising = trend is not None and trend.rises
    doubles = trend is not None and rising and trend.climbed >= 1.0
    above = 2 * int((newest >= limit).sum()) > newest.size
    grown = history.grown >= options["growth"]
    if history.role == "output":
        return _Case("large", history, limit, trend, one_hot) if above and grown and rising else None
    sharp = history.role == "attention" and one_hot >= options["one_hot_heads"]
    heads = np.concatenate(history.heads[:4])
    opened = bool(heads.size) and float(np.median(heads)) > _OPEN
    closed = sharp and opened and not loss.falls and history.last >= _CLOSED * limit
    harms = loss.stalls or (grown and (doubles or closed or history.last >= _FAR * limit))
    if above and (grown or sharp) and harms:
        return _Case("large", history, limit, trend, one_hot)
    if doubles and trend is not None and grown and 2.0**trend.level >= options["near"] * limit and not loss.falls:
        recorded = int(history.steps[-1] - history.steps[0])
        if trend.steps_to(limit).estimate <= options["horizon"] * recorded:
            return _Case("growing", history, limit, trend, one_hot)
    if sharp and opened and grown and history.last >= _HALF * limit and loss.stalls:
        return _Case("collapsed", history, limit, trend, one_hot)
    return None


def _finding(key: Key, cases: Mapping[Key, _Case], loss: LossProgress) -> Finding:
    case = cases[key]
    history, trend = case.history, case.trend
    begun, last = history.steps[[0, -1]].tolist()
    place, role = key[1] or key[0] or "the loss", history.role
    slope = trend.slope if trend is not None and trend.low > 0.0 else None
    gone = f"from {history.first:.3g} at step {begun} to {history.last:.3g} at step {last}"
    words = [f"The largest {role} logit of `{place}` went {gone} (limit {case.limit:g})."]
    if slope is not None:
        words.append(f"It grows by a factor of {2.0**slope:.3g} per step.")
    if case.state == "growing" and trend is not None:
        words.append(f"At this rate it passes {case.limit:g} in {trend.steps_to(case.limit).estimate:,.0f} steps.")
    if role == "attention" and len(history.heads[-1]):
        words.append(f"{percent(case.one_hot)} of its {plural(len(history.heads[-1]), 'head')} are as good as one-hot.")
    from_the_start = role == "output" and trend is None
    if from_the_start:
        even = math.log(max(history.shape[-1], 2))
        words.append(f"The loss began at {loss.first:.3g}; equal probabilities would give {even:.3g}.")
    if len(cases) > 1:
        words.append(f"{plural(len(cases), 'softmax')} in all.")
    title = f"{role} logits of `{place}` have grown from {history.first:.3g} to {history.last:.3g}"
    if case.state == "collapsed":
        title = f"attention of `{place}` has collapsed: {percent(case.one_hot)} of its heads are one-hot"
    elif history.grown < _VISIBLE:
        title = f"{role} logits of `{place}` are {history.last:.3g}{' from the start' if from_the_start else ''}"
    evidence = {
        "state": case.state,
        "role": role,
        "max_logit": history.last,
        "max_logit_at_first": history.first,
        "limit": case.limit,
        "one_hot_heads": case.one_hot,
        "one_hot_below": ONE_HOT,
        "growth_per_step": 2.0**slope if slope is not None else None,
        "last_bad_step": last,
        "loss_fell_to_a_tenth": loss.learnt,
        "loss_stalls": loss.stalls,
        "logits": history.as_evidence(),
        "tensors": [
            {"root": k[0], "module": k[1], "kind": k[2], "name": k[3], "call": k[4], "role": c.history.role,
             "max_logit": c.history.last}
            for k, c in sorted(cases.items(), key=lambda item: -item[1].history.last)[:16]
        ],
        "confidence_reason": "a forecast" if case.state == "growing" else "logits measured as the softmax reads them",
    }  # fmt: skip
    phase = Phase.LOSS if role == "output" else Phase.FORWARD
    return RULE.finding(
        confidence=0.7 if case.state == "growing" or role == "output" else 0.8,
        title=title,
        message=" ".join(words),
        location=Location(key[0], key[1], history.module_class or None, "logits", phase, 0, case.step),
        evidence=evidence,
        prescriptions=(_smaller_start(key, history),) if from_the_start else _prescriptions(key, history, slope),
    )


# -- prescriptions, with the largest logit that each would leave ------------------------------------------------------


def _prescriptions(key: Key, history: LogitHistory, slope: float | None) -> tuple[Prescription, ...]:
    """Return the changes for the role of a softmax, the most certain first; ``slope``: in binades per step."""
    level = history.last
    if history.role == "attention":
        slower = () if slope is None else (_rate(key, slope),)
        return (_norm(key, history, level), _clip(key, level), *slower)
    return (_z_loss(key, history, level), _cap(key, history, level))


def _predicted(level: float, to: float) -> dict[str, dict[str, float]]:
    return {"max_logit": {"from": float(f"{level:.4g}"), "to": float(f"{to:.4g}")}}


def _norm(key: Key, history: LogitHistory, level: float) -> Prescription:
    """Prescribe qk-norm: with queries and keys of RMS 1 and the usual scale no logit exceeds the root of the width."""
    known = key[3].startswith("sdpa") and len(history.shape) == 4  # the shape of a query; otherwise of the scores
    width = history.shape[-1] if known else _WIDEST
    to = min(level, math.sqrt(width))
    heads = "" if known else f" in heads up to {_WIDEST} wide"
    return Prescription(
        title=f"normalise queries and keys per head (qk-norm) and divide scores by the root of the width: largest "
        f"logit {level:.3g} -> {to:.3g} at gain 1{heads}",
        change={"module": key[1], "qk_norm": "rms"},
        predicted=_predicted(level, to),
        snippet=(
            "import torch.nn.functional as F\n\n"
            f"# in {module_expression(key[1])}, before the scores; with a learnt gain per head in front\n"
            "q = F.rms_norm(q, q.shape[-1:])\n"
            "k = F.rms_norm(k, k.shape[-1:])\n"
        ),
    )


def _clip(key: Key, level: float) -> Prescription:
    factor = math.sqrt(min(1.0, _CLIP / level))
    to = min(level, _CLIP)
    words = f"now by {factor:.3g}, " if factor < 1.0 else ""
    return Prescription(
        title=f"scale the query and key weights down whenever a logit exceeds {_CLIP:g} (qk-clip): {words}"
        f"largest logit {level:.3g} -> {to:.3g}",
        change={"module": key[1], "qk_clip": _CLIP, "factor": factor},
        predicted=_predicted(level, to),
        snippet=(
            "import torch\n\n"
            f"# after optimizer.step(), on both projections of {module_expression(key[1])}; also on biases\n"
            "with torch.no_grad():\n"
            "    for projection in (query_projection, key_projection):\n"
            f"        projection.weight *= min(1.0, {_CLIP!r} / largest_logit) ** 0.5\n"
        ),
    )


def _rate(key: Key, slope: float) -> Prescription:
    """Prescribe a tenth of the rate: Adam's steps are as large as its rate, so the slope falls to a tenth."""
    now = 100.0 * slope
    return Prescription(
        title=f"a tenth of the learning rate for the query and key projections: {now:.3g} -> {now / 10.0:.2g} binades "
        "per 100 steps",
        change={"module": key[1], "lr_factor": 0.1, "parameters": "query and key projections"},
        predicted={"binades_per_100_steps": {"from": float(f"{now:.3g}"), "to": float(f"{now / 10.0:.3g}")}},
        snippet=(
            "import torch\n\n"
            "slow = [*query_projection.parameters(), *key_projection.parameters()]\n"
            "known = {id(p) for p in slow}\n"
            "rest = [p for p in model.parameters() if id(p) not in known]\n"
            "optimizer = torch.optim.AdamW([{'params': rest}, {'params': slow, 'lr': lr / 10}], lr=lr)\n"
        ),
    )


def _z_loss(key: Key, history: LogitHistory, level: float) -> Prescription:
    weight = _Z_LOSS[history.role]
    added = weight * level**2
    return Prescription(
        title=f"add a z-loss, {weight:g} times the squared logsumexp: about {added:.2g} at logits of {level:.3g}",
        change={"module": key[1], "z_loss": weight},
        predicted={"loss_added": float(f"{added:.3g}")},
        snippet=f"loss = loss + {weight!r} * logits.float().logsumexp(-1).square().mean()\n",
    )


def _cap(key: Key, history: LogitHistory, level: float) -> Prescription:
    cap = _CAPS[history.role]
    to = cap * math.tanh(level / cap)
    return Prescription(
        title=f"cap the logits softly at {cap:g}: {level:.3g} -> {to:.3g}",
        change={"module": key[1], "logit_cap": cap},
        predicted=_predicted(level, to),
        snippet=f"import torch\n\nlogits = {cap!r} * torch.tanh(logits / {cap!r})\n",
    )


def _smaller_start(key: Key, history: LogitHistory) -> Prescription:
    to = _CAPS[history.role]
    factor = history.first / to
    return Prescription(
        title=f"begin with logits {factor:.2g} times smaller, by a higher temperature, a smaller start of the last "
        f"layer or normalised vectors: largest logit {history.first:.3g} -> {to:g}",
        change={"module": key[1], "logits_factor": float(f"{1.0 / factor:.3g}")},
        predicted=_predicted(history.first, to),
        snippet=f"logits = logits / {factor:.2g}\n",
    )


def same_logits(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` is about logits too coarse for their format, or lies in the softmax's module."""
    if "spacing_nats" in effect.evidence:
        return True
    place, inside = cause.location.module, effect.location.module or ""
    same_root = cause.location.root == effect.location.root
    return bool(place) and same_root and (inside == place or inside.startswith(f"{place}."))


RULE = Rule(
    code="PD606",
    name="logit-growth",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("attention_limit", 100.0, "nats", "Largest attention logit.",
                   "Kimi K2 clips at 100; ViT-22B and Wortsman et al. report divergence from 50 to 10,000 on."),
        RuleOption("output_limit", 110.0, "nats", "Largest magnitude of the cross-entropy's operand.",
                   "CLIP trains well at its clamped temperature of 100; plus a tenth. Gemma 2 caps at 30."),
        RuleOption("router_limit", 50.0, "nats", "Largest magnitude of a router's logits.",
                   "Chosen empirically; ST-MoE's z-loss keeps them near 10."),
        RuleOption("growth", 4.0, "times", "Minimum growth of the logits since the first four recorded steps.",
                   "Chosen empirically: a large temperature by design is no growth.", 1.0),
        RuleOption("scale_limit", 100.0, "times", "Largest learned scale of output logits.",
                   "CLIP clamps it to 100, for the sake of stability (arXiv:2103.00020, section 2.5)."),
        fraction("near", 0.3, "Share of the limit from which growth is forecast.",
                 "Chosen empirically: attention logits up to 20 or 30 are common in trained models."),
        RuleOption("horizon", 1.0, "times the run", "Maximum range of a forecast.",
                   "Chosen empirically: growth early in training levels off."),
        fraction("one_hot_heads", 0.75, "Minimum share of a layer's heads that are as good as one-hot.",
                 "Chosen empirically: single heads that copy a position are sharp in every trained model."),
    ),
    explains=when(same_logits, "PD208", "PD601", "PD602"),
    check=check,
)  # fmt: skip
