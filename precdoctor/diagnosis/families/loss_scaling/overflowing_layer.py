"""The layer that made a loss scaler skip steps: the module of the first non-finite tensor on sampled skipped steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.analyses.healthy_steps import reference_of
from precdoctor.diagnosis.analyses.origin import is_below, locate_forward, suspicious
from precdoctor.diagnosis.claims.finding import Location, Phase
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.rows import (
    BACKWARD_KINDS,
    FORWARD_KINDS,
    TensorRow,
    location,
    path_evidence,
    path_to,
    range_evidence,
    tensor_location,
)
from precdoctor.diagnosis.survey.step_facts import StepFacts
from precdoctor.diagnosis.survey.view import Process, RunView

#: Maximum number of skipped steps whose rows are read; bounds the work.
_MAX_EXAMINED = 16


@dataclass(frozen=True)
class Overflow:
    """The place at which one skipped step first became non-finite.

    Attributes:
        row: the first non-finite tensor.
        root, module, module_class, phase: the code that made it.
        path: the tensors before it, and ``row`` itself.
        dtype: format of the computation; autocast computes the gradient of an FP32 weight in FP16 and then widens it.
    """

    row: TensorRow
    root: str
    module: str
    module_class: str
    phase: Phase
    path: tuple[TensorRow, ...]
    dtype: str

    def holds(self, row: TensorRow) -> bool:
        """Whether a tensor belongs to the module or to one inside it."""
        return row.root == self.root and (row.module == self.module or is_below(row.module, self.module))

    def lies_in(self, row: TensorRow) -> bool:
        """Whether a tensor belongs to the module or to one around it."""
        return row.root == self.root and (row.module == self.module or is_below(self.module, row.module))

    def as_evidence(self) -> dict[str, object]:
        """The fixed-shape ``range`` and ``path`` entries of a finding's evidence."""
        return {"range": range_evidence(self.row) | {"dtype": self.dtype}, "path": path_evidence(self.path)}


@dataclass(frozen=True)
class Culprits:
    """The places at which the examined skipped steps first became non-finite."""

    overflows: Sequence[Overflow]

    @property
    def places(self) -> Counter[tuple[str, str]]:
        """The number of steps on which each ``(root, module)`` was the first to overflow."""
        return Counter((o.root, o.module) for o in self.overflows)

    @property
    def most_frequent(self) -> Overflow | None:
        """An overflow at the most frequent place; None if no skipped step was recorded."""
        places = self.places.most_common(1)
        return next((o for o in self.overflows if (o.root, o.module) == places[0][0]), None) if places else None

    @property
    def hits(self) -> int:
        """Number of steps on which the most frequent place was the first to overflow."""
        return max(self.places.values(), default=0)

    def name(self, view: RunView) -> str:
        """The most frequent place, with its root if there are several."""
        overflow = self.most_frequent
        if overflow is None:
            return "an unknown layer"
        several = overflow.module and len(view.models) > 1
        return f"`{overflow.module or overflow.root}`" + (f" of {overflow.root}" if several else "")

    def words(self, view: RunView) -> str:
        """A sentence for the message: which layer overflows first, and on how many steps."""
        overflow = self.most_frequent
        if overflow is None:
            return "No skipped step was recorded with its tensors, so the overflowing layer is unknown."
        when = f"in {self.hits} of {plural(len(self.overflows), 'examined step')}"
        if overflow.phase is Phase.FORWARD:
            return (
                f"The forward pass itself overflows in {self.name(view)} "
                f"({overflow.row.label}, {overflow.dtype}) {when}: no loss scale mends that."
            )
        return f"First to overflow {when}: {overflow.row.label} ({overflow.dtype}), in {overflow.root}."

    def location(self, process: Process, step: int) -> Location:
        """The most frequent place as a finding's location; without any, the backward pass."""
        overflow = self.most_frequent
        if overflow is None:
            return location(None, Phase.BACKWARD, process, step)
        place = (overflow.root, overflow.module)
        return tensor_location(place, overflow.module_class, overflow.row.kind, overflow.phase, process, step)

    def as_evidence(self) -> list[dict[str, object]]:
        """The five most frequent places, with their numbers of steps."""
        return [{"root": k[0], "module": k[1], "steps": n} for k, n in self.places.most_common(5)]


def _computed_in(view: RunView, row: TensorRow) -> str:
    """The dtype that a gradient was computed in: under FP16 autocast float16 for every weight gradient."""
    facts = view.step_facts(row.process, row.step)
    autocast = facts.autocast_dtype if facts is not None else None
    return autocast if autocast == "float16" and row.kind == "weight_grad" else row.dtype


def culprits(view: RunView, process: Process, skipped: Iterable[StepFacts]) -> Culprits:
    """The first non-finite tensor of each examined step: of the forward pass if it has one, else of the backward pass.

    Only the sampled ones among the ``skipped`` steps can be examined.
    """
    sampled = [s.step for s in skipped if s.sampled]
    most = min(len(sampled), _MAX_EXAMINED)
    examined = [sampled[i * len(sampled) // most] for i in range(most)]
    found: list[Overflow] = []
    if not examined:
        return Culprits(found)
    reference = reference_of(view, process, examined[0], frozenset(sampled))
    for step in examined:
        rows = view.rows(process, step)
        forward = [r for r in rows if r.kind in FORWARD_KINDS and r.phase != "recompute"]
        row, masks = suspicious(forward, reference, loss_is_finite=True)
        if row is not None:
            origin = locate_forward(row, rows, masks, view.module_classes)
            path = tuple(path_to(forward, row))
            found.append(Overflow(row, origin.root, origin.module, origin.module_class, Phase.FORWARD, path, row.dtype))
            continue
        gradients = [r for r in rows if r.kind in BACKWARD_KINDS]
        bad = [r for r in gradients if r.bad]
        if bad:
            row = min(bad, key=lambda r: r.position)
            path = tuple(path_to(gradients, row))
            dtype = _computed_in(view, row)
            found.append(Overflow(row, row.root, row.module, row.module_class, Phase.BACKWARD, path, dtype))
    return Culprits(found)
