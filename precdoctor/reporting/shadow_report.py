"""What ``precdoctor shadow`` measured, as JSON, described by ``schema/shadow-1.schema.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from precdoctor.diagnosis.claims.finding import jsonable
from precdoctor.diagnosis.survey.shadow_errors import Limits, Piece, Shadowed
from precdoctor.reporting.json_report import answer_head
from precdoctor.reporting.shadow_view import verdict


def document(found: Shadowed | None, run: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """All pieces of code with their errors, in order of execution; infinities are the string "Infinity".

    Args:
        run: as in a diagnosis.
    """
    state, sentence = verdict(found, limits)
    guilty = limits.guilty(found) if found is not None else []
    return {
        **answer_head(run),
        "verdict": state,
        "sentence": sentence,
        "reference": found.reference if found is not None else None,
        "narrowest": found.fmt.dtype if found is not None and found.fmt is not None else None,
        "u": found.u if found is not None and found.fmt is not None else None,
        "limits": jsonable(asdict(limits)),
        "steps": list(found.steps) if found is not None else [],
        "refused": [{"step": s, "why": why} for s, why in found.refused] if found is not None else [],
        "bit_for_bit": found.exact if found is not None and found.steps else None,
        "notes": list(found.notes) if found is not None else [],
        "pieces": [_piece(p, found.u, p in guilty) for p in found.pieces] if found is not None else [],
    }


def _piece(p: Piece, u: float, guilty: bool) -> dict[str, Any]:
    own = p.local / u if p.local is not None and u else None
    return {**jsonable(p), "local_u": jsonable(own), "guilty": guilty}
