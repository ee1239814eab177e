"""PD601: activations that live within a binade of their format's largest number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.growth.clamp_hides_overflow import clamped
from precdoctor.diagnosis.families.growth.clamp_hides_overflow import finding as clamped_finding
from precdoctor.diagnosis.families.growth.wider_format import widening
from precdoctor.diagnosis.survey.histories import History, forward_histories
from precdoctor.diagnosis.survey.rows import Key, TensorRow, known_format, path_evidence, path_to, range_evidence
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Inputs and outputs of modules whose largest magnitude stays within `headroom` binades of the largest finite number of
their format (65504 in FP16) on `steps` of the newest recorded steps, while everything is still finite. Tensors with
elements exactly at the maximum, or whose amax varies by less than `mask_spread`, are additive masks and clamps and do
not count; neither do scaled gradients, which a dynamic loss scaler keeps near the limit on purpose, nor FP8 operands.
But where such a constant amax comes right behind a tensor of as many elements in a wider format, of which
`clamped_share` or more lie beyond the narrower one's range, a clamp hides an overflow: that is a finding.
""",
    matters="""
One batch that is twice as large as usual makes an infinity, the softmax or norm behind it a NaN. Amax of activations
commonly varies by a factor of two between batches, so one binade of headroom is none.
""",
    example="""
The hidden layer of a gated MLP late in FP16 training: amax 41,000, 52,000, 48,000 ... and one day 66,246.

    with torch.autocast("cuda", dtype=torch.float16):
        h = up(x) * gate(x)
""",
    remedy="""
Run the named module in FP32, or the model in BF16, whose largest number is 3.4e38. Or lower the magnitude: divide by a
constant before and multiply after, normalise the input, add a z-loss or soft cap on logits. A clamp only hides that
numbers do not fit: BF16, or FP32 for the stream, makes it needless.
""",
    confidence="""
0.9: amax is exact. 0.75 when fewer than twice the required steps were seen. Where the tensor also grows, PD602 says
when it will overflow and tells this finding inside it.
""",
    references=(
        "IEEE 754-2019, table 3.5 (binary16)",
        "huggingface/transformers issues 9295 and 10956 (T5 and mT5 in FP16: activations of 66,246 and more)",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the tensor with least headroom, the others as evidence; or else the one that is clamped most."""
    histories = forward_histories(view)
    if not histories:
        return Checked.not_applicable("no activation was recorded on a healthy step")
    near = {k: h for k, h in histories.items() if _near(h, options)}
    seen = plural(len(histories), "activation")
    constant = {k: h for k, h in histories.items() if _constant(h, options)} if not near else {}
    hidden = [c for c in clamped(view, constant) if c.share >= options["clamped_share"]]
    if hidden:
        words = f"{hidden[0].row.label} is clamped: {percent(hidden[0].share)} of it is larger"
        return Checked([clamped_finding(view, hidden[0], options["clamped_share"])], words, Status.FAILED)
    if not near:
        least = min((h.headroom(max(h.amax.values())) for h in histories.values() if not h.at_max), default=None)
        words = f"{seen}: least headroom {least:.1f} binades" if least is not None else seen
        return Checked((), f"{words} (limit {options['headroom']:g})")
    key, history = min(near.items(), key=lambda item: item[1].headroom(max(item[1].amax.values())))
    finding = _finding(view, key, history, near, options)
    return Checked([finding], f"{len(near):,} of {seen} within {options['headroom']:g} binades", Status.FAILED)


def _close(history: History, options: Options) -> list[tuple[int, float]]:
    return [(s, a) for s, a in history.points() if history.headroom(a) <= options["headroom"]]


def _near(history: History, options: Options) -> bool:
    return _stays_close(history, options) and not history.at_max and not _constant(history, options)


def _constant(history: History, options: Options) -> bool:
    """Close to the limit, and always by as much: the code, not the data, makes it so large."""
    sizes = [a for _, a in _close(history, options)]
    return _stays_close(history, options) and max(sizes) - min(sizes) < options["mask_spread"] * max(sizes)


def _stays_close(history: History, options: Options) -> bool:
    needed, close = int(options["steps"]), _close(history, options)
    newest = {s for s, _ in history.points()[-2 * needed :]}
    return len(close) >= needed and sum(s in newest for s, _ in close) >= needed


def _finding(view: RunView, key: Key, history: History, near: Mapping[Key, History], options: Options) -> Finding:
    close = _close(history, options)
    step, amax = max(close, key=lambda p: p[1])
    fmt = known_format(history.dtype)
    largest = fmt.max if fmt is not None else 0.0
    row, rows = _row(view, key, step)
    usual = median(a for _, a in close)
    label = row.label if row is not None else f"`{key[1] or key[0]}` {key[2]}"
    message = (
        f"On {plural(len(close), 'step')} ({close[0][0]} to {close[-1][0]}) {label} ({history.dtype}) came within "
        f"{options['headroom']:g} binades (limit) of {largest:g}: amax {usual:.4g} in the median, {amax:.4g} at step "
        f"{step}, which is {100.0 * amax / largest:.0f} % of the largest number and leaves "
        f"{history.headroom(amax):.2f} binades. {plural(len(near), 'tensor')} this close."
    )
    evidence = {
        "amax": amax,
        "headroom_binades": history.headroom(amax),
        "limit": options["headroom"],
        "steps_near": len(close),
        "last_bad_step": close[-1][0],
        "history": history.as_evidence(),
        "tensors": [
            {"root": k[0], "module": k[1], "kind": k[2], "headroom_binades": h.headroom(max(h.amax.values()))}
            for k, h in sorted(near.items(), key=lambda item: item[1].headroom(max(item[1].amax.values())))[:16]
        ],
        "confidence_reason": "the largest magnitude is exact",
    }
    if row is not None:
        evidence |= {"range": range_evidence(row), "path": path_evidence(path_to(rows, row))}
    return RULE.finding(
        confidence=0.9 if len(close) >= 2 * options["steps"] else 0.75,
        title=f"{label} lives at {100.0 * usual / largest:.0f} % of {history.dtype}'s largest number, {largest:g}",
        message=message,
        location=Location(key[0], key[1], history.module_class or None, key[2], Phase.FORWARD, 0, step),
        evidence=evidence,
        prescriptions=(_widen(view, key, history, amax, rows),),
    )


def _row(view: RunView, key: Key, step: int) -> tuple[TensorRow | None, tuple[TensorRow, ...]]:
    """The row behind a point of a history, and the forward rows of its step."""
    for process in view.processes:
        rows = tuple(r for r in view.rows(process, step) if r.kind in ("batch", "input", "output"))
        mine = [r for r in rows if r.key == key]
        if mine:
            return mine[0], rows
    return None, ()


def _widen(view: RunView, key: Key, history: History, amax: float, rows: Sequence[TensorRow]) -> Prescription:
    """A wider format, with the headroom that brings."""
    change = widening(rows, key, history.dtype, view.device)
    before, after = history.headroom(amax), change.to.headroom(amax)
    return Prescription(
        title=f"{change.title}: headroom {before:.1f} -> {after:.0f} binades",
        change=change.change,
        predicted={"headroom_binades": {"from": round(before, 2), "to": round(after, 1)}},
        snippet=change.snippet,
    )


RULE = Rule(
    code="PD601",
    name="near-format-limit",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("headroom", 1.0, "binades", "Distance from the largest number that is too near.",
                   "Chosen empirically: amax of activations commonly varies by a factor of two between batches."),
        RuleOption("steps", 8.0, "steps", "So many of the newest recorded steps (of twice as many) must be that near.",
                   "Chosen empirically: one large batch is no condition.", 1.0),
        RuleOption("mask_spread", 2.0**-8, "fraction",
                   "An amax that varies less over the steps is a constant of the code: a mask of finfo.min / 2, plus "
                   "scores.", "Scores of 100 and less on a mask of 32752 move it by 0.3 %; data move an amax by more.",
                   maximum=1.0),
        RuleOption("clamped_share", 0.01, "fraction", "Part of a clamped tensor that is larger than its format goes.",
                   "Chosen empirically: a clamp that catches single outliers is meant to.", maximum=1.0),
    ),
    kinds=("input", "output"),
    columns=("dtype", "amax", "at_max"),
    check=check,
)  # fmt: skip
