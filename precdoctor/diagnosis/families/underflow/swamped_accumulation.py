"""PD205: gradients are accumulated over so many micro-steps that their format rounds the last ones away."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.advice.wide_weights import wide_weights, widened_bytes, widened_elements
from precdoctor.diagnosis.analyses.histories import watched_steps
from precdoctor.diagnosis.analyses.parameters import HALF
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import memory, plural
from precdoctor.diagnosis.survey.frames import at, groups, keys, step_values, worst_rows
from precdoctor.diagnosis.survey.measures import format_values
from precdoctor.diagnosis.survey.rows import Key, location, tensor_evidence
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView

PAGE = RulePage(
    finds="""
Weight gradients in BF16 or FP16 that sum up so many micro-steps (backward passes per optimizer step) that rounding
removes the last ones. A sum of N like terms is N times as large as the next term. Once that term is below half an ulp
of the sum, it is lost: the running sum stalls at 256 terms in BF16 and at 2048 in FP16. From there on the finding is a
warning; from `share` of that number on, where the last micro-steps keep only two bits, it is information. The log holds
the number of micro-steps and the format, but not the size of each micro-step's gradient: the rule assumes like terms.
""",
    matters="""
The part of the gradient that all micro-batches agree on, the purpose of accumulation, stops growing; the noise of the
first micro-steps is left. The effective batch is smaller than the computed one, and the gradient too small by the same
factor.
""",
    example="""
    model = model.bfloat16()
    for micro in range(512):                  # the sum stalls at 256
        (loss(model, next(batches)) / 512).backward()
""",
    remedy="""
Keep the gradients in FP32: use FP32 weights under BF16 autocast, or add the gradient to an FP32 buffer of your own
after each micro-step. Fewer and larger micro-batches also help.
""",
    confidence="""
0.75: micro-steps and format are recorded, but like terms are an assumption. Terms of random sign stall later.
""",
    references=(
        "Higham, Accuracy and Stability of Numerical Algorithms, chapter 4 (recursive summation: N u)",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192",
    ),
)


@dataclass(frozen=True)
class _Sum:
    """A weight gradient that sums up ``terms`` micro-steps of one step; a sum of equal terms stalls at ``stalls``."""

    key: Key
    dtype: str
    numel: int
    process: Process
    step: int
    terms: int
    stalls: int


def check(view: RunView, options: Options) -> Checked:
    """At most one finding: the gradient nearest to its stall, or most beyond; of several the largest."""
    counts = {(p, s.step): s.micro_steps for p, steps in view.timeline.items() for s in steps if s.complete}
    most = max(counts.values(), default=0)
    sums = _sums(view, counts)
    if not sums:
        return Checked.not_applicable("no weight gradient is kept in BF16 or FP16")
    if most < 2:
        return Checked.not_applicable("each optimizer step has one backward pass")
    seen = f"{plural(len(sums), 'half-precision gradient')} over up to {plural(most, 'micro-step')}"
    guilty = [s for s in sums if s.terms >= options["share"] * s.stalls]
    if not guilty:
        stalls = min(s.stalls for s in sums)
        return Checked((), f"{seen}, a sum of like terms stalls at {stalls:,}")
    return Checked([_finding(view, guilty, options)], f"{len(guilty):,} of {seen} reach its limit")


def _sums(view: RunView, counts: dict[tuple[Process, int], int]) -> list[_Sum]:
    """Each half-precision weight gradient on its recorded step with most micro-steps (``counts``)."""
    where = [("dtype", "in", HALF)]
    rows = view.measured((), ("weight_grad",), columns=("dtype", "numel"), steps=watched_steps(view), where=where)
    terms = np.nan_to_num(step_values(rows, counts)).astype(np.int64)
    stalls = 2 ** (format_values(rows, "mantissa_bits") + 1).astype(np.int64)  # half an ulp of that sum is one term
    rows = rows.assign(terms=terms, stalls=stalls)
    most = rows.iloc[worst_rows(groups(rows, IDENTITY), terms)]
    columns = (keys(most), most["dtype"], most["numel"], at(most), most["terms"], most["stalls"])
    return [_Sum(key, dtype, numel, *of, *sums) for key, dtype, numel, of, *sums in zip(*columns, strict=True)]


def _finding(view: RunView, guilty: list[_Sum], options: Options) -> Finding:
    worst = max(guilty, key=lambda s: (s.terms / s.stalls, s.numel))
    row = next(r for r in view.rows(worst.process, worst.step) if r.key == worst.key)
    elements = sum(s.numel for s in guilty)
    bits = max(0.0, math.log2(worst.stalls / worst.terms))
    share = worst.stalls / worst.terms
    message = (
        f"{plural(len(guilty), 'weight gradient')} ({elements:,} elements) sum up {plural(worst.terms, 'micro-step')} "
        f"in {worst.dtype}. There a sum of like terms stalls at {worst.stalls:,} (limit "
        f"{options['share'] * worst.stalls:g}). The last micro-step keeps {bits:.1f} bits beside the sum."
        + (f" Only {share:.0%} of the common part of all micro-steps arrives." if share < 1.0 else "")
    )
    stalled = worst.terms >= worst.stalls
    extra = widened_bytes(view, widened_elements(view, HALF, elements))
    return RULE.finding(
        severity=None if stalled else Severity.INFO,
        confidence=0.75,
        title=f"gradients of {worst.terms:,} micro-steps are summed in {worst.dtype}, whose sums stall at "
        f"{worst.stalls:,}",
        message=message,
        location=location(row, Phase.BACKWARD, worst.process, worst.step),
        evidence={
            "micro_steps": worst.terms,
            "stalls_at": worst.stalls,
            "limit": options["share"] * worst.stalls,
            "bits_left": bits,
            "gradients": len(guilty),
            "elements": elements,
            **tensor_evidence(row),
            "confidence_reason": "micro-steps and format are recorded; like gradients are assumed",
        },
        prescription=Prescription(
            title=f"FP32 gradients: bits left for the last micro-step {bits:.1f} -> "
            f"{24 - math.log2(worst.terms):.1f}, +{memory(extra)}",
            change={"gradient_dtype": {"from": worst.dtype, "to": "float32"}},
            predicted={
                "bits_left": {"from": round(bits, 1), "to": round(24 - math.log2(worst.terms), 1)},
                "extra_bytes": extra,
            },
            snippet=f"{wide_weights(view, HALF)}"
            "(loss / micro_steps).backward()  # gradients have the format of the weights\n",
        ),
    )


RULE = Rule(
    code="PD205",
    name="swamped-accumulation",
    severity=Severity.WARNING,
    triage=Triage.BACKWARD,
    page=PAGE,
    options=(
        fraction("share", 0.25, "Share of the number of terms at which the sum stalls; at 1 the finding is a warning.",
                 "A quarter leaves the last term two bits. At 256 and 2048, 2^(m+1), half an ulp is one term.", 0.01),
    ),
    check=check,
    newer_half=True,
)  # fmt: skip
