"""The published JSON Schemas."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def schema(name: str = "diagnosis") -> dict[str, Any]:
    """``diagnosis``, ``whatif``, ``shadow`` or ``trial``."""
    file = resources.files("precdoctor.reporting") / "schema" / f"{name}-1.schema.json"
    loaded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return loaded
