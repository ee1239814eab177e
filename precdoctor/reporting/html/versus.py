"""Prepares the table of tensors that two runs share, those first whose amax differs most."""

from __future__ import annotations

import math
from typing import Any

from precdoctor.diagnosis.claims.words import percent
from precdoctor.reporting.html.layers import LABEL, elided, kind_title, labels
from precdoctor.reporting.html.survey import Survey, Total
from precdoctor.reporting.text import clean, number

#: Most rows of the table.
ROWS = 20


def side_by_side(ours: Survey, other: Survey) -> dict[str, Any]:
    """``pairs``: the common tensors whose amax differs most; ``note``: how many tensors are in both runs.

    Tensors are paired by root, module, kind, name and call.
    """
    theirs = {t.place: at for at, t in reversed(list(enumerate(other.tensors)))}
    ranked: list[tuple[float, dict[str, Any]]] = []
    for at, (tensor, full) in enumerate(zip(ours.tensors, labels(ours.tensors), strict=True)):
        if (match := theirs.get(tensor.place)) is None:
            continue
        a, b = ours.total(at), other.total(match)
        if not a.amax or not b.amax:
            continue
        moved = math.log2(b.amax) - math.log2(a.amax)
        dtypes = dict.fromkeys((clean(tensor.dtype, 40), clean(other.tensors[match].dtype, 40)))
        pair = {
            "full": full,
            "kind": kind_title(tensor.kind),
            "dtype": " / ".join(dtypes),
            "amax": (number(a.amax), number(b.amax)),
            "moved": f"{moved:+.1f}",
            "subnormal": (_share(a.subnormal, a), _share(b.subnormal, b)),
            "non_finite": (number(a.non_finite), number(b.non_finite)),
        }
        ranked.append((abs(moved), pair))
    ranked.sort(key=lambda f: -f[0])
    note = f"{number(len(ranked))} of {number(len(ours.tensors))} tensors are in both runs"
    if len(ranked) > ROWS:
        note += f"; shown are the {ROWS} whose largest element differs most"
    pairs = [pair for _, pair in ranked[:ROWS]]
    short = elided((pair["full"] for pair in pairs), LABEL)
    return {"pairs": [pair | {"label": short[pair["full"]]} for pair in pairs], "note": note + "."}


def _share(count: int, total: Total) -> str:
    alive = total.numel - total.zero - total.non_finite
    return percent(count / alive if alive else 0.0)
