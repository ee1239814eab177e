"""PD303: a loss scale that stays so low that FP16 gradients are subnormal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.advice.larger_loss_scale import out_of_subnormals, subnormal_share
from precdoctor.diagnosis.analyses.gradient_underflow import GradientSeries, GradientSurvey, is_faint, survey
from precdoctor.diagnosis.analyses.loss_scales import growth_interval, is_dynamic, scaled_steps
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.loss_scaling.overflowing_layer import Overflow
from precdoctor.diagnosis.families.loss_scaling.scale_level import (
    SUBNORMAL_OPTIONS,
    LostGradient,
    higher_level,
    largest_gradient,
    subnormal_evidence,
)
from precdoctor.diagnosis.survey.rows import Key, TensorRow, gradient_evidence, location
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP16

PAGE = RulePage(
    finds="""
A loss scale, by a `GradScaler` or by hand, that leaves FP16 gradients among the subnormals: below 2^-14 each binade
costs one of the 11 significant bits. The scale could be at least `room` binades larger without an overflow on any
recorded step, or only one layer keeps it low while a gradient has fewer than `enough_bits` left. Such a scale comes
from a small initial value, from one bad batch that halved it several times, or is a constant; a stock scaler needs 2000
clean steps for each doubling. A gradient counts if a share of its magnitude is subnormal, so that no few elements carry
it, and if it keeps fewer than `fine_bits` significant bits on average: BF16 has no more. Below `enough_bits` the
finding is a warning, otherwise information. If elements are lost altogether, PD201 or PD202 reports it and includes
this finding.
""",
    matters="""
Despite the scaler, gradients lose bits and then elements. Nothing shows it: the loss is finite and no step is skipped.
At the pace of the growth interval, the scale takes as long as the run to recover.
""",
    example="""
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)   # 16 doublings to the stock start: 32,000 steps
    scaler = torch.amp.GradScaler("cuda")                   # starts at 65536 and comes down within a few steps
""",
    remedy="""
Start at the scale in the finding, or at the stock 65536: a halving takes one step, a doubling two thousand. After a bad
batch, restore it with `scaler.update(new_scale)`. Replace a constant by `GradScaler`.
""",
    confidence="""
0.9: subnormal elements are counted, and so is the room above. 0.7 if fewer than four steps were sampled.
""",
    references=(
        "PyTorch documentation: torch.amp.GradScaler (growth_interval 2000)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2",
    ),
)


@dataclass(frozen=True)
class _ScaleHistory:
    """The scaled steps of one process, and the growth interval of its scaler."""

    process: Process
    steps: Sequence[StepFacts]
    interval: float | None

    @property
    def scale(self) -> float:
        return self.steps[-1].loss_scale or 1.0

    def headroom(self, gradients: GradientSurvey) -> float:
        """The smallest headroom of any gradient on these steps, in binades."""
        own = {s.step for s in self.steps}
        return min((h for (_, step), h in gradients.headrooms.items() if step in own), default=gradients.headroom)

    def words(self) -> str:
        """The history of the scale, in one or two sentences."""
        highest = max(s.loss_scale or 0.0 for s in self.steps)
        fell = f" It was at {highest:g} before." if highest > self.scale else ""
        if not is_dynamic(self.steps):
            return f"The loss scale, {self.scale:g}, is a constant.{fell}"
        every = f"every {self.interval:,.0f} clean steps" if self.interval else "every so many clean steps"
        return f"The loss scale is {self.scale:g} after {plural(len(self.steps), 'step')} and doubles {every}.{fell}"


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the gradient that keeps the fewest significant bits."""
    histories = [_ScaleHistory(p, steps, growth_interval(view, p)) for p, steps in scaled_steps(view)]
    if not histories:
        return Checked.not_applicable("no loss scale is in force")
    gradients = survey(view, max_steps=options["max_steps"], dying_share=options["dying_share"])
    fp16 = {k: t for k, t in gradients.tensors.items() if t.fmt is FP16 and not t.dead}
    if not fp16:
        return Checked.not_applicable("no output gradient is in FP16")
    weights = survey(view, max_steps=options["max_steps"], dying_share=options["dying_share"], kind="weight_grad")
    scales = sorted({h.scale for h in histories})
    level = f"loss scale {scales[0]:g}" if len(scales) == 1 else f"loss scales of {scales[0]:g} to {scales[-1]:g}"
    seen = f"{plural(len(fp16), 'FP16 gradient')} at {level}"
    guilty = {
        k: t
        for k, t in fp16.items()
        if t.subnormal_share >= options["subnormal_share"]
        and t.mean_bits < options["fine_bits"]
        and is_faint(view, k, t, options["faint_share"], options["enough_bits"])
    }
    if not guilty:
        worst = max(t.subnormal_share for t in fp16.values())
        return Checked((), f"{seen}: {percent(worst)} subnormal in the worst")
    history = _history_of(view, histories, min(guilty.values(), key=lambda t: t.mean_bits))
    room = min(history.headroom(gradients), history.headroom(weights)) - options["margin_binades"]
    if room < options["room"]:
        guilty = {k: t for k, t in guilty.items() if t.mean_bits < options["enough_bits"]}
        if not guilty:
            return Checked((), f"{seen}: some are subnormal, but only {room:.1f} binades are left for a larger scale")
    reason = f"{plural(len(guilty), 'gradient')} of {seen} among the subnormals"
    return Checked([_finding(view, history, guilty, room, options)], reason)


