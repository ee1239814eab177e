"""Modules that get something back from the loss, and whose weights get a gradient of exactly zero all the same.

The gradient of a linear layer's weight is the product of what came back and what went in. If it is zero in every
element although what came back is not, nothing of what went in, as it was multiplied, met anything that counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from precdoctor.diagnosis.histories import watched_steps
from precdoctor.diagnosis.rows import text
from precdoctor.diagnosis.view import RunView

#: Root and module.
Module = tuple[str, str]


def starved_modules(view: RunView) -> Mapping[Module, int]:
    """Steps on which that was so, of the modules of which it was so on all recorded ones."""
    return view.remember("starved-modules", lambda: _starved(view))


def _starved(view: RunView) -> dict[Module, int]:
    steps = watched_steps(view)
    zero: dict[Module, int] = {}
    alive: set[Module] = set()
    for r in view.scan_records(("root", "module", "shape", "numel", "zero"), ("weight_grad",), steps=steps):
        if r["shape"] is None or len(r["shape"]) < 2:
            continue
        place = text(r["root"]), text(r["module"])
        if int(r["zero"]) == int(r["numel"]):
            zero[place] = zero.get(place, 0) + 1
        else:
            alive.add(place)
    left = {p: n for p, n in zero.items() if p not in alive}
    if not left:
        return {}
    answered: set[Module] = set()
    for frame in view.scan(("root", "module", "numel", "zero"), ("grad_output",), steps=steps):
        some = frame[frame["zero"] < frame["numel"]]
        answered |= {(text(root), text(m)) for root, m in zip(some["root"], some["module"], strict=True)}
    return {p: n for p, n in left.items() if p in answered}
