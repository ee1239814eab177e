"""PD601: activations that stay within a binade of their format's largest number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.analyses.histories import History, forward_histories
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.growth.wider_format import widening
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS, Key, TensorRow, location, tensor_evidence
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import Format, format_of_dtype
from precdoctor.numerics.histogram import bin_of

PAGE = RulePage(
    finds="""
Inputs and outputs of modules whose largest magnitude stays within `headroom` binades of the largest finite number of
their format (65504 in FP16) on `steps` of the newest recorded steps, while everything is still finite. Tensors with
elements exactly at the maximum, or with an amax that varies by less than `mask_spread`, are additive masks and clamps
and do not count. Nor do scaled gradients, which a dynamic loss scaler keeps near the limit on purpose, and FP8
operands. A clamp is a finding if it hides an overflow: the tensor before it has as many elements in a wider format, and
at least `clamped_share` of them lie beyond the narrower format's range.
""",
    matters="""
One batch with twice the usual values makes an infinity, and the softmax or norm behind it a NaN. Amax of activations
commonly varies by a factor of two between batches, so one binade of headroom is not enough.
""",
    example="""
The hidden layer of a gated MLP late in FP16 training: amax 41,000, 52,000, 48,000 ... and one day 66,246.

    with torch.autocast("cuda", dtype=torch.float16):
        h = up(x) * gate(x)
""",
    remedy="""
Run the named module in FP32, or the model in BF16, whose largest number is 3.4e38. Or lower the magnitude: divide by a
constant before and multiply after, normalise the input, add a z-loss or soft cap on logits. A clamp only hides that
numbers do not fit: with BF16, or FP32 for the stream, you can remove it.
""",
    confidence="""
