"""PD508: 16-bit weights that are not their FP32 master copies rounded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import Parameter, dotted, known_format, number, parameter_of, text
from precdoctor.diagnosis.survey.view import Process, RunView, process_step

PAGE = RulePage(
    finds="""
16-bit weights that are not their FP32 master copies rounded. Both are recorded at the same moment before the
optimizer's step. Their sums, or sums of squares, differ by more than rounding every element by `ulps` ulps could
explain, on each of the last `min_steps` recorded steps. Rounding to nearest moves an element by half an ulp, stochastic
rounding by up to one.
""",
    matters="""
The optimizer trains the master, and the model computes with the weight. If a parameter is never copied back, or was
loaded or changed after its master was made, the gradient is applied to other numbers than those it was computed from:
the layer is trained blindly, and its checkpoint is not the model that was evaluated.
""",
    example="""
    masters = [p.detach().float().clone() for p in model.parameters()]
    ...
    for p, master in zip(model.head.parameters(), masters):  # the body is never copied back
        p.data.copy_(master)
""",
    remedy="""
Copy every master into its weight after each step, and make the masters after the checkpoint has been loaded.
""",
    confidence="""
0.95: rounding cannot do that. Masters are recognised by their values at the first recorded step.
""",
    references=(
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1 (FP32 master copy of weights)",
    ),
)
_COLUMNS = ("root", "module", "module_class", "kind", "name", "dtype", "numel", "nan", "pos_inf", "neg_inf", "sum",
            "sum_sq")  # fmt: skip


@dataclass(frozen=True)
class _Sums:
    total: float
    squares: float
    numel: int
    dtype: str
    module_class: str


@dataclass
class _Pair:
    """A weight and its master over the recorded steps."""

    module_class: str
    dtype: str
    process: Process
    #: Per step by how many ulps every element differs at least.
    ulps: dict[int, float] = field(default_factory=dict)

    def least(self, steps: int) -> float:
        """The smallest difference on the last ``steps`` steps."""
        newest = sorted(self.ulps)[-steps:]
        return min(self.ulps[s] for s in newest)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the weight that is furthest from its master."""
    pairs = _survey(view)
    if not pairs:
        return Checked.not_applicable("no FP32 master copy of a 16-bit weight was recorded")
    steps = int(options["min_steps"])
    apart = {p: pair for p, pair in pairs.items() if len(pair.ulps) >= steps and pair.least(steps) > options["ulps"]}
    seen = f"{plural(len(pairs), '16-bit weight')} and their master copies"
    if not apart:
        return Checked((), f"{seen}: equal up to rounding")
    return Checked([_finding(apart, len(pairs), options)], f"{len(apart):,} of {seen} differ", Status.FAILED)


def _survey(view: RunView) -> dict[Parameter, _Pair]:
    masters = view.places("master_weight")
    sums: dict[tuple[Parameter, Process, int], dict[str, _Sums]] = {}
    for r in view.scan_records(_COLUMNS, ("weight", "master_weight")) if masters else ():
        place = parameter_of(r)
        total, squares = number(r["sum"]), number(r["sum_sq"])
        if place not in masters or total is None or squares is None or r["nan"] or r["pos_inf"] or r["neg_inf"]:
            continue
        found = _Sums(total, squares, int(r["numel"]), str(r["dtype"]), text(r["module_class"]))
        sums.setdefault((place, *process_step(r)), {})[str(r["kind"])] = found
    pairs: dict[Parameter, _Pair] = {}
    for (place, process, step), both in sums.items():
        if len(both) < 2:
            continue
        weight, master = both["weight"], both["master_weight"]
        fmt = known_format(weight.dtype)
        pair = pairs.setdefault(place, _Pair(weight.module_class, weight.dtype, process))
        if fmt is not None and fmt.bits == 16 and pair.process == process and weight.numel == master.numel:
            pair.ulps[step] = _ulps(weight, master, fmt.ulp_at_one)
    return pairs


def _ulps(weight: _Sums, master: _Sums, ulp: float) -> float:
    """Least number of ulps by which every element must differ for the sums to differ as they do.

    Elements off by at most ``e |x|`` change the sum by at most ``e sum|x| <= e sqrt(n sum(x^2))`` and the sum of
    squares by at most ``(2 e + e^2) sum(x^2)``.
    """
    largest = max(weight.squares, master.squares)
    if largest == 0.0:
        return 0.0
    of_sums = abs(weight.total - master.total) / math.sqrt(largest * weight.numel)
    of_squares = abs(weight.squares - master.squares) / largest / 2.0
    return max(of_sums, of_squares) / ulp


def _finding(apart: Mapping[Parameter, _Pair], total: int, options: Options) -> Finding:
    steps = int(options["min_steps"])
    place = max(apart, key=lambda p: apart[p].least(steps))
    pair = apart[place]
    last = max(pair.ulps)
    name = dotted(*place[1:])
    message = (
        f"At step {last} `{name}` ({pair.dtype}) and its FP32 master copy differ by {pair.ulps[last]:.3g} ulps of "
        f"every element or more, as their sums show, and on the last {plural(steps, 'recorded step')} by "
        f"{pair.least(steps):.3g} or more (limit {options['ulps']:g}). The optimizer changes the master, and the model "
        f"computes with the other. {plural(len(apart), 'weight')} of {total:,} affected."
    )
    return RULE.finding(
        confidence=0.95,
        title=f"`{name}` is not its FP32 master copy rounded: {pair.ulps[last]:.2g} ulps apart",
        message=message,
        location=Location(
            *(place[0], place[1], pair.module_class or None, "master_weight"),
            phase=Phase.OPTIMIZER,
            rank=pair.process.rank,
            step=last,
        ),
        evidence={
            "ulps_apart": pair.ulps[last],
            "limit": options["ulps"],
            "weights_apart_share": len(apart) / total,
            "weights": [dotted(*w[1:]) for w in list(apart)[:16]],
            "confidence_reason": "the sums differ by more than rounding can explain",
        },
        prescriptions=(
            Prescription(
                title=f"copy every master into its weight after the step: weights apart {percent(len(apart) / total)} "
                "-> 0 %",
                change={"copy_masters": {"from": total - len(apart), "to": total}},
                predicted={"ulps_apart": {"from": pair.ulps[last], "to": 0.5}},
                snippet=(
                    "import torch\n\n"
                    "optimizer.step()\n"
                    "with torch.no_grad():\n"
                    "    for weight, master in zip(model.parameters(), masters, strict=True):\n"
                    "        weight.copy_(master)\n"
                ),
            ),
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
    ),
    check=check,
)  # fmt: skip
