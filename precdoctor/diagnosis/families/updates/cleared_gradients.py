"""PD510: the backward pass makes gradients, and the optimizer never gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import Parameter, integer, parameter_of
from precdoctor.diagnosis.survey.view import Process, RunView, process_step

PAGE = RulePage(
    finds="""
Training steps whose backward pass leaves non-zero weight gradients while the optimizer is given none, or zeros, and the
weights keep their bits: on `share` of the sampled steps, and on at least `min_steps` of them. Left out are steps that a
loss scaler skips, steps at learning rate 0, runs in which `--include` or `--exclude` hides modules, and optimizers with
fewer parameters than there are gradients (one that optimizes an image in front of a fixed network).
""",
    matters="""
Nothing is trained. The loss stays where it is, within its noise, and nothing else shows it: after `backward` the
gradients are there.
""",
    example="""
    loss.backward()
    optimizer.zero_grad()   # belongs before backward, or after step
    optimizer.step()
""",
    remedy="""
Call `zero_grad`, `backward` and `step` in this order. Where gradients are copied to other tensors (FP32 masters, flat
buffers), copy them before `step`.
""",
    confidence="""
0.95: both gradients were recorded, and the weights were compared bit for bit.
""",
    references=("PyTorch tutorial: Optimizing Model Parameters, the optimization loop",),
)
_COLUMNS = ("root", "module", "kind", "name", "numel", "zero", "nan", "pos_inf", "neg_inf", "fingerprint")
_KINDS = ("weight", "weight_grad", "weight_grad_step", "update")


@dataclass
class _Step:
    """One sampled step: weights with a non-zero gradient, whether the optimizer had any, and the weights' bits."""

    #: Parameters of its optimizer.
    held: int
    made: set[Parameter] = field(default_factory=set)
    fed: bool = False
    weights: dict[Parameter, int] = field(default_factory=dict)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the first process that trains nothing."""
    if view.partial_modules:
        return Checked.not_applicable("modules were left out of the recording")
    seen = 0
    for process, steps in _survey(view).items():
        seen += len(steps)
        starved = {n: s for n, s in steps.items() if not s.fed and len(s.made) <= s.held}
        if len(starved) < max(options["min_steps"], options["share"] * len(steps)) or not _same(starved):
            continue
        finding = _finding(process, starved, len(steps), options)
        return Checked([finding], f"{plural(len(starved), 'step')} without a gradient for the optimizer", Status.FAILED)
    if not seen:
        return Checked.not_applicable("no sampled step made a weight gradient")
    return Checked((), f"the optimizer got gradients on {plural(seen, 'step')}, or the weights moved")


def _survey(view: RunView) -> Mapping[Process, Mapping[int, _Step]]:
    """Sampled steps with weight gradients, by process and number."""
    sizes = {str(o.get("name")): _parameters(o) for o in view.optimizers}
    usable = {
        (p, s.step): sizes.get(s.optimizer, 0)
        for p, steps in view.timeline.items()
        for s in steps
        if s.complete and s.sampled and not s.skipped and s.optimizer and s.lr
    }
    found: dict[Process, dict[int, _Step]] = {}
    for r in view.scan_records(_COLUMNS, _KINDS):
        process, number = at = process_step(r)
        if at not in usable:
            continue
        step = found.setdefault(process, {}).setdefault(number, _Step(usable[at]))
        key = parameter_of(r)
        if r["kind"] == "weight":
            mark = integer(r["fingerprint"])
            if mark is not None:
                step.weights[key] = mark
        elif r["kind"] != "weight_grad":
            step.fed = step.fed or r["zero"] < r["numel"]
        elif r["zero"] < r["numel"] and not (r["nan"] or r["pos_inf"] or r["neg_inf"]):
            step.made.add(key)
    return {p: {n: s for n, s in sorted(steps.items()) if s.made} for p, steps in found.items()}


def _parameters(optimizer: Mapping[str, object]) -> int:
    groups = optimizer.get("groups")
    counts = [integer(g.get("parameters")) for g in groups if isinstance(g, dict)] if isinstance(groups, list) else []
    return sum(c or 0 for c in counts)


def _same(steps: Mapping[int, _Step]) -> bool:
    """Whether the weights with gradients are bit for bit the same on the first and on the last of these steps."""
    numbers = sorted(steps)
    first, last = steps[numbers[0]], steps[numbers[-1]]
    both = first.made & set(first.weights) & set(last.weights)
    return bool(both) and all(first.weights[k] == last.weights[k] for k in both)


def _finding(process: Process, starved: Mapping[int, _Step], of: int, options: Options) -> Finding:
    first, weights = min(starved), max(len(s.made) for s in starved.values())
    share = len(starved) / of
    return RULE.finding(
        confidence=0.95,
        title="nothing is trained: the optimizer is given no gradient, although the backward pass makes them",
        message=(
            f"On {len(starved):,} of {plural(of, 'sampled step')} ({percent(share)}, limit "
            f"{percent(options['share'])}) the backward pass left non-zero gradients in {plural(weights, 'weight')}. "
            "At `step` they were gone or zero, and the weights kept their bits. Most likely `zero_grad()` runs between "
            "`backward()` and `step()`, or `step()` before `backward()`."
        ),
        location=Location(phase=Phase.OPTIMIZER, rank=process.rank, step=first),
        evidence={
            "starved_share": share,
            "limit": options["share"],
            "steps": len(starved),
            "weights": weights,
            "last_bad_step": max(starved),
            "confidence_reason": "both gradients were recorded, and weights were compared bit for bit",
        },
        prescriptions=(
            Prescription(
                title="`zero_grad`, `backward`, `step`, in this order: steps on which the optimizer gets its gradients "
                f"0 -> {of}",
                change={"order": {"from": "zero_grad before step", "to": "zero_grad before backward"}},
                predicted={"steps_with_gradients": {"from": 0, "to": of}},
                snippet="optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n",
            ),
        ),
    )


RULE = Rule(
    code="PD510",
    name="cleared-gradients",
    severity=Severity.ERROR,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        RuleOption("share", 0.9, "share of sampled steps", "Steps without a gradient for the optimizer.", maximum=1.0),
        RuleOption("min_steps", 8, "steps", "Minimum number of such steps.", minimum=2),
    ),
    check=check,
)  # fmt: skip
