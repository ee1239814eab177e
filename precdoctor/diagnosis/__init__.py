"""Findings from a recorded run: :func:`diagnose` runs the rules and returns values of :mod:`.claims.finding`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precdoctor.diagnosis.claims.finding import Diagnosis, Finding
    from precdoctor.diagnosis.engine import diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]
_HOMES = {"Diagnosis": "claims.finding", "Finding": "claims.finding", "diagnose": "engine"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: code that needs only the finding classes should not load pandas."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