0.9: amax is exact. 0.75 if fewer than twice the required steps were recorded. If the tensor also grows, PD602 reports
when it will overflow and includes this finding.
""",
    references=(
        "IEEE 754-2019, table 3.5 (binary16)",
        "huggingface/transformers issues 9295 and 10956 (T5 and mT5 in FP16: activations of 66,246 and more)",
    ),
)


#: Number of newest steps whose rows are searched for a clamp, to bound the time.
_CLAMP_STEPS = 8


def check(view: RunView, options: Options) -> Checked:
    """One finding: the tensor with least headroom, the others as evidence; else the worst clamp."""
    histories = forward_histories(view)
    if not histories:
        return Checked.not_applicable("no activation was recorded on a healthy step")
    close = {k: h for k, h in histories.items() if _stays_close(h, options)}
    constant = {k: h for k, h in close.items() if _is_constant(h, options)}
    near = {k: h for k, h in close.items() if not h.at_max and k not in constant}
    seen = plural(len(histories), "activation")
    clamps = [c for k, h in constant.items() if not near and (c := _clamp(view, k, h)) is not None]
    clamp = max(clamps, key=lambda c: c.share, default=None)
    if clamp is not None and clamp.share >= options["clamped_share"]:
        words = f"{clamp.row.label} is clamped: {percent(clamp.share)} of it is larger"
        return Checked([_clamp_finding(view, clamp, options)], words)
    if not near:
        least = min((_least_headroom(h) for h in histories.values() if not h.at_max), default=None)
        words = f"{seen}: least headroom {least:.1f} binades" if least is not None else seen
        return Checked((), f"{words} (limit {options['headroom']:g})")
    key, history = min(near.items(), key=lambda item: _least_headroom(item[1]))
    finding = _finding(view, key, history, near, options)
    return Checked([finding], f"{len(near):,} of {seen} within {options['headroom']:g} binades")


def _least_headroom(history: History) -> float:
    """Headroom at the largest amax of the history, in binades."""
    return history.fmt.headroom(max(history.amax.values()))


def _close_points(history: History, options: Options) -> list[tuple[int, float]]:
    """Return step and amax of the steps with `headroom` binades or less."""
    return [(s, a) for s, a in history.points() if history.fmt.headroom(a) <= options["headroom"]]


def _is_constant(history: History, options: Options) -> bool:
    """Return whether an amax close to the limit is constant: the code, not the data, makes it so large."""
    sizes = [a for _, a in _close_points(history, options)]
    return max(sizes) - min(sizes) < options["mask_spread"] * max(sizes)


def _stays_close(history: History, options: Options) -> bool:
    """Return whether a tensor is close to its limit on enough of the newest steps."""
    needed, close = int(options["steps"]), _close_points(history, options)
    newest = {s for s, _ in history.points()[-2 * needed :]}
    return sum(s in newest for s, _ in close) >= needed


def _finding(view: RunView, key: Key, history: History, near: Mapping[Key, History], options: Options) -> Finding:
    close = _close_points(history, options)
    step, amax = max(close, key=lambda p: p[1])
    largest = history.fmt.max
    row, rows = _row(view, key, step)
    usual = median(a for _, a in close)
    label = row.label if row is not None else f"`{key[1] or key[0]}` {key[2]}"
    return RULE.finding(
        confidence=0.9 if len(close) >= 2 * options["steps"] else 0.75,
        title=f"{label} stays at {100.0 * usual / largest:.0f} % of {history.dtype}'s largest number, {largest:g}",
        message=f"On {plural(len(close), 'step')} ({close[0][0]} to {close[-1][0]}) {label} ({history.dtype}) came "
        f"within {options['headroom']:g} binades (limit) of {largest:g}: amax {usual:.4g} in the median, {amax:.4g} at "
        f"step {step}. That is {100.0 * amax / largest:.0f} % of the largest number and leaves "
        f"{history.fmt.headroom(amax):.2f} binades. {plural(len(near), 'tensor')} this close.",
        location=Location(key[0], key[1], history.module_class or None, key[2], Phase.FORWARD, 0, step),
        evidence={
            "amax": amax,
            "headroom_binades": history.fmt.headroom(amax),
            "limit": options["headroom"],
            "steps_near": len(close),
            "last_bad_step": close[-1][0],
            "history": history.as_evidence(),
            "tensors": [
                {"root": k[0], "module": k[1], "kind": k[2], "headroom_binades": _least_headroom(h)}
                for k, h in sorted(near.items(), key=lambda item: _least_headroom(item[1]))[:16]
            ],
            "confidence_reason": "the largest magnitude is exact",
            **tensor_evidence(row, rows),
        },
        prescription=_wider_format(view, key, history, amax, rows),
    )


def _row(view: RunView, key: Key, step: int) -> tuple[TensorRow | None, tuple[TensorRow, ...]]:
    """The row of one point of a history, and the forward rows of its step."""
    for process in view.processes:
        rows = tuple(r for r in view.rows(process, step) if r.kind in FORWARD_KINDS)
        mine = [r for r in rows if r.key == key]
        if mine:
            return mine[0], rows
    return None, ()


def _wider_format(view: RunView, key: Key, history: History, amax: float, rows: Sequence[TensorRow]) -> Prescription:
    """Prescribe a wider format, with the headroom it gives."""
    change = widening(rows, key, history.dtype, view.device)
    before, after = history.fmt.headroom(amax), change.to.headroom(amax)
    predicted = {"headroom_binades": {"from": round(before, 2), "to": round(after, 1)}}
    return change.prescription(f": headroom {before:.1f} -> {after:.0f} binades", predicted)


# -- clamps that hide an overflow -------------------------------------------------------------------------------------
#
# ``torch.clamp(x, -65504 + 1000, 65504 - 1000)`` before a cast to FP16 prevents the infinity and hides that there would
# be one: every element above the limit becomes the same number, with a gradient of zero. The tensor before the clamp,
# in a wider format, shows how many elements that affects.


@dataclass(frozen=True)
class _Clamp:
    """A tensor with a constant amax near its format's maximum, and the tensor of another dtype before it.

    Attributes:
        share: share of the earlier tensor's elements beyond the format's range, median over steps.
        row, before, rows: both tensors, and all forward rows, on the worst step.
        steps: recorded steps of the tensor.
    """

    share: float
    row: TensorRow
    before: TensorRow
    rows: tuple[TensorRow, ...]
    steps: int


def _clamp(view: RunView, key: Key, history: History) -> _Clamp | None:
    """Return the clamp in front of a tensor; None if too few steps have a :func:`_tensor_before`."""
    seen: list[tuple[float, TensorRow, TensorRow, tuple[TensorRow, ...]]] = []
    for step in sorted(history.amax)[-_CLAMP_STEPS:]:
        rows = tuple(r for r in view.rows(view.processes[0], step) if r.kind in FORWARD_KINDS)
        row = next((r for r in rows if r.key == key), None)
        before = _tensor_before(row, rows) if row is not None else None
        if row is not None and before is not None:
            seen.append((_share_beyond(before, history.fmt), row, before, rows))
    if len(seen) < _CLAMP_STEPS // 2:
        return None
    _, row, before, rows = max(seen, key=lambda s: s[0])
    return _Clamp(median(s[0] for s in seen), row, before, rows, len(history.amax))


def _tensor_before(row: TensorRow, rows: Sequence[TensorRow]) -> TensorRow | None:
    """Return the last tensor of as many elements before ``row``; None unless it is finite and of another dtype."""
    earlier = [r for r in rows if r.order is not None and r.order < (row.order or 0) and r.numel == row.numel]
    last = max(earlier, key=lambda r: r.order or 0, default=None)
    return last if last is not None and last.dtype != row.dtype and not last.bad else None


def _share_beyond(row: TensorRow, fmt: Format) -> float:
    """Share of elements in the bins above the one that holds the format's maximum: a lower bound."""
    return row.histogram[bin_of(fmt.max) + 1 :].total / row.numel


