"""PD603: the gradient norm explodes, and the loss goes up with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from precdoctor.diagnosis.advice.stable_rate import stable_rate
from precdoctor.diagnosis.claims.finding import Finding, Phase, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.divergence import missing_zero_grad
from precdoctor.diagnosis.divergence.report import root_of_rise
from precdoctor.diagnosis.families.growth.fastest_gradient import grown_most
from precdoctor.diagnosis.families.growth.gradient_explosion_detection import AFTER, WINDOW, Explosion, cures
from precdoctor.diagnosis.survey.histories import by_optimizer
from precdoctor.diagnosis.survey.rows import TensorRow, location, path_evidence, path_to, range_evidence
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A gradient norm (L2, unscaled, before clipping, on every step) that jumps to `factor` times the median of the steps
before and stays there, while the loss undoes at least a quarter of the progress it had made. A single large batch, a
norm that is large at the start, and the wobble of a loss that is almost zero are not explosions. Where norm and loss
jump in one and the same step behind an ordinary update (norm and rate within twice their medians), the objective may
have been changed there on purpose, and the finding is information; so it is where the run got over it: by the last
quarter of the steps behind it, at least 5 of 20, three quarters of the rise of norm and loss are gone. The layer whose
weight gradient grew most is named.

One step is enough where nothing is left after it: a norm of `fatal` times that median, and as far below it on every
step that follows, three at least. The weights were thrown to where sigmoids and steps are flat, whatever the loss says.

Two more ways to explode have no jump: loss and norm end `diverged` times above their first values; or the loss falls
below zero by `unbounded` times its first magnitude while the norm grows by `factor`: the objective has no lower bound,
such as the scores of a Wasserstein critic that nothing holds, and larger weights are all that is learnt.

And gradients that are never zeroed grow without any explosion: a warning where `kept_steps` steps in a row were given
what the step before had applied, with the new gradients on top. The recorder watches identity and version of a gradient
of every optimizer, and compares values before it says so; accumulation, closures and loss scalers (which divide what
was kept by the scale) are none of this.
""",
    matters="""
Steps along an exploded gradient throw the weights far away; Adam's second moment remembers the explosion for a
thousand steps and makes the following ones too small. Unclipped, the next thing to happen is an overflow.
""",
    example="""
A recurrent network without clipping at a learning rate of 1: norm 0.4, 0.5, 0.4, 38, 210, and the loss back at its
start.
""",
    remedy="""
Where the objective has no bound, give it one: a gradient penalty, spectral normalisation, clipped weights. Otherwise
clip by norm at the level in the finding: twice the usual norm before the run left its course, or 1 where no norm was
recorded before that. Then lower the learning rate or warm it up. Resume from before the explosion: weights and
optimizer state have seen it. Where plain SGD diverges from the start on, the rate is what is wrong: how fast the
gradient grows tells the largest one that is stable, and half of that is proposed. Where gradients are not zeroed,
call `optimizer.zero_grad()` behind each `optimizer.step()`.
""",
    confidence="""
0.85; 0.75 for an objective without a bound; 0.7 when no loss was recorded at those steps or the jump was seen on one
step only, the last of the run. 0.95 for gradients that are not zeroed: it was seen on every step.
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
    kept = missing_zero_grad.unzeroed(view, options["kept_steps"])
    if kept is None:
        return checked
    exploded = next(iter(checked.findings), None)
    reason = f"gradients of {plural(kept.steps, 'step')} in a row were not zeroed"
    return Checked([missing_zero_grad.finding(view, kept, options["kept_steps"], exploded)], reason, Status.FAILED)


def _explosions(view: RunView, options: Options) -> Checked:
    series = {
        k: [s for s in steps if s.grad_norm is not None and math.isfinite(s.grad_norm) and not s.skipped]
        for k, steps in by_optimizer(view).items()
    }
    if not (count := sum(map(len, series.values()))):
        return Checked.not_applicable("no gradient norm was recorded")
    found = [e for (p, _), steps in series.items() if (e := _explosion(p, steps, options)) is not None]
    if not found:
        largest = max(s.grad_norm or 0.0 for steps in series.values() for s in steps)
        return Checked((), f"{plural(count, 'gradient norm')}, largest {largest:.3g}")
    worst = max(found, key=lambda e: e.peak / e.baseline)
    return Checked([_finding(view, worst, options)], f"{plural(len(found), 'explosion')} in {plural(count, 'step')}",
                   Status.FAILED)  # fmt: skip


def _explosion(process: Process, steps: Sequence[StepFacts], options: Options) -> Explosion | None:
    """The first jump that stays and takes the loss along."""
    norms = [s.grad_norm or 0.0 for s in steps]
    for i in range(int(options["min_steps"]), len(steps)):
        baseline = median(norms[max(0, i - WINDOW) : i])
        if baseline <= 0.0 or norms[i] < options["factor"] * baseline:
            continue
        rest, far = norms[i + 1 :], options["fatal"]
        if norms[i] >= far * baseline and len(rest) >= 3 and max(rest) <= baseline / far:
            return Explosion(process, steps, i, baseline, norms[i], _losses(steps, i), fatal=True)
        after = norms[i : i + AFTER]
        stays = sum(n >= options["factor"] * baseline for n in after)
        if stays < min(3, len(after)) or len(after) < 3:
            continue
        losses = _losses(steps, i)
        if losses is None or _undone(steps, i, losses) >= options["undone_share"]:
            return Explosion(process, steps, i, baseline, max(norms[i:]), losses)
    return _divergence(process, steps, options)


def _divergence(process: Process, steps: Sequence[StepFacts], options: Options) -> Explosion | None:
    """A run whose last losses and norms are far above its first ones; losses that change their sign are no measure."""
    known = [(i, s.loss, s.grad_norm) for i, s in enumerate(steps) if s.loss is not None and s.grad_norm is not None]
    known = [(i, loss, norm) for i, loss, norm in known if math.isfinite(loss) and math.isfinite(norm)]
    if len(known) < options["min_steps"]:
        return None
    if min(loss for _, loss, _ in known) <= 0.0:
        return _unbounded(process, steps, known, options)
    _, loss, norm = known[0]
    last_loss, last_norm = (median(values[j] for values in known[-AFTER:]) for j in (1, 2))
    far = options["diverged"]
    if last_loss < max(far * loss, options["least_loss"]) or last_norm < far * norm or norm <= 0.0:
        return None
    at = next(i for i, _, n in known if n >= options["factor"] * norm)
    return Explosion(process, steps, at, norm, max(n for *_, n in known), (loss, last_loss), diverged=True)


def _unbounded(
    process: Process, steps: Sequence[StepFacts], known: Sequence[tuple[int, float, float]], options: Options
) -> Explosion | None:
    """A loss that has fallen far below zero, with gradients that grew on the way: no minimum is near."""
    first_loss, first_norm = (median(abs(values[j]) for values in known[:AFTER]) for j in (1, 2))
    lowest = min(median(loss for _, loss, _ in known[i : i + AFTER]) for i in range(len(known) - AFTER + 1))
    last_norm = median(norm for *_, norm in known[-max(AFTER, len(known) // 4) :])
    grown = first_norm > 0.0 and last_norm >= options["factor"] * first_norm
    if not grown or -lowest < max(options["unbounded"] * first_loss, options["least_loss"]):
        return None
    at = next(i for i, _, norm in known if norm >= options["factor"] * first_norm)
    peak = max(norm for *_, norm in known)
    return Explosion(process, steps, at, first_norm, peak, (first_loss, lowest), diverged=True, unbounded=True)


def _losses(steps: Sequence[StepFacts], i: int) -> tuple[float, float] | None:
    """Median loss before and after; None when it is not known."""
    before = [s.loss for s in steps[max(0, i - WINDOW) : i] if s.loss is not None]
    after = [s.loss for s in steps[i : i + 2 * AFTER] if s.loss is not None]
    return (median(before), max(after)) if before and after else None


def _undone(steps: Sequence[StepFacts], i: int, losses: tuple[float, float]) -> float:
    """Share of the progress since the first steps that was lost; infinite when there was none and it got worse."""
    start = [s.loss for s in steps[: min(8, i)] if s.loss is not None]
    made = max(0.0, median(start) - losses[0]) if start else 0.0
    lost = losses[1] - losses[0]
    if made <= 0.1 * abs(losses[0]):
        return math.inf if lost > abs(losses[0]) else 0.0
    return lost / made


def _finding(view: RunView, explosion: Explosion, options: Options) -> Finding:
    first = explosion.first
    row, grown, rows = _culprit(view, explosion)
    rate = None if explosion.unbounded else stable_rate(view, explosion.way_up)
    evidence = {
        "norm_ratio": explosion.peak / explosion.baseline,
        "limit": options[_limit(explosion)],
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
    if row is not None:
        evidence |= {"range": range_evidence(row), "path": path_evidence(path_to(rows, row))}
    where = f" from `{_name(row)}`" if row is not None else ""
    root = "" if explosion.diverged else root_of_rise(view, explosion.process, explosion.steps, explosion.at)
    norms = f"norm {explosion.baseline:.3g} -> {explosion.peak:.3g}"
    return RULE.finding(
        severity=_severity(explosion),
        confidence=0.75 if explosion.unbounded else 0.85 if explosion.loss is not None else 0.7,
        title=f"{f'{root}; ' if root else ''}{_what(explosion)}: {norms}{where}",
        message=_message(explosion, row, grown, options) + (f" {rate.words}" if rate is not None else ""),
        location=location(row, Phase.BACKWARD, explosion.process.rank, first.step),
        evidence=evidence,
        prescriptions=cures(explosion, row.module if row is not None else "", rate),
    )


def _severity(explosion: Explosion) -> Severity:
    if explosion.unbounded:
        return Severity.WARNING
    return Severity.INFO if explosion.sudden or explosion.passed else Severity.ERROR


def _limit(explosion: Explosion) -> str:
    whole = "diverged" if explosion.diverged and not explosion.unbounded else "factor"
    return "fatal" if explosion.fatal else whole


def _what(explosion: Explosion) -> str:
    if explosion.fatal:
        return f"one exploded gradient ends the training at step {explosion.first.step}"
    if not explosion.diverged or explosion.loss is None:
        return f"gradients explode at step {explosion.first.step}"
    if explosion.unbounded:
        return f"the loss falls without end, to {explosion.loss[1]:.3g}, and gradients grow with it"
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
        f"{first.step} and {explosion.peak:.3g} at most: {explosion.peak / explosion.baseline:.3g} times, limit "
        f"{options[_limit(explosion)]:g}. "
    )
    if explosion.loss is not None:
        message += f"The loss went from {explosion.loss[0]:.4g} to {explosion.loss[1]:.4g}. "
    if explosion.fatal:
        most = max(s.grad_norm or 0.0 for s in explosion.steps[explosion.at + 1 :])
        message += f"On all {len(explosion.steps) - explosion.at - 1} steps behind it the norm is at most {most:.3g}. "
    if explosion.unbounded and explosion.loss is not None:
        times = abs(explosion.loss[1]) / max(explosion.loss[0], 1e-30)
        message += (
            f"That is {times:.3g} times below zero what it began with (limit {options['unbounded']:g}): no bound. "
        )
    clips = first.clip_norm is not None and 0.0 < first.clip_norm < math.inf  # infinite: to learn the norm
    message += f"Clipping at {first.clip_norm:g} was on." if clips else "Gradients are not clipped."
    raised = explosion.raised
    if raised is not None:
        message += f" The learning rate had been raised from {raised[0]:.3g} to {raised[1]:.3g}."
    if explosion.sudden:
        message += " Norm and loss jumped in the same step, behind an ordinary update: was the loss changed there?"
    elif explosion.passed:
        message += " By the last steps norm and loss have come back down: the run got over it."
    if row is not None:
        message += f" The gradient of `{_name(row)}` grew most, by a factor of {grown:.3g}."
    return message


def _name(row: TensorRow) -> str:
    return ".".join(p for p in (row.module, row.name) if p) or row.root


def _culprit(view: RunView, explosion: Explosion) -> tuple[TensorRow | None, float, Sequence[TensorRow]]:
    """The weight gradient whose norm grew most between the last sampled step before and the first one after."""
    later = explosion.steps[explosion.at :]
    before = next((s for s in reversed(explosion.steps[: explosion.at]) if s.sampled), None)
    after = next((s for s in (reversed(later) if explosion.diverged else later) if s.sampled), None)
    if before is None or after is None:
        return None, 0.0, ()
    return grown_most(view.rows(explosion.process, before.step), view.rows(explosion.process, after.step))


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
        RuleOption("undone_share", 0.25, "fraction", "Share of the loss's progress that must be undone.",
                   "Chosen empirically: without it the loss took no harm."),
        RuleOption("diverged", 1000.0, "times the first",
                   "Last losses and gradient norms (medians of five) of a run that has diverged without a jump.",
                   "Chosen empirically: far beyond what warm-up, annealed terms and growing episodes make of a loss.",
                   10.0),
        RuleOption("fatal", 1000.0, "times the median",
                   "One gradient norm this far above the median before it, and all that follow as far below.",
                   "Chosen empirically: a rare batch comes alone, and a task that is learnt has no such step before "
                   "it.", 30.0),
        RuleOption("unbounded", 300.0, "times the first",
                   "Loss below zero (lowest median of five) against the magnitude of the first five, for one without "
                   "a bound.", "Chosen empirically: likelihoods of many dimensions begin as large as they end.", 10.0),
        RuleOption("least_loss", 100.0, "loss", "A smaller loss is not taken for diverged, whatever it began with.",
                   "Chosen empirically: zero-initialised heads and sparse rewards begin with losses near zero."),
        RuleOption("kept_steps", 8.0, "steps",
                   "In a row whose gradients were added to what the step before had applied.",
                   "Chosen empirically: the recorder speaks from the eighth on, and nobody accumulates over steps on "
                   "purpose.", 2.0),
        RuleOption("min_steps", 8.0, "steps", "Steps before it, for a baseline.", minimum=2.0),
    ),
    kinds=(),
    columns=("sum_sq", "order"),
    check=check,
    step_columns=("grad_norm", "loss", "skipped"),
)  # fmt: skip
