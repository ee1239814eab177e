"""PD603: the gradient norm explodes, and the loss rises with it.

Detection is in :mod:`.gradient_explosion_detection`; gradients that are never zeroed come from
:mod:`precdoctor.diagnosis.divergence.missing_zero_grad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from precdoctor.diagnosis.advice.stable_rate import StableRate, stable_rate
from precdoctor.diagnosis.analyses.histories import by_optimizer
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import anywhere, not_thrown_off_before, when
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.divergence import missing_zero_grad
from precdoctor.diagnosis.divergence.onset import clip_level
from precdoctor.diagnosis.divergence.report import root_of_rise
from precdoctor.diagnosis.families.growth.gradient_explosion_detection import WINDOW, Explosion, find_explosion
from precdoctor.diagnosis.survey.rows import TensorRow, location, tensor_evidence
from precdoctor.diagnosis.survey.step_facts import norms_of
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
A gradient norm (L2, unscaled, before clipping, on every step) that jumps to `factor` times the median of the steps
before and stays there, while the loss loses at least a quarter of its progress. A single large batch, a norm that is
large at the start, and the wobble of a loss near zero are not explosions. If norm and loss jump in the same step behind
an ordinary update (norm and rate within twice their medians), the objective may have changed there on purpose, and the
finding is information. It is also information if the run got over it: by the last quarter of the following steps, at
least 5 of 20, three quarters of the rise of norm and loss are gone. The finding names the layer whose weight gradient
grew most.

A single step also counts if the gradient vanishes afterwards: its norm is `fatal` times that median, and all following
norms, at least three, are as far below it. The step threw the weights to where sigmoids and steps are flat, even if
the loss does not show it.

Three more explosions have no jump. Loss and norm end `diverged` times above their first values. The first update throws
both that far up, and the loss never comes back to where it began. Or the loss falls below zero by `unbounded` times its
first magnitude while the norm grows by `factor`: the objective has no lower bound, such as the scores of an
unconstrained Wasserstein critic, and the model only learns larger weights.

Gradients that are never zeroed also grow: this is a warning if, on `kept_steps` steps in a row, the gradients that the
step before had applied were still there and the new ones were added to them. The recorder watches identity and version
of one gradient of every optimizer, and compares values first; accumulation, closures and loss scalers (which divide
retained gradients by the scale) do not count.
""",
    matters="""
Steps along an exploded gradient throw the weights far away; Adam's second moment remembers the explosion for a
thousand steps and makes the following ones too small. Without clipping an overflow is next.
""",
    example="""
A recurrent network without clipping at a learning rate of 1: norm 0.4, 0.5, 0.4, 38, 210, and the loss back at its
start.
""",
    remedy="""
If the objective has no bound, give it one: a gradient penalty, spectral normalisation, clipped weights. Otherwise clip
by norm at the level in the finding: twice the usual norm before training diverged, or 1 if no norm was recorded before
that. Then lower the learning rate or warm it up. Resume from before the explosion, because weights and optimizer state
carry it. If plain SGD diverges from the start, the rate is too high: the growth of the gradient yields the largest
stable rate, and the finding proposes half of it. If gradients are not zeroed, call `optimizer.zero_grad()` after each
`optimizer.step()`.
""",
    confidence="""
0.85; 0.75 for an objective without a bound; 0.7 if no loss was recorded at those steps or the jump shows on one step
only, the last of the run. 0.95 for gradients that are not zeroed: the recorder observed it on every step.
""",
    references=(
        "Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural networks, arXiv:1211.5063",
        "Arjovsky, Chintala, Bottou, Wasserstein GAN, arXiv:1701.07875, section 3 (why critics are held)",
        "Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability, arXiv:2103.00065",
        "PyTorch documentation: torch.nn.utils.clip_grad_norm_",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: gradients that are never zeroed, else the largest explosion."""
    checked = _explosions(view, options)
    unzeroed = missing_zero_grad.unzeroed(view, options["kept_steps"])
    if unzeroed is None:
        return checked
    exploded = next(iter(checked.findings), None)
    finding = missing_zero_grad.finding(RULE, view, unzeroed, options["kept_steps"], exploded)
    return Checked([finding], f"gradients of {plural(unzeroed.steps, 'step')} in a row were not zeroed")


def _explosions(view: RunView, options: Options) -> Checked:
    series = {
        k: [s for s in steps if s.grad_norm is not None and math.isfinite(s.grad_norm) and not s.skipped]
        for k, steps in by_optimizer(view).items()
    }
    if not (count := sum(map(len, series.values()))):
        return Checked.not_applicable("no gradient norm was recorded")
    found = [e for (p, _), steps in series.items() if (e := find_explosion(p, steps, options)) is not None]
    if not found:
        largest = max(s.grad_norm or 0.0 for steps in series.values() for s in steps)
        return Checked((), f"{plural(count, 'gradient norm')}, largest {largest:.3g}")
    worst = max(found, key=lambda e: e.peak / e.baseline)
    reason = f"{plural(len(found), 'explosion')} in {plural(count, 'step')}"
    return Checked([_finding(view, worst, options)], reason)


def _finding(view: RunView, explosion: Explosion, options: Options) -> Finding:
    first = explosion.first
    row, grown, rows = _culprit(view, explosion)
    rate = None if explosion.unbounded else stable_rate(view, explosion.way_up)
    evidence = {
        "norm_ratio": explosion.peak / explosion.baseline,
        "limit": options[_limit_option(explosion)],
        "grad_norm": {"before": explosion.baseline, "peak": explosion.peak},
        "loss": None if explosion.loss is None else {"before": explosion.loss[0], "after": explosion.loss[1]},
        "clip_norm": first.clip_norm,
        "last_finite_step": explosion.steps[explosion.left - 1].step if explosion.left else None,
        "last_bad_step": explosion.steps[-1].step,
        "confidence_reason": "norm and loss are recorded on every step"
        if explosion.loss is not None
        else "no loss was recorded at these steps",
    }
    if rate is not None:
        evidence |= rate.evidence
    where = f" from `{_name(row)}`" if row is not None else ""
    root = "" if explosion.diverged else root_of_rise(view, explosion.process, explosion.steps, explosion.at)
    norms = f"norm {explosion.baseline:.3g} -> {explosion.peak:.3g}"
    return RULE.finding(
        severity=_severity(explosion),
        confidence=0.75 if explosion.unbounded else 0.85 if explosion.loss is not None else 0.7,
        title=f"{f'{root}; ' if root else ''}{_title_words(explosion)}: {norms}{where}",
        message=_message(explosion, row, grown, options) + (f" {rate.words}" if rate is not None else ""),
        location=location(row, Phase.BACKWARD, explosion.process, first.step),
        evidence=evidence | tensor_evidence(row, rows),
        prescriptions=_prescriptions(explosion, row.module if row is not None else "", rate),
    )


def _severity(explosion: Explosion) -> Severity:
    if explosion.unbounded:
        return Severity.WARNING
    return Severity.INFO if explosion.sudden or explosion.passed else Severity.ERROR


def _limit_option(explosion: Explosion) -> str:
    """Name of the option whose limit the explosion exceeds."""
    whole = "diverged" if explosion.diverged and not explosion.unbounded else "factor"
    return "fatal" if explosion.fatal else whole


def _title_words(explosion: Explosion) -> str:
    if explosion.fatal:
        return f"one exploded gradient ends the training at step {explosion.first.step}"
    if not explosion.diverged or explosion.loss is None:
        return f"gradients explode at step {explosion.first.step}"
    if explosion.unbounded:
        return f"the loss falls without end, to {explosion.loss[1]:.3g}, and gradients grow"
    return (
        f"the run diverges from step {explosion.first.step} on: loss {explosion.loss[0]:.3g} -> {explosion.loss[1]:.3g}"
    )


def _message(explosion: Explosion, row: TensorRow | None, grown: float, options: Options) -> str:
    first = explosion.first
    before = f"median of the {min(WINDOW, explosion.at)} steps before"
    if explosion.unbounded:
        before = "median of the first steps"
    elif explosion.diverged:
        before = f"at step {explosion.steps[0].step}"
    message = (
        f"The gradient norm rose from {explosion.baseline:.3g} ({before}) to {first.grad_norm:.3g} at step "
        f"{first.step} and at most {explosion.peak:.3g}: {explosion.peak / explosion.baseline:.3g} times, limit "
        f"{options[_limit_option(explosion)]:g}. "
    )
    if explosion.loss is not None:
        message += f"The loss went from {explosion.loss[0]:.4g} to {explosion.loss[1]:.4g}. "
    if explosion.fatal:
        most = max(s.grad_norm or 0.0 for s in explosion.steps[explosion.at + 1 :])
        message += f"On all {len(explosion.steps) - explosion.at - 1} steps after it the norm is at most {most:.3g}. "
    if explosion.unbounded and explosion.loss is not None:
        times = abs(explosion.loss[1]) / max(explosion.loss[0], 1e-30)
        message += (
            f"That is {times:.3g} times its first magnitude below zero (limit {options['unbounded']:g}): the objective "
            "has no bound. "
        )
    clips = first.clip_norm is not None and 0.0 < first.clip_norm < math.inf  # an infinite limit measures the norm
    message += f"Clipping at {first.clip_norm:g} was on." if clips else "Gradients are not clipped."
    if (raised := explosion.raised) is not None:
        message += f" The learning rate had been raised from {raised[0]:.3g} to {raised[1]:.3g}."
    if explosion.sudden:
        message += " Norm and loss jumped in the same step, behind an ordinary update: was the loss changed there?"
    elif explosion.passed:
        message += " By the last steps norm and loss are back down: the run got over it."
    if row is not None:
        message += f" The gradient of `{_name(row)}` grew most, by a factor of {grown:.3g}."
    return message


def _name(row: TensorRow) -> str:
    return row.parameter or row.root


def _culprit(view: RunView, explosion: Explosion) -> tuple[TensorRow | None, float, Sequence[TensorRow]]:
    """Return the weight gradient whose unscaled norm grew most, its factor, and the backward rows; None if unknown.

    Compares the last sampled step before the explosion with the first one from it on, or, if the run diverged, with the
    last one.
    """
    later = explosion.steps[explosion.at :]
    before = next((s for s in reversed(explosion.steps[: explosion.at]) if s.sampled), None)
    after = next((s for s in (reversed(later) if explosion.diverged else later) if s.sampled), None)
    if before is None or after is None:
        return None, 0.0, ()
    rows = view.rows(explosion.process, after.step)
    old = {r.key: _norm(r) for r in view.rows(explosion.process, before.step) if r.kind == "weight_grad"}
    grown = [(_norm(r) / old[r.key], r) for r in rows if r.kind == "weight_grad" and old.get(r.key) and not r.bad]
    if not grown:
        return None, 0.0, ()
    ratio, row = max(grown, key=lambda found: found[0])
    return row, ratio, [r for r in rows if r.kind in ("loss", "grad_output", "weight_grad")]


def _norm(row: TensorRow) -> float:
    """L2 norm, without the loss scale."""
    return math.sqrt(row.sum_sq or 0.0) / (row.scale or 1.0)


def _prescriptions(explosion: Explosion, module: str, rate: StableRate | None) -> tuple[Prescription, ...]:
    """Prescribe against the cause before the symptom.

    Args:
        module: module whose gradient grew most; empty if unknown.
        rate: the largest stable rate, if the run diverged because of its rate.
    """
    if explosion.unbounded:
        return (_bound(explosion, module),)
    clip = _lower_rate_or_clip(explosion)  # clipping limits a run with too high a rate, but does not mend it
    return (clip,) if rate is None else (rate.prescription, clip)


def _lower_rate_or_clip(explosion: Explosion) -> Prescription:
    """Prescribe the usual rate if the learning rate had been raised, else clipping."""
    if (raised := explosion.raised) is not None:
        usual, present = raised
        return Prescription(
            title=f"learning rate back to {usual:.3g}, at which the norm was {explosion.baseline:.3g}, or warm it up: "
            f"{present:.3g} -> {usual:.3g}",
            change={"lr": {"from": present, "to": usual}},
            predicted={"grad_norm": {"from": explosion.peak, "to": explosion.baseline}},
            snippet=snippets.group_option("lr", repr(usual)),
        )
    norms = norms_of(explosion.steps[: explosion.left])
    clip = clip_level(norms)
    touched = sum(n > clip for n in norms) / max(1, len(norms))
    healthy = (
        f"{percent(touched)} of the steps before clipped" if norms else "the usual choice; no norm before is healthy"
    )
    return Prescription(
        title=f"clip the norm at {clip:.2g}: largest step {explosion.peak:.3g} -> {clip:.2g}, {healthy}",
        change={"clip_norm": {"from": explosion.first.clip_norm, "to": clip}},
        predicted={"largest_norm": {"from": explosion.peak, "to": clip}, "healthy_steps_clipped_share": touched},
        snippet=snippets.clip_norm(clip),
    )


def _bound(explosion: Explosion, module: str) -> Prescription:
    """Prescribe a bound on the gradients of an objective that has no minimum."""
    return Prescription(
        title=f"normalise the weights' spectra, or penalise the gradient: its norm {explosion.peak:.3g} -> about "
        f"{explosion.baseline:.2g}, as in the first steps",
        change={"parametrization": {"from": None, "to": "spectral_norm"}},
        predicted={"largest_norm": {"from": explosion.peak, "to": explosion.baseline}},
        snippet=(
            "from torch.nn.utils.parametrizations import spectral_norm\n\n"
            f"spectral_norm({f'model.get_submodule({module!r})' if module else 'layer'})  # and the other layers\n"
        ),
    )


RULE = Rule(
    code="PD603",
    name="gradient-explosion",
    severity=Severity.ERROR,
    triage=Triage.LEARNING_RATE,
    page=PAGE,
    options=(
        RuleOption("factor", 30.0, "times the median",
                   "Jump of the gradient norm over the 32 steps before, on three of five steps.",
                   "Chosen empirically: norms of healthy runs stay within a factor of fifteen of their running median.",
                   1.0),
        RuleOption("undone_share", 0.25, "fraction", "Minimum share of the loss's progress that is lost.",
                   "Chosen empirically: below it the loss took no harm."),
        RuleOption("diverged", 1000.0, "times the first",
                   "Minimum rise of losses and gradient norms at the end, or after the first update (medians of five).",
                   "Chosen empirically: warm-up, annealed terms and growing episodes raise a loss by far less.", 10.0),
        RuleOption("fatal", 1000.0, "times the median",
                   "One gradient norm this far above the median before it, and all following norms as far below.",
                   "Chosen empirically: after a rare batch norms recover, and a learnt task has no such step.", 30.0),
        RuleOption("unbounded", 300.0, "times the first",
                   "Minimum depth of a loss below zero (lowest median of five) over the magnitude of the first five.",
                   "Chosen empirically: likelihoods of many dimensions begin as large as they end.", 10.0),
        RuleOption("least_loss", 100.0, "loss", "Minimum loss of a run that has diverged.",
                   "Chosen empirically: zero-initialised heads and sparse rewards begin with losses near zero."),
        RuleOption("kept_steps", 8.0, "steps", "Minimum number of steps in a row without zeroed gradients.",
                   "Chosen empirically: the recorder reports from the eighth on; accumulation over steps has no use.",
                   2.0),
        RuleOption("min_steps", 8.0, "steps", "Minimum number of steps before it, for a baseline.", minimum=2.0),
    ),
    sampled_steps=False,
    explains={**when(anywhere, "PD406", "PD605", "PD606"), **when(not_thrown_off_before, "PD504")},
    check=check,
)  # fmt: skip