def _clamp_finding(view: RunView, found: _Clamp, options: Options) -> Finding:
    row, before, limit = found.row, found.before, options["clamped_share"]
    change = widening(found.rows, row.key, row.dtype, view.device)
    largest = format_of_dtype(row.dtype).max
    effect = f", without the clamp: clamped {percent(found.share)} -> 0 %"
    predicted = {"clamped_share": {"from": found.share, "to": _share_beyond(before, change.to)}}
    return RULE.finding(
        confidence=0.85,
        title=f"{row.label} is clamped at {row.amax or 0.0:g}: {percent(found.share)} of it exceeds {row.dtype}",
        message=f"The largest magnitude of {row.label} ({row.dtype}) is {row.amax or 0.0:g} on each of "
        f"{plural(found.steps, 'step')}, so a clamp sets it. In {before.label} ({before.dtype}), right before it, "
        f"{percent(found.share)} of the elements (median, limit {percent(limit)}) lie beyond {row.dtype}'s largest "
        f"number, {largest:g}; they reach {before.amax or 0.0:.3g}. The clamp makes them all equal, and their gradient "
        "is zero.",
        location=location(row, Phase.FORWARD, row.process, row.step),
        evidence={
            "clamped_share": found.share,
            "limit": limit,
            "clamped_at": row.amax,
            "amax_before": before.amax,
            "steps_examined": found.steps,
            **tensor_evidence(row, found.rows),
            "confidence_reason": "counted in the tensor before; that this is the clamped one is inferred",
        },
        prescription=change.prescription(effect, predicted),
    )


RULE = Rule(
    code="PD601",
    name="near-format-limit",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("headroom", 1.0, "binades", "Minimum distance from the format's largest number.",
                   "Chosen empirically: amax of activations commonly varies by a factor of two between batches."),
        RuleOption("steps", 8.0, "steps", "Minimum number of such steps, among twice as many of the newest.",
                   "Chosen empirically: one large batch is no lasting condition.", 1.0),
        fraction("mask_spread", 2.0**-8, "An amax that varies less is a constant of the code, a mask.",
                 "Scores up to 100 on a mask of finfo.min / 2 (32752) move it by 0.3 %; data move an amax by more."),
        fraction("clamped_share", 0.01, "Maximum share of a clamped tensor beyond its format's range.",
                 "Chosen empirically: a clamp may catch single outliers."),
    ),
    check=check,
)  # fmt: skip
