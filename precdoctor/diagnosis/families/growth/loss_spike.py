"""PD605: the loss jumps, and a tensor, the gradient norm or the learning rate left its range before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from precdoctor.diagnosis.analyses.healthy_steps import is_well
from precdoctor.diagnosis.analyses.histories import after_an_ordinary_update, by_optimizer, spread
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.divergence.onset import course_left
from precdoctor.diagnosis.divergence.report import root_of_rise
from precdoctor.diagnosis.survey.frames import firsts, groups, keys, rows_of
from precdoctor.diagnosis.survey.rows import BACKWARD_KINDS, FORWARD_KINDS, Key, TensorRow, location, tensor_evidence
from precdoctor.diagnosis.survey.step_facts import StepFacts, norms_of
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView

PAGE = RulePage(
    finds="""
A loss that leaves the range of the steps before and loses at least a quarter of the progress since the start. The range
ends `deviations` robust standard deviations above the median; the deviation that the highest tenth implies counts if it
is larger. In the recorded steps up to the jump, the rule searches the tensor that left its own range first: amax more
than `moved` binades above its median, and out of range up to the spike. The earliest step counts, then the earliest
tensor in execution order.

The finding is a warning if the loss stays up for three of five steps and such a tensor moved. It is also a warning if
the loss stays up, the update before it was extraordinary (gradient norm or rate more than twice its median), and the
norm left its range (`norm_factor`). Otherwise it is information: if nothing moved, the objective may have changed on
purpose (a term switched on, another stage), or the batch changed its size. A single high step may be a batch; it is
reported only if it loses all progress and doubles the loss. If one of the three updates before the jump used a learning
rate more than `rate_factor` times all before it, the finding names that as the reason.
""",
    matters="""
The consequences of a spike (weights far from where they were, a second moment that is too large for a thousand steps)
cost more than the spike. Check the tensor that moved before the loss: a batch, an embedding, the logits of one
attention layer.
""",
    example="""
Loss 2.31, 2.29, 2.30, then 7.9 at step 412; `blocks.3.attn.qkv` output had gone from 14 to 310 at step 410.
""",
    remedy="""
Resume from before the step at which the tensor moved, without that batch, with a lower learning rate, or with clipped
gradients. If the same layer moves again, normalise its input or lower only its rate.
""",
    confidence="""
