"""Activations that a clamp keeps inside their format, although most of what it is given does not fit.

``torch.clamp(x, -65504 + 1000, 65504 - 1000)`` before a cast to FP16 makes no infinity and hides that there would be
one: every element above the limit becomes the same number, and its gradient is zero. The tensor in front, in a wider
format, says how many those are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.families.growth.wider_format import widening
from precdoctor.diagnosis.survey.histories import History
from precdoctor.diagnosis.survey.rows import Key, TensorRow, known_format, path_evidence, path_to, range_evidence
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import Format
from precdoctor.numerics.histogram import bin_of

#: Steps whose rows are read.
_STEPS = 8


@dataclass(frozen=True)
class Clamped:
    """A tensor whose amax is a constant near its format's maximum, and what was wider in front of it."""

    key: Key
    #: Of the elements in front, those beyond the format's range, median over steps.
    share: float
    row: TensorRow
    before: TensorRow
    rows: tuple[TensorRow, ...]
    steps: int


def clamped(view: RunView, constant: Mapping[Key, History]) -> list[Clamped]:
    """Those among tensors of constant amax that come from larger ones; the largest share first."""
    found = [c for key, history in constant.items() if (c := _clamped(view, key, history)) is not None]
    return sorted(found, key=lambda c: -c.share)


def _clamped(view: RunView, key: Key, history: History) -> Clamped | None:
    fmt = known_format(history.dtype)
    if fmt is None:
        return None
    seen: list[tuple[float, TensorRow, TensorRow, tuple[TensorRow, ...]]] = []
    for step in sorted(history.amax)[-_STEPS:]:
        rows = tuple(r for r in view.rows(view.processes[0], step) if r.kind in ("batch", "input", "output"))
        row = next((r for r in rows if r.key == key), None)
        before = _in_front(row, rows) if row is not None else None
        if row is not None and before is not None:
            seen.append((_beyond(before, fmt), row, before, rows))
    if len(seen) < _STEPS // 2:
        return None
    _, row, before, rows = max(seen, key=lambda s: s[0])
    return Clamped(key, median(s[0] for s in seen), row, before, rows, len(history.amax))


def _in_front(row: TensorRow, rows: Sequence[TensorRow]) -> TensorRow | None:
    """The tensor of as many elements that came right before, in another format."""
    earlier = [r for r in rows if r.order is not None and r.order < (row.order or 0) and r.numel == row.numel]
    last = max(earlier, key=lambda r: r.order or 0, default=None)
    return last if last is not None and last.dtype != row.dtype and not last.bad else None


def _beyond(row: TensorRow, fmt: Format) -> float:
    """Share of elements in the bins above the one that holds the format's maximum: rather too few."""
    return row.histogram[bin_of(fmt.max) + 1 :].total / row.numel


def finding(view: RunView, found: Clamped, limit: float) -> Finding:
    """What the clamp hides."""
    row, before = found.row, found.before
    change = widening(found.rows, found.key, row.dtype, view.device)
    fmt = known_format(row.dtype)
    largest = fmt.max if fmt is not None else 0.0
    return rule.finding(
        severity=Severity.WARNING,
        confidence=0.85,
        title=f"{row.label} is clamped at {row.amax or 0.0:g}: {percent(found.share)} of it is larger than "
        f"{row.dtype} goes",
        message=(
            f"The largest magnitude of {row.label} ({row.dtype}) is {row.amax or 0.0:g} on each of "
            f"{plural(found.steps, 'step')}, so a clamp sets it. In {before.label} ({before.dtype}) right in front "
            f"{percent(found.share)} of the elements (median, limit {percent(limit)}) lie beyond {row.dtype}'s largest "
            f"number, {largest:g}; they reach {before.amax or 0.0:.3g}. Above the clamp all are the same, and their "
            "gradient is zero."
        ),
        location=Location(
            found.key[0], found.key[1], row.module_class or None, row.kind, Phase.FORWARD, row.rank, row.step
        ),
        evidence={
            "clamped_share": found.share,
            "limit": limit,
            "clamped_at": row.amax,
            "amax_before": before.amax,
            "steps_examined": found.steps,
            "range": range_evidence(row),
            "path": path_evidence(path_to(found.rows, row)),
            "confidence_reason": "counted in the tensor in front; that it is the one that is clamped is inferred",
        },
        prescriptions=(
            Prescription(
                title=f"{change.title}, without the clamp: clamped {percent(found.share)} -> 0 %",
                change=change.change,
                predicted={"clamped_share": {"from": found.share, "to": _beyond(before, change.to)}},
                snippet=change.snippet,
            ),
        ),
    )
