"""PD704: code whose results are further from FP32 than rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence

from precdoctor.diagnosis.analyses.shadow_errors import FORWARD, Limits, Piece, Shadowed, shadowed
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.snippets import code_in_float32, module_expression, run_in_float32
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.view import RunView

PAGE = RulePage(
    finds="""
Modules, and code between modules, whose results are further from FP32 than their format explains. The rule needs a run
made by `precdoctor shadow`, which runs chosen steps again on the same batch in FP32 and compares outputs, gradients and
weight gradients by relative L2. Two things count. The *own* error of a piece of code on the inputs of the reduced run:
above `limit` units of rounding u, that of the narrowest format in which any op computes (2^-8 in BF16, 2^-11 in FP16;
against FP64 limits are 16 times wider, because FP32 keeps its sums in FP32). And *amplification*: fewer than `bits`
bits of a result are right, and the piece made the errors it was given at least `amplification` times larger.
""",
    matters="""
It answers whether a training problem is one of precision or of code. Rounding a tensor once costs 0.4 u, and a linear
layer in BF16 with its inputs, weights and result 0.7 u, whatever the depth. A piece that is off by tens of u does
arithmetic that its format cannot carry, and the finding names it. If no error is above expectation, look elsewhere, or
for a bug.
""",
    example="""
    h = x.bfloat16()
    variance = (h * h).mean(-1) - h.mean(-1) ** 2     # 100 u off where the mean is large
""",
    remedy="""
Compute the named piece in FP32 and convert its result, as in the snippet: means, variances, softmax, exponentials and
long sums belong there. Where a piece amplifies the errors of its inputs (a difference of nearly equal numbers, a steep
function), widen these inputs, or rewrite it so that it does not cancel. Then shadow the run again.
""",
    confidence="""
