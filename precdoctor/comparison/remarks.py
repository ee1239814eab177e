"""What else differs between a run and its baseline, without weight: it explains a verdict, or what one rests on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precdoctor.comparison.baseline import roots_of
from precdoctor.comparison.lines import Line
from precdoctor.comparison.pairing import Pairing, subject
from precdoctor.comparison.regressions import Regression
from precdoctor.diagnosis.survey.view import RunView


def remarks(pairing: Pairing, lines: Sequence[Line], regressions: Sequence[Regression]) -> Iterator[str]:
    """Of one run held against a baseline.

    Args:
        lines: of the comparisons, passed or failed.
        regressions: those that were asked for.
    """
    if any(not line.passed for line in lines) and (shapes := _shapes(pairing)) is not None:
        yield shapes
    pinned = any(expected.starts for expected in pairing.expected.values())
    wanted = next((r for r in regressions if r.code == "PD813"), None)
    if wanted is not None and pinned and not any(line.check == wanted.check for line in lines):
        yield (
            f"{wanted.check} compared nothing: the run begins from other weights or data than each run of the "
            "baseline; pin the seed to compare the first step tensor by tensor"
        )


def _shapes(pairing: Pairing) -> str | None:
    """The first tensor of the forward pass, where its shape is another one."""
    forward = [c for c in pairing.common if c[0][2] in ("batch", "input", "output") and c[1].order is not None]
    first = min(forward, key=lambda c: c[1].order or 0, default=None)
    if first is None or first[1].shape == first[2].shape:
        return None
    key, found, expected = first
    return f"{subject(key)} has the shape {list(found.shape)}, in the baseline {list(expected.shape)}"


def provenance_differences(then: Mapping[str, Any], view: RunView) -> Iterator[str]:
    """Versions and sizes of models.

    Args:
        then: the provenance of the baseline.
    """
    before, now = _table(then, "versions"), _table(view.any_facts, "versions")
    for name in ("torch", "cuda"):
        if before.get(name) and now.get(name) and str(before[name]) != str(now[name]):
            yield f"the baseline was recorded with {name} {before[name]}, the run with {now[name]}"
    models = roots_of(view)
    for name, size in _table(then, "roots").items():
        if models.get(name, size) != size:
            yield f"the model changed: {name} has {models[name]}; in the baseline {size}"


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a file that anybody may have edited; empty where it is something else."""
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}
