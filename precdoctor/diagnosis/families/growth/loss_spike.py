"""PD605: the loss jumps, and some tensor moved first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.divergence.onset import course_left
from precdoctor.diagnosis.divergence.report import root_of_rise
from precdoctor.diagnosis.survey.healthy_steps import is_well
from precdoctor.diagnosis.survey.histories import after_an_ordinary_update, by_optimizer, spread
from precdoctor.diagnosis.survey.rows import (
    BACKWARD_KINDS,
    FORWARD_KINDS,
    Key,
    TensorRow,
    path_evidence,
    range_evidence,
)
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A loss that leaves the range of the steps before (more than `deviations` robust standard deviations above their median,
or of those that their highest tenth implies, where that is more) and undoes at least a quarter of the progress made
since the start. The recorded steps up to it are searched for the tensor that left its own range first: amax more than
`moved` binades above its median; earliest step, then earliest in execution order. If the loss stays up for three of
five steps, and such a tensor moved or the update before it was out of the ordinary (gradient norm or rate more than
twice its median) and the norm left its range (`norm_factor`), it is a warning. Where nothing moved, the objective may
have been changed on purpose (a term switched on, another stage), and a single high step may be a batch: both are
information, the latter only when it undoes all progress and doubles the loss. So is a jump at which the batch changed
its size. A tensor has moved when it stays out of range up to the spike. A learning rate more than `rate_factor` times
all before it, used in one of the three updates before the jump, is named as the reason.
""",
    matters="""
What a spike leaves behind (weights thrown away from where they were, a second moment that is too large for a thousand
steps) costs more than the spike. The tensor that moved before the loss did is where to look: a batch, an embedding, the
logits of one attention layer.
""",
    example="""
Loss 2.31, 2.29, 2.30, then 7.9 at step 412; `blocks.3.attn.qkv` output had gone from 14 to 310 at step 410.
""",
    remedy="""
Resume from before the step at which the tensor moved, with that batch left out, a lower learning rate, or gradients
clipped. If the same layer moves again, normalise its input or lower its rate alone.
""",
    confidence="""
0.8 when a tensor was seen to move before the loss or with it, 0.65 when none did or too few steps were recorded to
know its range. Losses of each optimizer are judged apart.
""",
    references=(
        "Chowdhery et al., PaLM, arXiv:2204.02311 (loss spikes; skipping batches around them)",
        "Molybog et al., A Theory on Adam Instability in Large-Scale Machine Learning, arXiv:2304.09871",
    ),
)
_WINDOW, _AFTER, _BEFORE = 32, 5, 8
#: Updates before the jump among which one at another learning rate is looked for.
_RATE_WINDOW = 3
#: Of the standard normal distribution.
_NINTH_DECILE = 1.2816
#: A batch this much larger or smaller is another batch size, not a last batch left over.
_RESIZED = 1.5


@dataclass(frozen=True)
class _Spike:
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


@dataclass(frozen=True)
class _Moved:
    row: TensorRow
    usual: float


def check(view: RunView, options: Options) -> Checked:
    """One finding: the spike that stays, else the highest."""
    series = {
        key: [s for s in steps if s.loss is not None and math.isfinite(s.loss) and is_well(view, key[0], s)]
        for key, steps in by_optimizer(view).items()
    }
    count = sum(map(len, series.values()))
    if not count:
        return Checked.not_applicable("no loss was recorded")
    spikes = [s for (process, _), steps in series.items() if (s := _spike(process, steps, options)) is not None]
    if not spikes:
        return Checked((), f"{plural(count, 'loss')}, none out of range")
    worst = max(spikes, key=lambda s: (s.stays, (s.peak - s.level) / max(s.deviation, 1e-12)))
    return Checked([_finding(view, worst, options)], f"{plural(len(spikes), 'spike')} in {plural(count, 'loss')}",
                   Status.FAILED)  # fmt: skip