0.8 if a tensor moved before the loss or with it, 0.65 if none did or too few steps were recorded to know its range.
Losses of each optimizer are evaluated separately.
""",
    references=(
        "Chowdhery et al., PaLM, arXiv:2204.02311 (loss spikes; skipping batches around them)",
        "Molybog et al., A Theory on Adam Instability in Large-Scale Machine Learning, arXiv:2304.09871",
    ),
)
#: Steps before a jump that make its range, and steps after it that show whether the loss stays up. Chosen empirically.
_WINDOW, _AFTER = 32, 5
#: Number of steps before the jump that are searched for its cause: a cause acts within a few updates. Chosen
#: empirically.
_BEFORE = 8
#: How many of the ``_AFTER`` steps the loss must stay up on.
_STAY = 3
#: Least number of recorded values that make the range of a tensor.
_KNOWN = 4
#: Updates before the jump in which a spike of the learning rate is searched. Chosen empirically.
_RATE_WINDOW = 3
#: Least height of a jump, as a share of the level: without progress any wobble would be one. Chosen empirically.
_LEAST_HARM = 0.25
#: Ninth decile of the standard normal distribution, in standard deviations.
_NINTH_DECILE = 1.2816
#: Factor between batch sizes from which the loss may have another scale. Chosen empirically.
_RESIZED = 1.5


@dataclass(frozen=True)
class _Spike:
    """A jump of the loss at index ``at`` of ``steps``, from ``level`` (with ``deviation``) to ``peak``.

    ``stays``: the loss stays up afterwards.
    """

    process: Process
    steps: Sequence[StepFacts]
    at: int
    level: float
    deviation: float
    peak: float
    stays: bool

    @property
    def first(self) -> StepFacts:
        return self.steps[self.at]

    @property
    def deviations(self) -> float:
        """Height of the jump in standard deviations."""
        return (self.peak - self.level) / self.deviation


@dataclass(frozen=True)
class _MovedTensor:
    """A tensor that left its range; ``usual``: its median amax before."""

    row: TensorRow
    usual: float


def check(view: RunView, options: Options) -> Checked:
    """One finding: the spike that stays, else the highest."""
    series = {
        key: [s for s in steps if s.loss is not None and is_well(view, key[0], s)]
        for key, steps in by_optimizer(view).items()
    }
    count = sum(map(len, series.values()))
    if not count:
        return Checked.not_applicable("no loss was recorded")
    spikes = [s for (process, _), steps in series.items() if (s := _spike(process, steps, options)) is not None]
    if not spikes:
        return Checked((), f"{plural(count, 'loss')}, none out of range")
    worst = max(spikes, key=lambda s: (s.stays, s.deviations))
    reason = f"{plural(len(spikes), 'spike')} in {plural(count, 'loss')}"
    return Checked([_finding(view, worst, options)], reason)


def _spike(process: Process, steps: Sequence[StepFacts], options: Options) -> _Spike | None:
    """Return the first jump of the loss that stays, else the highest that undid all progress; None without any."""
    losses = [s.loss or 0.0 for s in steps]
    found: _Spike | None = None
    for i in range(int(options["min_steps"]), len(losses)):
        before = losses[max(0, i - _WINDOW) : i]
        level, deviation = spread(before)
        if deviation == 0.0:
            continue  # a constant (a term with weight zero) has no range to leave
        deviation = max(deviation, _upper_deviation(before, level))
        progress = max(0.0, median(losses[:8]) - level)
        harm = max(options["undone_share"] * progress, _LEAST_HARM * abs(level))
        threshold = level + max(options["deviations"] * deviation, harm)
        if losses[i] <= max(threshold, *before):
            continue
        after = losses[i : i + _AFTER]
        stays = sum(x > threshold for x in after) >= _STAY
        spike = _Spike(process, steps, i, level, deviation, max(after), stays)
        if stays:
            return spike
        severe = losses[i] > level + max(progress, abs(level))  # all progress lost, and the loss doubled
        if severe and (found is None or spike.peak > found.peak):
            found = spike
    return found


def _upper_deviation(losses: Sequence[float], level: float) -> float:
    """The standard deviation that the highest tenth implies; for a normal distribution, the standard deviation.

    A loss of rare events (rewards, collisions) is low on most steps and high on some. The median deviation measures the
    low steps only: by it, every cluster of such events would be a jump.
    """
    return (quantiles(losses, n=10, method="inclusive")[-1] - level) / _NINTH_DECILE


def _first_moved(view: RunView, spike: _Spike, options: Options) -> tuple[_MovedTensor | None, int]:
    """Return the tensor that left its range first, up to the spike, and the number of steps that make up that range.

    None instead of the tensor if none left its range, or too few steps are known.
    """
    sampled = [s.step for s in spike.steps[: spike.at + 1] if s.sampled]
    recent = [s for s in sampled if s > spike.steps[max(0, spike.at - _BEFORE)].step]
    usual_steps = [s for s in sampled if s not in recent][-_WINDOW:]
    if len(usual_steps) < _KNOWN or not recent:
        return None, len(usual_steps)
    process = [("rank", "==", spike.process.rank), ("attempt", "==", spike.process.attempt)]
    kinds, usual = (*FORWARD_KINDS, *BACKWARD_KINDS), [*process, ("amax", ">", 0.0)]
    frame = view.measured((), kinds, columns=("amax",), steps=usual_steps, where=usual)
    tensors, amaxes = groups(frame, IDENTITY), frame["amax"].to_numpy()
    usual_amaxes = dict(zip(keys(frame.iloc[firsts(tensors)]), map(amaxes.__getitem__, rows_of(tensors)), strict=True))
    # Gradients act through the update they make: after an ordinary update no gradient is to blame.
    innocent = after_an_ordinary_update(spike.steps, spike.at)
    moved: dict[int, dict[Key, _MovedTensor]] = {step: {} for step in recent}
    for step in recent:
        for row in view.rows(spike.process, step):
            before = usual_amaxes.get(row.key, ())
            harmless = row.kind in BACKWARD_KINDS and (innocent or step == spike.first.step)
            if not row.amax or len(before) < _KNOWN or harmless or row.amax <= max(before):
                continue
            logs = [math.log2(a) for a in before]
            middle, deviation = spread(logs)
            amax = math.log2(row.amax)
            if amax > middle + max(options["moved"], 4.0 * deviation):
                moved[step][row.key] = _MovedTensor(row, 2.0**middle)
    return next(_lasting_moves(moved), None), len(usual_steps)


def _lasting_moves(moved: Mapping[int, Mapping[Key, _MovedTensor]]) -> Iterator[_MovedTensor]:
    """Yield the tensors that moved and did not come back, in order of time; gradients act at once and need not stay."""
    for step, found in moved.items():
        for key, each in found.items():
            gradient = each.row.kind in BACKWARD_KINDS
            if gradient or all(key in later for s, later in moved.items() if s > step):
                yield each


def _batch_growth(view: RunView, spike: _Spike) -> float:
    """Return the factor by which the batch grew at the spike, from the numbers of elements of outputs; 1 if unknown."""
    before = next((s.step for s in reversed(spike.steps[: spike.at]) if s.sampled), None)
    after = next((s.step for s in spike.steps[spike.at :] if s.sampled), None)
    if before is None or after is None:
        return 1.0
    old, new = ({r.key: r.numel for r in view.rows(spike.process, s) if r.kind == "output"} for s in (before, after))
    ratios = [new[k] / n for k, n in old.items() if n and new.get(k)]
    return median(ratios) if ratios else 1.0


def _norm_rises(spike: _Spike, options: Options) -> bool:
    """Return whether the gradient norm left its range with the loss, after an update of unusual size or rate."""
    before = norms_of(spike.steps[max(0, spike.at - _WINDOW) : spike.at])
    after = norms_of(spike.steps[spike.at : spike.at + _AFTER])
    if after_an_ordinary_update(spike.steps, spike.at):
        return False
    return bool(before and after) and max(after) > options["norm_factor"] * median(before)


def _finding(view: RunView, spike: _Spike, options: Options) -> Finding:
    moved, known = _first_moved(view, spike, options)
    resized = _batch_growth(view, spike)
    rate = _rate_spike(spike, options)
    moved = None if rate is not None and moved is not None and moved.row.step < rate.step else moved
    unusual = not _is_resized(resized) and (moved is not None or _norm_rises(spike, options))
    heavy = spike.stays and (unusual or rate is not None)
    first = spike.first
    evidence: dict[str, Any] = {
        "loss": {"before": spike.level, "peak": spike.peak},
        "deviations": spike.deviations,
        "limit": options["deviations"],
        "last_finite_step": _last_sound_step(spike, rate) if spike.stays else None,
        "last_bad_step": first.step,
        "confidence_reason": "a tensor moved with it" if moved is not None else "no recorded tensor moved first",
    }
    because = ""
    if moved is not None:
        row = moved.row
        evidence |= tensor_evidence(row)
        evidence["moved_first"] = {"step": row.step, "amax": row.amax, "usual_amax": moved.usual}
        because = f"; {row.label} moved first"
    if rate is not None:
        evidence["rate_spike"] = {"step": rate.step, "lr": rate.to, "highest_lr_before": rate.before}
        because = f", after a learning rate {rate.to / rate.before:.3g} times any before"
    root = "" if rate is not None else root_of_rise(view, spike.process, spike.steps, spike.at)
    jumps = f"the loss jumps from {spike.level:.3g} to {spike.peak:.3g} at step {first.step}{because}"
    return RULE.finding(
        severity=None if heavy else Severity.INFO,
        confidence=0.8 if moved is not None else 0.65,
        title=f"{root}; {jumps}" if root else jumps,
        message=(rate.words() if rate is not None else "") + _message(spike, moved, known, resized, options),
        location=_location(spike, moved),
        evidence=evidence,
        prescription=_prescribe(spike, moved) if rate is None else _prescribe_rate(spike, rate),
    )


def _location(spike: _Spike, moved: _MovedTensor | None) -> Location:
    if moved is None:
        return replace(location(None, Phase.FORWARD, spike.process, spike.first.step), kind="loss")
    phase = Phase.BACKWARD if moved.row.kind in BACKWARD_KINDS else Phase.FORWARD
    return location(moved.row, phase, spike.process, moved.row.step)


@dataclass(frozen=True)
class _RateSpike:
    """A learning rate far above all before it, in one of the updates just before the loss jumped."""

    step: int
    before: float
    to: float

    def words(self) -> str:
        return f"At step {self.step} the learning rate rose to {self.to:.3g}; before it was at most {self.before:.3g}. "


def _last_sound_step(spike: _Spike, rate: _RateSpike | None) -> int | None:
    """Return the last step before the cause of the jump; None if the cause is in the first step."""
    begun = spike.steps[course_left(spike.steps, spike.at)].step
    begun = begun if rate is None else min(begun, rate.step)
    return max((s.step for s in spike.steps if s.step < begun), default=None)


def _rate_spike(spike: _Spike, options: Options) -> _RateSpike | None:
    """Return the first learning rate far above all older ones, in the last updates before the jump, else None."""
    rates = [(s.step, s.lr) for s in spike.steps[: spike.at] if s.lr]
    newest, older = rates[-_RATE_WINDOW:], rates[:-_RATE_WINDOW]
    if len(older) < options["min_steps"] // 2:
        return None
    highest = max(lr for _, lr in older)
    return next((_RateSpike(step, highest, lr) for step, lr in newest if lr > options["rate_factor"] * highest), None)


def _prescribe_rate(spike: _Spike, rate: _RateSpike) -> Prescription:
    return Prescription(
        title=f"resume from a checkpoint before step {rate.step} at a rate of {rate.before:.3g}, or warm up to "
        f"{rate.to:.3g}: loss {spike.peak:.3g} -> {spike.level:.3g}",
        change={"resume_before": rate.step, "lr": {"from": rate.to, "to": rate.before}},
        predicted={"loss": {"from": spike.peak, "to": spike.level}},
        snippet=snippets.group_option("lr", repr(rate.before)),
    )


def _is_resized(resized: float) -> bool:
    return not 1.0 / _RESIZED < resized < _RESIZED


def _message(spike: _Spike, moved: _MovedTensor | None, known: int, resized: float, options: Options) -> str:
    first = spike.first
    message = (
        f"The loss rose from {spike.level:.4g} (median of up to {_WINDOW} steps before) to {spike.peak:.4g} at step "
        f"{first.step}, {spike.deviations:.3g} standard deviations above (limit {options['deviations']:g}), "
        + ("and stayed up. " if spike.stays else "and came down again. ")
    )
    if _is_resized(resized):
        message += f"The batch is {resized:.3g} times as large from there on, and so may be a loss that is a sum. "
    if moved is not None:
        when = f"at step {moved.row.step}" if moved.row.step < first.step else "in the same step, before all others"
        row = moved.row
        return (
            f"{message}First to leave its range, {when}: {row.label}, amax {row.amax:.4g}, usually {moved.usual:.3g}."
        )
    if known < _KNOWN:
        return message + "Too few steps before it were recorded to find the tensor that moved first."
    return message + (
        "No recorded tensor left its range before it: "
        + (
            "unless the loss or its terms were changed there, check the data from that step on."
            if spike.stays
            else "check the data and labels of that batch first."
        )
    )


def _prescribe(spike: _Spike, moved: _MovedTensor | None) -> Prescription:
    if moved is not None and moved.row.kind == "batch":
        return Prescription(
            title=f"clip the input at {moved.usual:.3g}, or skip such batches: amax {moved.row.amax:.3g} -> "
            f"{moved.usual:.3g}",
            change={"input_limit": moved.usual},
            predicted={"batch_amax": {"from": moved.row.amax, "to": moved.usual}},
            snippet=f"x = x.clamp(-{moved.usual:.4g}, {moved.usual:.4g})  # before model(x)\n",
        )
    until = spike.steps[max(0, spike.at - 1)].step if moved is None else max(0, moved.row.step - 1)
    return Prescription(
        title=f"resume from a checkpoint at or before step {until}, with a tenth of the rate around step "
        f"{spike.first.step}: loss {spike.peak:.3g} -> {spike.level:.3g}",
        change={"resume_before": until, "lr_factor": 0.1},
        predicted={"loss": {"from": spike.peak, "to": spike.level}},
        snippet=snippets.lower_rate_and_clip(),
    )


RULE = Rule(
    code="PD605",
    name="loss-spike",
    severity=Severity.WARNING,
    triage=Triage.LEARNING_RATE,
    page=PAGE,
    options=(
        RuleOption("deviations", 10.0, "robust standard deviations", "Height above the median of the 32 steps before.",
                   "Chosen empirically: losses of small batches have heavy tails; healthy runs exceed 6.", 1.0),
        RuleOption("undone_share", 0.25, "fraction", "Minimum share of the progress since the start that is lost.",
                   "Chosen empirically: the wobble of a loss near zero is not a spike."),
        RuleOption("moved", 1.0, "binades", "A tensor this far above its median amax has left its range.",
                   "Amax commonly varies by less than a factor of two between batches."),
        RuleOption("norm_factor", 4.0, "times", "A gradient norm this far above its median has left its range.",
                   "Chosen empirically: twice the factor of `moved`, because a norm varies more than an amax.", 1.0),
        RuleOption("rate_factor", 4.0, "times",
                   "A learning rate this far above all before it explains a jump within three updates.",
                   "Chosen empirically: a warm-up of at least eight steps rises by less per step.", 1.0),
        RuleOption("min_steps", 16.0, "steps", "Minimum number of steps before it, for a range.", minimum=8.0),
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
