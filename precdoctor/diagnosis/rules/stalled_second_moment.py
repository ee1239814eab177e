"""PD505: Adam's second moment is kept in a format in which it cannot decay."""

from __future__ import annotations

from statistics import median

from precdoctor.diagnosis.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.histories import by_optimizer
from precdoctor.diagnosis.parameters import HALF, adam_groups, beta2_of, stepped
from precdoctor.diagnosis.rows import known_format
from precdoctor.diagnosis.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.telling import plural
from precdoctor.diagnosis.view import RunView

PAGE = RulePage(
    finds="""
Adam or AdamW on 16-bit weights, whose moments torch keeps in the weight's own format, with 1 - beta2 below half an ulp
of that format: 0.001 against 2^-9 = 0.002 in BF16. Then `v * beta2` rounds back to `v`, and a new squared gradient is
added only when it is at least twice `v`: the second moment goes up and never comes down. It is a warning when the
gradient norm has fallen by `fallen` since its peak, so that `v` is too large by the square of that; information before.
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
0.9: format, beta2 and optimizer class are facts of the run. The finding is about torch's own Adam and AdamW; others may
keep wider state and are not judged.
""",
    references=(
        "Kingma and Ba, Adam, arXiv:1412.6980, algorithm 1",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192",
        "PyTorch source: torch/optim/adam.py (exp_avg_sq = zeros_like(parameter))",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding for the narrow format with most weights."""
    groups = [b for g in adam_groups(view) if (b := beta2_of(g)) is not None]
    weights = {d: stepped(view, (d,)) for d in HALF}
    dtype = max(HALF, key=lambda d: sum(weights[d].values()))
    if not groups or not weights[dtype]:
        return Checked.not_applicable("no Adam or AdamW on weights in BF16 or FP16")
    beta2, limit = max(groups), _half_ulp(dtype)
    if 1.0 - beta2 >= limit:
        return Checked((), f"1 - beta2 = {1.0 - beta2:.3g} is above half an ulp of {dtype}, {limit:.3g}")
    steps = max((len(s) for s in view.timeline.values()), default=0)
    if steps < options["min_steps"]:
        return Checked((), f"{plural(steps, 'step')}: nothing had to decay yet")
    finding = _finding(view, dtype, weights[dtype], beta2, limit, options)
    return Checked([finding], f"the second moments of {plural(len(weights[dtype]), 'weight')} cannot decay",
                   Status.FAILED)  # fmt: skip


def _half_ulp(dtype: str) -> float:
    """Half an ulp, relative to the largest number of a binade: below it every product rounds back."""
    fmt = known_format(dtype)
    return 2.0 ** -(fmt.mantissa_bits + 2) if fmt is not None else 0.0


def _fall(view: RunView) -> tuple[float, float, float]:
    """Peak and present gradient norm of the optimizer whose norm fell furthest, and their ratio; 1 when unknown."""
    best = (0.0, 0.0, 1.0)
    for steps in by_optimizer(view).values():
        norms = [s.grad_norm for s in steps if s.grad_norm and not s.skipped]
        if len(norms) < 8:
            continue
        peak, present = max(norms), median(norms[-8:])
        if present > 0.0 and peak / present > best[2]:
            best = (peak, present, peak / present)
    return best


def _finding(
    view: RunView, dtype: str, weights: dict[str, int], beta2: float, limit: float, options: Options
) -> Finding:
    peak, present, ratio = _fall(view)
    elements = sum(weights.values())
    better = 1.0 - 2.0 * limit
    message = (
        f"Adam's second moments of {plural(len(weights), 'weight')} ({elements:,} elements) are {dtype}, and 1 - beta2 "
        f"= {1.0 - beta2:.3g} is below half an ulp of it (limit {limit:.3g}): v * beta2 rounds back to v, which grows "
        "and never decays. "
    )
    message += (
        f"The gradient norm has come down from {peak:.3g} to {present:.3g}; steps are up to {ratio:.3g} times "
        "smaller than Adam means them to be."
        if ratio >= 1.5
        else "What that costs depends on how far the gradients fall from here."
    )
    return Finding(
        code="PD505",
        name="stalled-second-moment",
        severity=Severity.WARNING if ratio >= options["fallen"] else Severity.INFO,
        confidence=0.9,
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
            "confidence_reason": "format, beta2 and optimizer class are facts of the run",
        },
        prescriptions=(
            Prescription(
                title=f"beta2 {better:.4g} (smallest change), or FP32 weights and moments (+{6 * elements / 2**20:.2g} "
                "MiB)",
                change={"beta2": {"from": beta2, "to": round(better, 6)}},
                predicted={"decay_of_v_per_step": {"from": 0.0, "to": round(1.0 - better, 6)}},
                snippet=(
                    f"for group in optimizer.param_groups:\n    group['betas'] = (group['betas'][0], {better:.4f})\n"
                ),
            ),
        ),
    )


RULE = Rule(
    code="PD505",
    name="stalled-second-moment",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        RuleOption(
            "fallen",
            4.0,
            "times",
            "Fall of the gradient norm since its peak that makes it a warning.",
            "Precdoctor's own: steps a quarter of their size are worth a change.",
            1.0,
        ),
        RuleOption("min_steps", 8.0, "steps", "Shorter runs have nothing to decay.", "Precdoctor's own.", 1.0),
    ),
    kinds=(),
    columns=(),
    check=check,
    step_columns=("grad_norm",),
)