def _spike(process: Process, steps: Sequence[StepFacts], options: Options) -> _Spike | None:
    losses = [s.loss or 0.0 for s in steps]
    found: _Spike | None = None
    for i in range(int(options["min_steps"]), len(losses)):
        before = losses[max(0, i - _WINDOW) : i]
        level, deviation = spread(before)
        if deviation == 0.0:
            continue  # a constant (a term with weight zero) has no range to leave
        deviation = max(deviation, _upper_deviation(before, level))
        progress = max(0.0, median(losses[:8]) - level)
        harm = max(options["undone_share"] * progress, 0.25 * abs(level))
        threshold = level + max(options["deviations"] * deviation, harm)
        if losses[i] <= max(threshold, *before):
            continue
        after = losses[i : i + _AFTER]
        stays = len(after) >= 3 and sum(x > threshold for x in after) >= 3
        spike = _Spike(process, steps, i, level, deviation, max(after), stays)
        if stays:
            return spike
        worth_telling = losses[i] > level + max(progress, abs(level))  # all progress undone, and doubled
        if worth_telling and (found is None or spike.peak > found.peak):
            found = spike
    return found


def _upper_deviation(losses: Sequence[float], level: float) -> float:
    """The standard deviation that the highest tenth implies; of a normal distribution, that of all.

    A loss of rare events (rewards, collisions) is low on most steps and high on some: the median deviation sees the
    former only, and every cluster of such events would be a jump.
    """
    return (quantiles(losses, n=10, method="inclusive")[-1] - level) / _NINTH_DECILE


def _first_moved(view: RunView, spike: _Spike, options: Options) -> tuple[_Moved | None, int]:
    """The tensor that left its range first, up to the spike; and how many steps made up that range."""
    sampled = [s.step for s in spike.steps[: spike.at + 1] if s.sampled]
    recent = [s for s in sampled if s > spike.steps[max(0, spike.at - _BEFORE)].step]
    usual_steps = [s for s in sampled if s not in recent][-_WINDOW:]
    if len(usual_steps) < 4 or not recent:
        return None, len(usual_steps)
    seen: dict[Key, list[float]] = {}
    columns = ("root", "module", "kind", "name", "call", "amax")
    for frame in view.scan(columns, (*FORWARD_KINDS, *BACKWARD_KINDS), steps=usual_steps):
        mine = frame[(frame["rank"] == spike.process.rank) & (frame["attempt"] == spike.process.attempt)]
        known = mine[mine["amax"] > 0.0]
        for root, module, kind, name, call, amax in zip(*(known[c] for c in columns), strict=True):
            seen.setdefault((str(root), str(module), str(kind), str(name), int(call)), []).append(math.log2(amax))
    # Gradients work through the update they make: behind an ordinary one they are innocent.
    innocent = after_an_ordinary_update(spike.steps, spike.at)
    moved: dict[int, dict[Key, _Moved]] = {step: {} for step in recent}
    for step in recent:
        for row in view.rows(spike.process, step):
            logs = seen.get(row.key, ())
            harmless = row.kind in BACKWARD_KINDS and (innocent or step == spike.first.step)
            if not row.amax or len(logs) < 4 or harmless:
                continue
            middle, deviation = spread(logs)
            amax = math.log2(row.amax)
            if amax > middle + max(options["moved"], 4.0 * deviation) and amax > max(logs):
                moved[step][row.key] = _Moved(row, 2.0**middle)
    return next(_lasting(moved), None), len(usual_steps)


def _lasting(moved: Mapping[int, Mapping[Key, _Moved]]) -> Iterator[_Moved]:
    """In order of time what moved and did not come back; a gradient has done its work at once."""
    for step, found in moved.items():
        for key, each in found.items():
            gradient = each.row.kind in BACKWARD_KINDS
            if gradient or all(key in later for s, later in moved.items() if s > step):
                yield each


