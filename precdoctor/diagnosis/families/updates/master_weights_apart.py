"""PD508: 16-bit weights that are not their FP32 master copies rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.frames import Ints, courses, finite, pairs
from precdoctor.diagnosis.survey.measures import Floats, column, format_values, share
from precdoctor.diagnosis.survey.rows import Parameter, dotted, tensor_location, text
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
16-bit weights that are not their FP32 master copies rounded. Both are recorded at the same moment before the
optimizer's step. Their sums, or sums of squares, differ by more than rounding every element by `ulps` ulps could
explain, on each of the last `min_steps` recorded steps. Rounding to nearest moves an element by half an ulp, stochastic
rounding by up to one. Or they differ now and then, on `min_undone` steps or more, and are equal on the recorded steps
before and after each: something sets the weight, and the next step writes the master over it.
""",
    matters="""
The optimizer trains the master, and the model computes with the weight. If a parameter is never copied back, or was
loaded or changed after its master was made, the gradient is applied to other numbers than those it was computed from:
the layer is trained blindly, and its checkpoint is not the model that was evaluated. What is set in the weight alone
(codes that are drawn anew, a projection, a pruning mask) lasts for one step.
""",
    example="""
    masters = [p.detach().float().clone() for p in model.parameters()]
    ...
    for p, master in zip(model.head.parameters(), masters):  # the body is never copied back
        p.data.copy_(master)
""",
    remedy="""
Copy every master into its weight after each step, and make the masters after the checkpoint has been loaded. Code that
sets weights must set their masters as well.
""",
    confidence="""
0.95: rounding cannot do that. 0.8 where they differ now and then, because a weight may be disturbed for one step on
purpose. Masters are recognised by their values at the first recorded step.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1 (FP32 master copy of weights)",
    ),
)
_COLUMNS = ("module_class", "dtype", "numel", "nan", "pos_inf", "neg_inf", "sum", "sum_sq")


@dataclass(frozen=True)
class _Pair:
    """A weight and its master copy on the recorded steps, ascending.

    ``ulps``: lower bound, in ulps, of the largest relative difference between their elements, per step.
    """

    module_class: str
    dtype: str
    process: Process
    steps: Ints
    ulps: Floats

    def least(self, steps: int) -> float:
        """Smallest value of ``ulps`` on the last ``steps`` recorded steps."""
        return float(self.ulps[-steps:].min())

    def undone(self, limit: float) -> Ints:
        """Return steps on which they differ by more than ``limit`` ulps, but not on the recorded steps around each."""
        apart = self.ulps > limit
        return self.steps[1:-1][apart[1:-1] & ~apart[:-2] & ~apart[2:]]


def check(view: RunView, options: Options) -> Checked:
    """One finding: the weight furthest from its master; else the one that most often differs for one step only."""
    pairs = _survey(view)
    if not pairs:
        return Checked.not_applicable("no FP32 master copy of a 16-bit weight was recorded")
    steps = int(options["min_steps"])
    apart = {p: pair for p, pair in pairs.items() if pair.steps.size >= steps and pair.least(steps) > options["ulps"]}
    seen = f"{plural(len(pairs), '16-bit weight')} and their master copies"
    if apart:
        return Checked([_finding(apart, len(pairs), options)], f"{len(apart):,} of {seen} differ")
    undone = {p: pair for p, pair in pairs.items() if pair.undone(options["ulps"]).size >= options["min_undone"]}
    if undone:
        return Checked([_undone_finding(undone, options)], f"{len(undone):,} of {seen} differ now and then")
    return Checked((), f"{seen}: equal up to rounding")


def _survey(view: RunView) -> dict[Parameter, _Pair]:
    """Return each weight that has a master copy; steps on which the weight is not in 16 bits are left out."""
    if not view.places("master_weight"):
        return {}
    frame = view.measured((), ("weight", "master_weight"), columns=_COLUMNS)
    known = frame[finite(frame) & frame["sum"].notna() & frame["sum_sq"].notna()]
    weights, masters = pairs(known, "weight", "master_weight")
    ulps, step = _ulps(weights, masters), weights["step"].to_numpy()
    comparable = (format_values(weights, "bits") == 16) & (column(weights, "numel") == column(masters, "numel"))
    return {
        place: _Pair(text(module_class), dtype, process, step[own := rows[comparable[rows]]], ulps[own])
        for place, process, (module_class, dtype), rows in courses(weights, ("module_class", "dtype"))
    }


def _ulps(weights: pd.DataFrame, masters: pd.DataFrame) -> Floats:
    """Lower bound, in ulps, of the largest relative difference between the elements of a weight and of its master.

    Elements off by at most ``e |x|`` change the sum by at most ``e sum|x| <= e sqrt(n sum(x^2))`` and the sum of
    squares by at most ``2 e`` times the larger of the two.
    """
    (total, other), (squares, others) = ([column(f, c) for f in (weights, masters)] for c in ("sum", "sum_sq"))
    largest = np.maximum(squares, others)
    of_sums = share(np.abs(total - other), np.sqrt(largest * column(weights, "numel")))
    of_squares = share(np.abs(squares - others), largest) / 2.0
    return np.nan_to_num(np.maximum(of_sums, of_squares) / format_values(weights, "ulp_at_one"))


def _finding(apart: Mapping[Parameter, _Pair], total: int, options: Options) -> Finding:
    steps = int(options["min_steps"])
    place = max(apart, key=lambda p: apart[p].least(steps))
    pair = apart[place]
    last, ulps = int(pair.steps[-1]), float(pair.ulps[-1])
    name = dotted(*place[1:])
    return RULE.finding(
        confidence=0.95,
        title=f"`{name}` is not its FP32 master copy rounded: {ulps:.2g} ulps apart",
        message=f"At step {last} `{name}` ({pair.dtype}) and its FP32 master copy differ by {ulps:.3g} ulps of every "
        f"element or more, as their sums show, and on the last {plural(steps, 'recorded step')} by "
        f"{pair.least(steps):.3g} or more (limit {options['ulps']:g}). The optimizer changes the master, and the model "
        f"computes with the other. {plural(len(apart), 'weight')} of {total:,} affected.",
        location=tensor_location(place, pair.module_class, "master_weight", Phase.OPTIMIZER, pair.process, last),
        evidence={
            "ulps_apart": ulps,
            "limit": options["ulps"],
            "weights_apart_share": len(apart) / total,
            "weights": [dotted(*w[1:]) for w in list(apart)[:16]],
            "confidence_reason": "the sums differ by more than rounding can explain",
        },
        prescription=Prescription(
            title=f"copy every master into its weight after the step: weights apart {percent(len(apart) / total)} "
            "-> 0 %",
            change={"copy_masters": {"from": total - len(apart), "to": total}},
            predicted={"ulps_apart": {"from": ulps, "to": 0.5}},
            snippet=(
                "import torch\n\n"
                "optimizer.step()\n"
                "with torch.no_grad():\n"
                "    for weight, master in zip(model.parameters(), masters, strict=True):\n"
                "        weight.copy_(master)\n"
            ),
        ),
    )


def _undone_finding(pairs: Mapping[Parameter, _Pair], options: Options) -> Finding:
    """Return the finding about weights that the script sets and that the next step overwrites with their master."""
    place = max(pairs, key=lambda p: pairs[p].undone(options["ulps"]).size)
    pair, name = pairs[place], dotted(*place[1:])
    steps = pair.undone(options["ulps"])
    ulps = float(pair.ulps[np.isin(pair.steps, steps)].max())
    return RULE.finding(
        severity=Severity.WARNING,
        confidence=0.8,
        title=f"what sets `{name}` is undone by its FP32 master copy, on {plural(steps.size, 'step')}",
        message=f"On {plural(steps.size, 'recorded step')} (limit {options['min_undone']:g}), step {steps[0]} first, "
        f"`{name}` ({pair.dtype}) and its FP32 master copy differ, by up to {ulps:.3g} ulps of every element (limit "
        f"{options['ulps']:g}). On the recorded steps before and after each they are equal: something sets the weight "
        "alone, and the optimizer's next step writes its master over that.",
        location=tensor_location(
            place, pair.module_class, "master_weight", Phase.OPTIMIZER, pair.process, int(steps[0])
        ),
        evidence={
            "ulps_apart": ulps,
            "limit": options["ulps"],
            "undone_steps": int(steps.size),
            "last_bad_step": int(steps[-1]),
            "weights": [dotted(*w[1:]) for w in list(pairs)[:16]],
            "confidence_reason": "a weight may be disturbed for one step on purpose",
        },
        prescription=Prescription(
            title=f"set the master where the weight is set: steps undone {steps.size} -> 0",
            change={"set_masters": {"from": False, "to": True}},
            predicted={"undone_steps": {"from": int(steps.size), "to": 0}},
            snippet="weight[rows] = values.to(weight.dtype)\nmaster[rows] = values.float()\n",
        ),
    )


RULE = Rule(
    code="PD508",
    name="master-weights-apart",
    severity=Severity.ERROR,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        RuleOption("ulps", 1.0, "ulps", "Least number of ulps by which every element must differ.",
                   "Rounding to nearest moves an element by half an ulp at most, stochastic rounding by one."),
        RuleOption("min_steps", 3.0, "recorded steps", "Number of newest steps; they must differ on each.",
                   "Chosen empirically: a weight may be set by hand once, and be overwritten at the next step.", 1.0),
        RuleOption("min_undone", 2.0, "recorded steps", "Steps on which they differ, and are equal around it.",
                   "Chosen empirically: a weight may be set by hand once.", 1.0),
    ),
    check=check,
)  # fmt: skip