def _history_of(view: RunView, histories: Sequence[_ScaleHistory], tensor: GradientSeries) -> _ScaleHistory:
    """Return the scale under which a gradient was computed on its worst step; else the first one."""
    process, step = tensor.worst
    facts = view.step_facts(process, step)
    own = [h for h in histories if h.process == process]
    same = [h for h in own if facts is not None and h.steps[-1].optimizer == facts.optimizer]
    return (same or own or histories)[0]


def _finding(
    view: RunView, history: _ScaleHistory, guilty: Mapping[Key, GradientSeries], room: float, options: Options
) -> Finding:
    key, tensor = min(guilty.items(), key=lambda item: item[1].mean_bits)
    process, step = tensor.worst
    rows = view.rows(process, step)
    row = next(r for r in rows if r.key == key)
    bits = tensor.mean_bits
    binades, after = out_of_subnormals(row, room, target=options["subnormal_share"] / 10.0)
    limiting = largest_gradient(rows) if room < options["room"] else None
    advice = higher_level(view, LostGradient(key, tensor), limiting, history.scale) if limiting is not None else ()
    return RULE.finding(
        severity=None if bits < options["enough_bits"] else Severity.INFO,
        confidence=0.7 if tensor.steps < 4 else 0.9,
        title=f"the loss scale is stuck at {history.scale:g}: {percent(tensor.subnormal_share)} of the gradient of "
        f"`{row.place}` is subnormal",
        message=f"{percent(tensor.subnormal_share)} of the gradient of the output of `{row.place}` (float16) is "
        f"subnormal in the median of {plural(tensor.steps, 'step')} (limit {percent(options['subnormal_share'])}). Its "
        f"elements keep {bits:.1f} of 11 significant bits on average (limit {options['fine_bits']:g}). "
        f"{history.words()} {_room_words(limiting, room)} {plural(len(guilty), 'gradient')} above the limit.",
        location=location(row, Phase.BACKWARD, process, step),
        evidence={
            **subnormal_evidence(tensor, guilty, options),
            "loss_scale": history.scale,
            "room_binades": room,
            "growth_interval": history.interval,
            **gradient_evidence(rows, row),
        },
        prescriptions=advice or (_prescribe(view, history, row, binades, after, room),),
    )


def _room_words(limiting: Overflow | None, room: float) -> str:
    """A sentence: how many binades the scale can grow by, or the layer that keeps it low."""
    if limiting is None:
        return f"It could be 2^{int(room)} times larger without an overflow on any recorded step."
    return (
        f"`{limiting.module or limiting.root}` keeps it so low: its gradient reaches {limiting.row.amax or 0.0:.3g}; "
        f"FP16 ends at {FP16.max:g}."
    )


def _prescribe(
    view: RunView, history: _ScaleHistory, row: TensorRow, binades: int, after: float, room: float
) -> Prescription:
    scale, before = history.scale * 2.0**binades, subnormal_share(row, 0)
    return Prescription(
        title=f"start at loss scale {scale:g}: subnormal {percent(before)} -> {percent(after)}",
        change={"init_scale": {"from": history.steps[0].loss_scale, "to": scale}},
        predicted={
            "subnormal_share": {"from": before, "to": after},
            "room_binades": {"from": round(room, 1), "to": round(room - binades, 1)},
        },
        snippet=snippets.grad_scaler(view.device, scale),
    )


RULE = Rule(
    code="PD303",
    name="low-loss-scale",
    severity=Severity.WARNING,
    triage=Triage.LOSS_SCALE,
    page=PAGE,
    options=(
        *SUBNORMAL_OPTIONS[:2],
        RuleOption("room", 3.0, "binades", "Minimum distance of the scale from its ceiling, besides the margin.",
                   "Chosen empirically: a dynamic scale is often one doubling below its ceiling; two are no fault."),
        *SUBNORMAL_OPTIONS[2:],
    ),
    check=check,
)  # fmt: skip
