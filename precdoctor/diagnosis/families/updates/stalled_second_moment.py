"""PD505: Adam's second moment is kept in a format in which it cannot decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from precdoctor.diagnosis.advice.wide_weights import widened_bytes
from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.analyses.optimizer_states import excess, second_moments
from precdoctor.diagnosis.analyses.parameters import ADAM, HALF, beta2_of, parameter_groups, stepped_in_half
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.snippets import group_option
from precdoctor.diagnosis.claims.words import memory, plural
from precdoctor.diagnosis.survey.measures import column, unscaling
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import format_of_dtype

PAGE = RulePage(
    finds="""
A second moment kept in BF16 or FP16 with 1 - beta2 below half an ulp of that format: 0.001 against 2^-9 = 0.002 in
BF16. Then `v * beta2` rounds back to `v`, and a new squared gradient is added only when it is at least twice `v`: the
second moment goes up and never comes down. Its format is that of the recorded state; without such rows, that of the
weights under torch's Adam and AdamW. The cost is measured: the mean of `v` over its mean in exact arithmetic on the
recorded gradients. The finding is a warning when sqrt(v) is `fallen` times too large, so that steps are too small by
that factor, and information below. Without recorded state the fall of the gradient norm since its peak stands in.
""",
    matters="""
Adam's step is the gradient over sqrt(v). With `v` stuck at the largest gradient ever seen, usually that of the first
steps or of one spike, every later step is too small by the ratio of the two, for the rest of the run.
""",
    example="""
    model = model.bfloat16()
    torch.optim.AdamW(model.parameters(), betas=(0.9, 0.999))  # v never decays
    torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))   # 0.01 is above half an ulp: it does
""",
    remedy="""
Keep weights and moments in FP32 and compute in BF16 under autocast. If memory forbids it, take beta2 at or below the
value in the finding, or an optimizer that keeps its state in FP32 or rounds it stochastically.
""",
    confidence="""
0.95 where the state was recorded, else 0.9: format, beta2 and optimizer class are facts of the run, and without the
state only torch's own Adam and AdamW are judged; others may keep it wider.
""",
    references=(
        "Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192",
        "PyTorch source: torch/optim/adam.py (exp_avg_sq = zeros_like(parameter))",
    ),
)


#: Factor on sqrt(v) below which the message states no cost; chosen empirically.
_NOTICEABLE = 1.5


@dataclass(frozen=True)
class _Narrow:
    """The second moments in the 16-bit format with most elements."""

    dtype: str
    #: Element count by full name of the parameter.
    weights: Mapping[str, int]
    #: Recorded sqrt(v) over that of exact arithmetic, median over weights; None if it is unknown.
    measured: float | None = None


def check(view: RunView, options: Options) -> Checked:
    """One finding for the narrow format with most elements."""
    groups = parameter_groups(view) if second_moments(view).of else parameter_groups(view, ADAM.__contains__)
    betas = [b for g in groups if (b := beta2_of(g)) is not None]
    beta2 = max(betas, default=0.0)
    # without recorded state: torch's Adam keeps its moments in the format of the weight
    narrow = _recorded_moments(view, beta2) or _Narrow(*stepped_in_half(view))
    if not betas or not narrow.weights:
        return Checked.not_applicable("no second moment of Adam's kind in BF16 or FP16")
    limit = format_of_dtype(narrow.dtype).ulp_at_one / 4.0  # half an ulp of the largest number of a binade
    if 1.0 - beta2 >= limit:
        return Checked((), f"1 - beta2 = {1.0 - beta2:.3g} is above half an ulp of {narrow.dtype}, {limit:.3g}")
    steps = max((len(s) for s in view.timeline.values()), default=0)
    if steps < options["min_steps"]:
        return Checked((), f"{plural(steps, 'step')}: nothing had to decay yet")
    finding = _finding(view, narrow, beta2, limit, options)
    return Checked([finding], f"the second moments of {plural(len(narrow.weights), 'weight')} cannot decay")


def _recorded_moments(view: RunView, beta2: float) -> _Narrow | None:
    """Return the 16-bit moments of the recorded state; None if no second moment of Adam's kind was recorded."""
    moments = second_moments(view)
    held, gradient = moments.held, moments.gradient
    names, dtypes, numel, steps = (held[c].to_numpy() for c in ("state", "dtype", "numel", "step"))
    known = {owner: rows for owner, rows in moments.of.items() if names[rows[-1]].endswith("exp_avg_sq")}
    if not known:
        return None
    of = {d: {owner: rows for owner, rows in known.items() if dtypes[rows[-1]] == d} for d in HALF}
    dtype = max(HALF, key=lambda d: sum(numel[rows[-1]] for rows in of[d].values()))
    means = np.nan_to_num(column(held, "sum")) / numel
    squares = np.nan_to_num(column(gradient, "sum_sq")) / column(gradient, "numel") / unscaling(gradient) ** 2
    every = (excess(steps[rows], means[rows], squares[rows], beta2) for rows in of[dtype].values())
    factors = [e for e in every if e is not None]
    return _Narrow(
        dtype,
        {".".join(filter(None, owner)): int(numel[rows[-1]]) for owner, rows in of[dtype].items()},
        math.sqrt(median(factors)) if factors else None,
    )


