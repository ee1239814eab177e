"""Remarks on differences between a run and its baseline that do not decide a verdict, but help to explain it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precdoctor.comparison.baseline import roots_of
from precdoctor.comparison.lines import Line
from precdoctor.comparison.pairing import Pairing, subject
from precdoctor.comparison.regressions import Regression
from precdoctor.diagnosis.survey.view import RunView


def remarks(pairing: Pairing, lines: Sequence[Line], regressions: Sequence[Regression]) -> Iterator[str]:
    """Remarks on the comparison of one run with a baseline; ``regressions`` are the selected ones."""
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
    """A sentence if the first tensor of the forward pass has another shape; None if not."""
    forward = [c for c in pairing.common if c[0][2] in ("batch", "input", "output") and c[1].order is not None]
    first = min(forward, key=lambda c: c[1].order or 0, default=None)
    if first is None or first[1].shape == first[2].shape:
        return None
    key, found, expected = first
    return f"{subject(key)} has the shape {list(found.shape)}, in the baseline {list(expected.shape)}"


def provenance_differences(then: Mapping[str, Any], view: RunView) -> Iterator[str]:
    """Remarks on versions of torch and CUDA and sizes of models that differ from a baseline's provenance ``then``."""
    before, now = _table(then, "versions"), _table(view.any_facts, "versions")
    for name in ("torch", "cuda"):
        if before.get(name) and now.get(name) and str(before[name]) != str(now[name]):
            yield f"the baseline was recorded with {name} {before[name]}, the run with {now[name]}"
    models = roots_of(view)
    for name, size in _table(then, "roots").items():
        if models.get(name, size) != size:
            yield f"the model changed: {name} has {models[name]}; in the baseline {size}"


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The table ``name`` of ``data``, which comes from an untrusted file; empty if it is no table."""
    table = data.get(name)
    return table if isinstance(table, Mapping) else {}