0.9 where the replay reproduced the run bit for bit and the piece was compared on two steps or more; 0.8 on one step;
0.1 less where it did not reproduce the run.
""",
    references=(
        "Higham, Accuracy and Stability of Numerical Algorithms, sections 1.7 (cancellation), 1.9 (variance), 2.2 (u)",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740 (which arithmetic stays in FP32)",
    ),
)


def limits_of(options: Options) -> Limits:
    """Return the options as limits of the comparison."""
    return Limits(options["expected"], options["limit"], options["bits"], options["amplification"])


def check(view: RunView, options: Options) -> Checked:
    """One finding: the piece that is furthest off."""
    found = shadowed(view)
    if found is None:
        return Checked.not_applicable("no step was run again in FP32 (precdoctor shadow)")
    if not found.steps:
        if found.nothing_reduced:
            return Checked.not_applicable(f"nothing is narrower than {found.reference} on the steps that were compared")
        why = found.refused[0][1] if found.refused else "nothing was compared"
        return Checked.indeterminate(f"no step could be compared: {why}")
    limits, worst = limits_of(options), found.worst()
    guilty = limits.guilty(found)
    seen = f"{plural(len(found.layers()), 'layer')} beside {found.reference} on {plural(len(found.steps), 'step')}"
    if not guilty:
        most = (worst[0].local or 0.0) / found.u if worst else 0.0
        return Checked((), f"{seen}: the worst is {most:.2g} u off (expected up to {limits.expected * found.slack:g}, "
                       f"limit {limits.limit * found.slack:g})")  # fmt: skip
    return Checked([_finding(view, found, guilty, limits)], f"{len(guilty):,} above expectation in {seen}")


def _finding(view: RunView, found: Shadowed, guilty: Sequence[Piece], limits: Limits) -> Finding:
    p, dtype = guilty[0], found.dtype
    own, limit = limits.off(p, found), limits.limit * found.slack
    title, message = _title_and_message(found, guilty, limits)
    several = len(found.steps) > 1
    confidence = (0.9 if several else 0.8) - (0.0 if found.exact else 0.1)
    return RULE.finding(
        confidence=round(confidence, 2),
        title=title,
        message=message,
        location=Location(
            root=p.root,
            module=p.module or None,
            module_class=p.module_class or None,
            kind=p.kind if p.kind != "grad_input" else "grad_output",
            phase=Phase.FORWARD if p.kind in FORWARD else Phase.BACKWARD,
            rank=0,
            step=p.step if own else p.accumulated_step,
        ),
        evidence={
            "own_error": p.local,
            "accumulated_error": p.accumulated,
            "given_error": p.given,
            "u": found.u,
            "own_error_in_u": None if p.local is None else p.local / found.u,
            "expected": limits.expected * found.slack,
            "limit": limit,
            "dtype": dtype,
            "reference": found.reference,
            "beside": p.beside,
            "tensor": p.kind,
            "steps": list(found.steps),
            "bit_for_bit": found.exact,
            "others": list(dict.fromkeys(q.place for q in guilty[1:] if q.place != p.place))[:16],
            "confidence_reason": f"compared on {plural(len(found.steps), 'step')}, "
            f"{'the replay was' if found.exact else 'though the replay was not'} the run bit for bit",
        },
        prescription=_prescription(view, found, p, (p.local if own else p.accumulated) or 0.0, own=own),
    )


def _title_and_message(found: Shadowed, guilty: Sequence[Piece], limits: Limits) -> tuple[str, str]:
    p, dtype = guilty[0], found.dtype
    own, limit = limits.off(p, found), limits.limit * found.slack
    error, what = (p.local if own else p.accumulated) or 0.0, _tensor_words(p)
    units = error / found.u
    size = f"{units:,.0f} u" if error < 10.0 else f"{error:,.0f} times its size"
    title = f"{_piece_words(p)} is {size} off in {dtype} where {limits.expected * found.slack:g} u is expected"
    message = (
        f"On the run's own inputs, {what} of {_piece_words(p)} is off by {percent(error)}, {units:,.0f} u (limit "
        f"{limit:g} u; u = {found.u:.3g} in {dtype}), against {found.reference}."
    )
    if not math.isfinite(error):
        title = f"{_piece_words(p)} overflows or is rounded to zero in {dtype}, and not in {found.reference}"
        message = (
            f"On the run's own inputs, {what} of {_piece_words(p)} has no size in common with {found.reference}'s "
        )
        message += f"(limit {limit:g} u, u = {found.u:.3g} in {dtype})."
    elif not own:
        title = (
            f"{_piece_words(p)} makes errors of {(p.given or 0.0) / found.u:.2g} u into {size}: {dtype} is too narrow"
        )
        message = (
            f"Errors in the inputs of {_piece_words(p)}, {percent(p.given or 0.0)}, become {percent(error)} in {what}: "
            f"{p.amplification:,.0f} times (limit {limits.amplification:g}), and fewer than {limits.bits:g} bits are "
            f"right. Rounding in the piece itself is {(p.local or 0.0) / found.u:.2g} u: it cancels, or is steep."
        )
    others = [q for q in dict.fromkeys(map(_piece_words, guilty)) if q != _piece_words(p)]
    if others:
        message += f" Also above the limit: {', '.join(others[:3])}"
        message += f" and {len(others) - 3} more." if len(others) > 3 else "."
    return title, message


def _tensor_words(p: Piece) -> str:
    if p.kind == "output":
        return "the output"
    if p.kind == "input":
        return f"the input of `{p.beside}`"
    if p.kind == "weight_grad":
        return f"the gradient of {p.name or 'a weight'}"
    return "the gradient through it" if p.kind == "grad_input" else f"the gradient at `{p.beside}`'s output"


def _piece_words(p: Piece) -> str:
    own = f"`{p.module or p.root}`"
    if p.beside is None:
        return own
    return f"the code of {own} {'before' if p.kind == 'input' else 'behind'} `{p.beside}`"


def _prescription(view: RunView, found: Shadowed, p: Piece, error: float, *, own: bool) -> Prescription:
    before = error / found.u
    after = 0.5 if own else before * 2.0**-16
    shown = f"{before:,.0f} u" if math.isfinite(before) else "all of it"
    formats = {"from": found.dtype, "to": "float32"}
    change: dict[str, object] = {"code_of": p.module or p.root, "compute_dtype": formats}
    if p.beside is None and p.module:
        snippet = run_in_float32(p.module, view.device)
        change = {"module": p.module, "dtype": formats}
    else:
        place = module_expression(p.module)
        snippet = code_in_float32(
            f"the start of {place}", module_expression(p.beside) if p.beside else "its end", view.device
        )
    return Prescription(
        title=f"compute it in FP32, round its result only: {shown} -> about {after:.1g} u",
        change=change,
        predicted={"error_in_u": {"from": before, "to": after}},
        snippet=snippet,
    )


RULE = Rule(
    code="PD704",
    name="precision-error-above-expectation",
    severity=Severity.WARNING,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption("expected", 4.0, "u", "Own errors of healthy pieces stay below this; reports count the others.",
                   "Input, weight and result of a layer rounded once each give 0.7 u in RMS; 4 u is five times that.",
                   0.1),
        RuleOption("limit", 8.0, "u", "Largest own error that is not reported.",
                   "Chosen empirically: twice what is expected; two bits more than one rounding of all operands loses.",
                   0.1),
        RuleOption("bits", 3.0, "bits", "Amplification is reported if fewer bits are right.",
                   "Chosen empirically: an eighth of the tensor is noise, and so is its gradient."),
        RuleOption("amplification", 8.0, "ratio", "Least factor by which a piece enlarges the errors of its inputs.",
                   "Chosen empirically: three bits lost in one place; residual and normalised layers stay below 2.",
                   1.0),
    ),
    sampled_steps=False,
    check=check,
)  # fmt: skip