def _resized(view: RunView, spike: _Spike) -> float:
    """By which factor the batch grew or shrank at the spike, as the numbers of elements tell; 1 when not known."""
    before = next((s.step for s in reversed(spike.steps[: spike.at]) if s.sampled), None)
    after = next((s.step for s in spike.steps[spike.at :] if s.sampled), None)
    if before is None or after is None:
        return 1.0
    old, new = ({r.key: r.numel for r in view.rows(spike.process, s) if r.kind == "output"} for s in (before, after))
    ratios = [new[k] / n for k, n in old.items() if n and new.get(k)]
    return median(ratios) if ratios else 1.0


def _norm_rises(spike: _Spike, options: Options) -> bool:
    """Whether the gradient norm left its range with the loss, and the update before had announced it."""
    before = [s.grad_norm for s in spike.steps[max(0, spike.at - _WINDOW) : spike.at] if s.grad_norm is not None]
    after = [s.grad_norm for s in spike.steps[spike.at : spike.at + _AFTER] if s.grad_norm is not None]
    if after_an_ordinary_update(spike.steps, spike.at):
        return False
    return bool(before and after) and max(after) > options["norm_factor"] * median(before)


def _finding(view: RunView, spike: _Spike, options: Options) -> Finding:
    moved, known = _first_moved(view, spike, options)
    resized = _resized(view, spike)
    rate = _rate_spike(spike, options)
    moved = None if rate is not None and moved is not None and moved.row.step < rate.step else moved
    heavy = spike.stays and not _other_size(resized) and (moved is not None or _norm_rises(spike, options))
    heavy = heavy or (spike.stays and rate is not None)
    first, row = spike.first, moved.row if moved is not None else None
    above = _deviations(spike)
    evidence: dict[str, Any] = {
        "loss": {"before": spike.level, "peak": spike.peak},
        "deviations": above if math.isfinite(above) else None,
        "limit": options["deviations"],
        "last_finite_step": _sound(spike, rate) if spike.stays else None,
        "last_bad_step": first.step,
        "confidence_reason": "a tensor moved with it" if moved is not None else "no tensor was seen to move first",
    }
    if row is not None:
        evidence |= {"range": range_evidence(row), "path": path_evidence([row])}
        evidence["moved_first"] = {"step": row.step, "amax": row.amax, "usual_amax": moved.usual if moved else None}
    because = f"; {row.label} moved first" if row is not None else ""
    if rate is not None:
        evidence["rate_spike"] = {"step": rate.step, "lr": rate.to, "highest_lr_before": rate.before}
        because = f", after a learning rate {rate.to / rate.before:.3g} times any before"
    root = "" if rate is not None else root_of_rise(view, spike.process, spike.steps, spike.at)
    jumps = f"the loss jumps from {spike.level:.3g} to {spike.peak:.3g} at step {first.step}{because}"
    return RULE.finding(
        severity=Severity.WARNING if heavy else Severity.INFO,
        confidence=0.8 if moved is not None else 0.65,
        title=f"{root}; {jumps}" if root else jumps,
        message=(rate.words() if rate is not None else "") + _message(spike, moved, known, resized, options),
        location=Location(
            row.root if row is not None else None,
            row.module if row is not None else None,
            (row.module_class or None) if row is not None else None,
            row.kind if row is not None else "loss",
            Phase.BACKWARD if row is not None and row.kind in BACKWARD_KINDS else Phase.FORWARD,
            spike.process.rank,
            row.step if row is not None else first.step,
        ),
        evidence=evidence,
        prescriptions=(_prescribe(spike, moved) if rate is None else _prescribe_rate(spike, rate),),
    )


@dataclass(frozen=True)
class _RateSpike:
    """A learning rate beyond all before it, in one of the updates just before the loss jumped."""

    step: int
    before: float
    to: float

    def words(self) -> str:
        """A sentence."""
        return (
            f"At step {self.step} the learning rate rose to {self.to:.3g}; it had been {self.before:.3g} at most until "
            "then. "
        )


