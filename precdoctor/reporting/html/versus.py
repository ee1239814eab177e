"""Prepares the table of tensors that two runs share, those first whose amax differs most."""

from __future__ import annotations

import math
from typing import Any

from precdoctor.diagnosis.claims.words import percent
from precdoctor.reporting.html.layers import KIND_TITLES, LABEL, elided, has_several_roots, label
from precdoctor.reporting.html.survey import Survey, TensorId, Total
from precdoctor.reporting.text import clean, number

#: Most rows of the table.
ROWS = 20


def side_by_side(ours: Survey, other: Survey) -> dict[str, Any]:
    """``pairs``: the common tensors whose amax differs most; ``note``: how many tensors are in both runs.

    Tensors are paired by root, module, kind, name and call.
    """
    theirs = {_name(t): at for at, t in reversed(list(enumerate(other.tensors)))}
    several = has_several_roots(ours.tensors)
    ranked: list[tuple[float, dict[str, Any]]] = []
    for at, tensor in enumerate(ours.tensors):
        if (match := theirs.get(_name(tensor))) is not None:
            a, b = ours.total(at), other.total(match)
            if a.amax and b.amax:
                ranked.append(_pair(tensor, other.tensors[match], a, b, several))
    ranked.sort(key=lambda f: -f[0])
    note = f"{number(len(ranked))} of {number(len(ours.tensors))} tensors are in both runs"
    if len(ranked) > ROWS:
        note += f"; shown are the {ROWS} whose largest element differs most"
    pairs = [pair for _, pair in ranked[:ROWS]]
    short = elided((pair["full"] for pair in pairs), LABEL)
    return {"pairs": [pair | {"label": short[pair["full"]]} for pair in pairs], "note": note + "."}


def _pair(tensor: TensorId, match: TensorId, a: Total, b: Total, several: bool) -> tuple[float, dict[str, Any]]:
    assert a.amax is not None
    assert b.amax is not None
    moved = math.log2(b.amax) - math.log2(a.amax)
    full = label(tensor, several_roots=several)
    dtypes = dict.fromkeys((clean(tensor.dtype, 40), clean(match.dtype, 40)))
    return abs(moved), {
        "full": full,
        "kind": KIND_TITLES.get(tensor.kind, clean(tensor.kind, 40)),
        "dtype": " / ".join(dtypes),
        "amax": (number(a.amax), number(b.amax)),
        "moved": f"{moved:+.1f}",
        "subnormal": (_share(a.subnormal, a), _share(b.subnormal, b)),
        "non_finite": (number(a.non_finite), number(b.non_finite)),
    }


def _share(count: int, total: Total) -> str:
    alive = total.numel - total.zero - total.non_finite
    return percent(count / alive if alive else 0.0)


def _name(tensor: TensorId) -> tuple[str, str, str, str, int]:
    return (tensor.root, tensor.module, tensor.kind, tensor.name, tensor.call)