def _norm_fall(view: RunView) -> tuple[float, float, float]:
    """Return peak and present norm of the optimizer whose gradient norm fell most, and their ratio (1 if unknown)."""
    falls = [(0.0, 0.0, 1.0)]
    for steps in by_optimizer(view).values():
        norms = [s.grad_norm for s in steps if s.grad_norm and not s.skipped]
        if len(norms) >= 8 and (present := median(norms[-8:])) > 0.0:
            falls.append((max(norms), present, max(norms) / present))
    return max(falls, key=lambda fall: fall[2])


def _finding(view: RunView, narrow: _Narrow, beta2: float, limit: float, options: Options) -> Finding:
    peak, present, fall = _norm_fall(view)
    dtype, weights = narrow.dtype, narrow.weights
    ratio = fall if narrow.measured is None else narrow.measured
    elements = sum(weights.values())
    better = 1.0 - 2.0 * limit
    message = (
        f"Adam's second moments of {plural(len(weights), 'weight')} ({elements:,} elements) are {dtype}, and 1 - beta2 "
        f"= {1.0 - beta2:.3g} is below half an ulp of it (limit {limit:.3g}): v * beta2 rounds back to v, which grows "
        "and never decays. "
    )
    if ratio < _NOTICEABLE:
        message += "The cost depends on how far the gradients fall from here."
    elif narrow.measured is None:
        message += (
            f"The gradient norm has come down from {peak:.3g} to {present:.3g}; steps are up to {ratio:.3g} times "
            "smaller than Adam intends."
        )
    else:
        message += (
            f"Against the recorded gradients, sqrt(v) is {ratio:.3g} times too large in the median weight: steps are "
            "that much smaller than Adam intends."
        )
    return RULE.finding(
        severity=Severity.WARNING if ratio >= options["fallen"] else Severity.INFO,
        confidence=0.9 if narrow.measured is None else 0.95,
        title=f"Adam's second moment cannot decay in {dtype}: beta2 {beta2:g} is within half an ulp of 1",
        message=message,
        location=Location(root=next(iter(weights)).split(".", 1)[0], phase=Phase.OPTIMIZER),
        evidence={
            "one_minus_beta2": 1.0 - beta2,
            "limit": limit,
            "dtype": dtype,
            "weights": len(weights),
            "elements": elements,
            "grad_norm": {"peak": peak, "present": present},
            "step_too_small_by": ratio,
            "confidence_reason": "format, beta2 and optimizer class are facts of the run"
            if narrow.measured is None
            else "the state was recorded and compared with the gradients that went into it",
        },
        prescription=Prescription(
            title=f"beta2 {better:.4g} (smallest change), or FP32 weights and moments "
            f"(+{memory(widened_bytes(view, elements))})",
            change={"beta2": {"from": beta2, "to": round(better, 6)}},
            predicted={"decay_of_v_per_step": {"from": 0.0, "to": round(1.0 - better, 6)}},
            snippet=group_option("betas", f"(group['betas'][0], {better:.4f})"),
        ),
    )


RULE = Rule(
    code="PD505",
    name="stalled-second-moment",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        RuleOption("fallen", 4.0, "times",
                   "Factor on sqrt(v) from which the finding is a warning; without state, fall of the gradient norm.",
                   "Chosen empirically: steps a quarter of their size are worth a change.", 1.0),
        RuleOption("min_steps", 8.0, "steps", "Shorter runs have nothing to decay.", minimum=1.0),
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
