"""PD501, counts of lost updates: per parameter, over the steps whose learning rate is not small."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from precdoctor.diagnosis.survey.rows import Key, TensorRow, integer, key_of, text
from precdoctor.diagnosis.survey.view import Process, RunView, process_step
from precdoctor.numerics.histogram import ExponentHistogram

_COLUMNS = (
    *("root", "module", "module_class", "kind", "name", "call"),
    *("dtype", "numel", "zero", "unchanged", "rel_lo", "rel_hist"),
)


@dataclass
class Counts:
    """Elements of one parameter, summed over the usable steps."""

    dtype: str
    module_class: str
    numel: int = 0
    intended: float = 0.0
    lost: float = 0.0
    steps: int = 0
    worst: tuple[Process, int] = (Process(0, 0), 0)
    #: exponent(dw) - exponent(w); empty where the gradient stands in for the update.
    relative: ExponentHistogram = field(default_factory=lambda: ExponentHistogram.of(None, None))
    #: (lost, intended) on each usable step, in order.
    by_step: list[tuple[float, float]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Lost updates among the intended ones."""
        return self.lost / self.intended if self.intended else 0.0


def guessed(view: RunView) -> bool:
    """Whether the gradient stands in for the intended update of every optimizer."""
    return bool(view.optimizers) and all(text(o.get("intended_update")) == "gradient" for o in view.optimizers)


def usable_steps(view: RunView, lr_share: float) -> set[tuple[Process, int]]:
    """Steps at ``lr_share`` of the largest learning rate or more; all when none is known."""
    rates = {(p, s.step): s.lr for p, steps in view.timeline.items() for s in steps if not s.skipped}
    highest = max((r for r in rates.values() if r is not None), default=None)
    if highest is None:
        return set(rates)
    return {key for key, rate in rates.items() if rate is not None and rate > 0 and rate >= lr_share * highest}


def survey(
    view: RunView, usable: set[tuple[Process, int]], dtypes: tuple[str, ...], beyond: int | None = None
) -> dict[Key, Counts]:
    """Counts of every parameter in one of ``dtypes``.

    Args:
        usable: the steps that count.
        dtypes: names as torch has them.
        beyond: updates more than this many binades below their weight count neither as lost nor as intended.
    """
    found: dict[Key, Counts] = {}
    no_sizes = guessed(view)
    for r in view.scan_records(_COLUMNS, ("update",), where=[("dtype", "in", dtypes)]):
        at, unchanged = process_step(r), integer(r["unchanged"])
        if unchanged is None or at not in usable:
            continue
        # a gradient that stands in for the update does not show the update's size
        relative = ExponentHistogram.of(*((None, None) if no_sizes else (integer(r["rel_lo"]), r["rel_hist"])))
        below = 0 if beyond is None else max(0, min(relative.counts.size, -beyond - relative.lo))
        trivial = float(relative.counts[:below].sum())
        counts = found.setdefault(key_of(r), Counts(str(r["dtype"]), text(r["module_class"])))
        _add(counts, r, (unchanged, trivial), relative)
        counts.worst = at
    return found


def weight_row(view: RunView, key: Key, counts: Counts) -> TensorRow | None:
    """The row of the weight itself on the worst step of its updates."""
    rows = view.rows(*counts.worst)
    return next((r for r in rows if r.kind == "weight" and r.key[:2] == key[:2] and r.name == key[3]), None)


def _add(counts: Counts, r: Mapping[str, Any], unchanged: tuple[int, float], relative: ExponentHistogram) -> None:
    same, trivial = unchanged
    intended, lost = max(0.0, int(r["numel"]) - int(r["zero"]) + same - trivial), max(0.0, same - trivial)
    counts.numel = int(r["numel"])
    counts.intended += intended
    counts.lost += lost
    counts.by_step.append((lost, intended))
    counts.steps += 1
    counts.relative = counts.relative.merge(relative)
