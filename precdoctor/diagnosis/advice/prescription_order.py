"""The order of a finding's prescriptions: one that is predicted to help little does not come first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from precdoctor.diagnosis.claims.finding import Finding, Prescription
from precdoctor.diagnosis.survey.rows import number

#: Share of the harm that the first prescription must remove. Chosen empirically: with less, the finding remains.
LEAST_SAVING = 0.25
#: Keys of ``Prescription.predicted`` that measure harm: the lower the better.
HARMS = frozenset(
    (
        *("accumulation_error", "bad_scale_steps", "below_eps_share", "dead_elements", "flushed_share"),
        *("flushing_steps", "largest_saturated_share", "lost_share", "magnitude_lost", "nonfinite_elements"),
        *("nonfinite_steps", "overflows_in_examined_steps", "poisoned_buffers", "relative_error", "saturated_share"),
        *("skipped_steps", "stale_steps", "stalled_share", "subnormal_share", "weights_without_gradient"),
        *("wrong_elements", "zero_share"),
    )
)


def saving(prescription: Prescription) -> float | None:
    """Return the largest predicted share of a harm that the prescription removes; None if it predicts none."""
    shares = []
    for name, ends in prescription.predicted.items():
        if name in HARMS and isinstance(ends, Mapping):
            before, after = number(ends.get("from")), number(ends.get("to"))
            if before and after is not None:
                shares.append((before - after) / before)
    return max(shares, default=None)


def is_worthwhile(prescription: Prescription) -> bool:
    """Return whether the prescription may come first: it removes enough of a harm, or its prediction names none."""
    saved = saving(prescription)
    return saved is None or saved >= LEAST_SAVING


def worthwhile_first(finding: Finding) -> Finding:
    """Move prescriptions that help little to the end of the finding's list; stable."""
    ordered = sorted(finding.prescriptions, key=lambda p: not is_worthwhile(p))
    return finding if ordered == list(finding.prescriptions) else replace(finding, prescriptions=tuple(ordered))