def _sound(spike: _Spike, rate: _RateSpike | None) -> int | None:
    """The last step before what threw the run off; None where that is the first one."""
    begun = spike.steps[course_left(spike.steps, spike.at)].step
    begun = begun if rate is None else min(begun, rate.step)
    return max((s.step for s in spike.steps if s.step < begun), default=None)


def _rate_spike(spike: _Spike, options: Options) -> _RateSpike | None:
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
        snippet=f"for group in optimizer.param_groups:\n    group['lr'] = {rate.before!r}\n",
    )


def _other_size(resized: float) -> bool:
    return not 1.0 / _RESIZED < resized < _RESIZED


def _deviations(spike: _Spike) -> float:
    return (spike.peak - spike.level) / spike.deviation if spike.deviation > 0.0 else math.inf


def _message(spike: _Spike, moved: _Moved | None, known: int, resized: float, options: Options) -> str:
    first = spike.first
    message = (
        f"The loss rose from {spike.level:.4g} (median of up to {_WINDOW} steps before) to {spike.peak:.4g} at step "
        f"{first.step}, {_deviations(spike):.3g} standard deviations above (limit {options['deviations']:g}), "
        + ("and stayed up. " if spike.stays else "and came down again. ")
    )
    if _other_size(resized):
        message += f"The batch is {resized:.3g} times as large from there on, and so may be a loss that is a sum. "
    if moved is not None:
        when = f"at step {moved.row.step}" if moved.row.step < first.step else "in the same step, first of all tensors"
        return message + (
            f"First to leave its range: {moved.row.label}, {when}: amax {moved.row.amax:.4g}, usually "
            f"{moved.usual:.3g}."
        )
    if known < 4:
        return message + "Too few steps before it were recorded to say which tensor moved first."
    return message + (
        "No recorded tensor left its range before it: "
        + (
            "unless the loss or its terms were changed there, look at the data from that step on."
            if spike.stays
            else "the data or labels of that batch are the first guess."
        )
    )


def _prescribe(spike: _Spike, moved: _Moved | None) -> Prescription:
    row = moved.row if moved is not None else None
    if moved is not None and moved.row.kind == "batch":
        return Prescription(
            title=f"clip the input at {moved.usual:.3g}, or leave such batches out: amax {moved.row.amax:.3g} -> "
            f"{moved.usual:.3g}",
            change={"input_limit": moved.usual},
            predicted={"batch_amax": {"from": moved.row.amax, "to": moved.usual}},
            snippet=f"x = x.clamp(-{moved.usual:.4g}, {moved.usual:.4g})  # before model(x)\n",
        )
    until = spike.steps[max(0, spike.at - 1)].step if row is None else max(0, row.step - 1)
    return Prescription(
        title=f"resume from a checkpoint at or before step {until} with the rate at a tenth around step "
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
                   "Chosen empirically: losses of small batches have heavy tails; 6 is passed by healthy runs.", 1.0),
        RuleOption("undone_share", 0.25, "fraction", "Share of the progress since the start that must be undone.",
                   "Chosen empirically: the wobble of a loss near zero is not a spike."),
        RuleOption("moved", 1.0, "binades", "A tensor this far above its median amax has left its range.",
                   "Amax commonly varies by less than a factor of two between batches."),
        RuleOption("norm_factor", 4.0, "times", "A gradient norm this far above its median has left its range.",
                   "Chosen empirically: twice the factor of `moved`, for a norm varies more than an amax.", 1.0),
        RuleOption("rate_factor", 4.0, "times",
                   "A learning rate this far above all before it is to blame for a jump within three updates.",
                   "Chosen empirically: a warm-up of eight steps or more rises by less from one step to the next.",
                   1.0),
        RuleOption("min_steps", 16.0, "steps", "Steps before it, for a range.", minimum=8.0),
    ),
    kinds=(),
    columns=("amax", "order"),
    check=check,
    step_columns=("loss",),
)  # fmt: skip
