"""Gradients that a scanned op of the backward pass flushed: for runs whose rows show zeros, and not who made them."""

from __future__ import annotations

import math
from dataclasses import replace

from precdoctor.diagnosis.claims.finding import Finding, Location, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked
from precdoctor.diagnosis.claims.words import percent
from precdoctor.diagnosis.survey.rows import known_format, text
from precdoctor.diagnosis.survey.scans import (
    Fact,
    Group,
    check_facts,
    elsewhere_words,
    evidence_of,
    locate,
    place_words,
)
from precdoctor.diagnosis.survey.view import RunView

#: Share of the non-zero elements, and of the magnitude, that must be gone. Chosen empirically; no published source.
_FLUSHED, _LOST = 0.5, 0.25
_REASON = "the op's zeros were compared with FP64 on the operands it had"


def check_flushes(view: RunView) -> Checked:
    """One finding: the op that flushed most, with the weights whose gradient is exactly zero."""

    def guilty(fact: Fact) -> float:
        share = fact.count("flushed") / max(fact.count("of"), 1)
        return fact.number("lost") if share >= _FLUSHED and fact.number("lost") >= _LOST else 0.0

    found = check_facts(
        view, ("flush",), guilty, lambda g: _finding(view, g), seen="no gradient that was flushed",
        keep=lambda g: len(g.steps) > 1,
    )  # fmt: skip
    return Checked(tuple(found.findings)[:1], found.reason, found.status)


def _finding(view: RunView, group: Group) -> Finding:
    fact = group.worst
    flushed, of, zero = fact.count("flushed"), fact.count("of"), fact.count("zero_gradients")
    fmt = known_format(text(fact.data.get("dtype")))
    smallest = fmt.min_normal if fmt is not None else 0.0
    exponent = max(1, math.ceil(math.log2(smallest / max(fact.number("exact_median"), 1e-300))))
    dead = fact.data.get("zero_gradients_of")
    names = ", ".join(f"`{n}`" for n in dead[:3]) if isinstance(dead, list) else ""
    message = (
        f"At step {fact.step}, {fact.op}{fact.line} {place_words(fact)} returned zeros for {flushed:,} of {of:,} "
        f"elements that are not zero in FP64 (limit {percent(_FLUSHED)}): {percent(fact.number('lost'))} of the "
        f"gradient's magnitude (limit {percent(_LOST)}), and {percent(fact.number('channels'))} of the channels whole. "
        f"Their right values reach {fact.number('exact_amax'):.3g}. "
        f"Weights whose gradient is exactly zero: {zero}{f' ({names})' if names else ''}.{elsewhere_words(group)}"
    )
    return Finding(
        code="PD201",
        name="activation-gradient-underflow",
        severity=Severity.ERROR if zero else Severity.WARNING,
        confidence=0.9,
        title=f"{percent(flushed / max(of, 1))} of a gradient is flushed to zero by {fact.short} "
        f"{place_words(fact)}{fact.line}",
        message=message,
        location=_location(view, group, dead),
        evidence=evidence_of(group, {"flushed_share": _FLUSHED, "lost_magnitude": _LOST}, _REASON),
        prescriptions=(
            Prescription(
                title=f"a loss scale of 2^{exponent}: the median of the flushed gradient becomes a normal number; "
                f"flushed elements {flushed:,} -> at most {of // 2:,}",
                change={"loss_scale": 2.0**exponent},
                predicted={"flushed_elements": {"from": flushed, "to": of // 2}},
                snippet=f"scaler = torch.amp.GradScaler(init_scale=2.0**{exponent})\n",
            ),
        ),
    )


def _location(view: RunView, group: Group, dead: object) -> Location:
    """Where the op ran; outside of every module, the last of the layers that get nothing from it."""
    location = locate(view, group)
    layers = [text(name).rpartition(".")[0] for name in dead] if isinstance(dead, list) else []
    if location.module or not layers or len(view.models) != 1:
        return location
    return replace(location, root=next(iter(view.models)), module=layers[-1])
