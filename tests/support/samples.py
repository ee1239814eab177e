"""What a rule's sample is, and where the samples are.

``tests/rules/<CODE>/samples.py`` holds ``FIRING`` (name -> :class:`Sample`) and ``HEALTHY`` (name -> function making a
training), both made of synthetic rows. Beside it, ``firing/<name>/`` and ``healthy/<name>/`` hold scripts as people
write them: ``train.py``, the log recorded from it in ``run/``, and for a firing one ``expected.json``: what its only
finding must say of itself. What depends on how a machine rounds is left out. ``make samples`` records the logs again.
"""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from precdoctor.diagnosis.advice.prescription_order import is_worthwhile
from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.runlog.atomic import jsonable
from tests.support.training import Training

PATH_KEYS = {"module", "kind", "name", "dtype", "order", "amax", "headroom_binades", "nan", "inf"}
RANGE_KEYS = {"dtype", "amax", "amin_nonzero", "exp_lo", "exp_hist"}
RULES_DIRECTORY = Path(__file__).parents[1] / "rules"


@dataclass(frozen=True)
class Sample:
    """A run that must give exactly one finding of its rule, and how that one must look; ``...``: whatever it is."""

    make: Callable[[], Training]
    step: Any = ...
    module: Any = ...
    kind: Any = ...
    cause: Any = ...
    severity: Any = "error"
    last_finite: Any = ...
    rank: Any = 0
    #: Pieces of the title or message.
    says: tuple[str, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)
    #: Codes of other rules that rightly speak up as well.
    also: frozenset[str] = frozenset()
    #: Codes, or their beginnings, that its severity depends on.
    weighed_by: tuple[str, ...] = ()
    #: No tensor stands behind it: no range and no path.
    bare: bool = False


def codes() -> list[str]:
    """The rules that have samples."""
    return sorted(p.name for p in RULES_DIRECTORY.iterdir() if p.name.startswith("PD"))


def firing() -> Iterator[tuple[str, str, Sample]]:
    """(code, name, sample) of every synthetic sample that must fire."""
    for code in codes():
        for name, sample in importlib.import_module(f"tests.rules.{code}.samples").FIRING.items():
            yield code, name, sample


def healthy() -> Iterator[tuple[str, str, Callable[[], Training]]]:
    """(code, name, maker) of every synthetic sample that must not."""
    for code in codes():
        for name, make in importlib.import_module(f"tests.rules.{code}.samples").HEALTHY.items():
            yield code, name, make


def recorded(which: str) -> list[tuple[str, Path]]:
    """(code, sample folder) of every recorded sample in ``firing`` or ``healthy``."""
    return sorted((p.parents[2].name, p.parent) for p in RULES_DIRECTORY.glob(f"PD*/{which}/*/train.py"))


def check_form(finding: Finding, *, bare: bool) -> None:
    """What every finding owes its reader."""
    assert 0.0 < finding.confidence < 1.0
    assert finding.evidence["confidence_reason"]
    assert any(c.isdigit() for c in finding.message)
    assert "limit" in finding.message or bare
    assert finding.prescriptions
    assert is_worthwhile(finding.prescriptions[0]), finding.prescriptions[0].predicted
    for prescription in finding.prescriptions:
        assert any(c.isdigit() for c in prescription.title), prescription.title
        assert prescription.change
        assert prescription.predicted
        compile(prescription.snippet, "<snippet>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    json.dumps(jsonable(finding), allow_nan=False)
    if not bare and "range" in finding.evidence:
        assert finding.evidence["range"].keys() - {"tensor"} == RANGE_KEYS
    for entry in finding.evidence.get("path", ()):
        assert entry.keys() == PATH_KEYS
    assert len(finding.evidence.get("path", ())) <= 8
