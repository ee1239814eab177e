"""The zoo, trained once without and once with the recorder, side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import precdoctor
from precdoctor.numerics import EXP_MIN  # noqa: F401 - the package is importable where the children run, too
from precdoctor.runlog.reader import Run

ROOT = Path(__file__).resolve().parents[3]
BOOT = ROOT / "precdoctor" / "recording" / "boot_path"


@dataclass(frozen=True)
class Zoo:
    """What the two children left behind."""

    directory: Path
    plain: dict[str, str]
    recorded: dict[str, str]
    losses: dict[str, list[float]]

    @cached_property
    def _cache(self) -> dict[tuple[str, str], Any]:
        return {}

    def run(self, name: str) -> Run:
        """The run recorded from one specimen."""
        return self._kept(name, "run", lambda: precdoctor.open_run(self.directory / "runs" / name))

    def rows(self, name: str, step: int | None = None, **equal: Any) -> pd.DataFrame:
        """Its tensors rows, those of one step or those whose columns have these values."""
        frame = self._kept(name, "tensors", lambda: self.run(name).tensors())
        for column, value in ({} if step is None else {"step": step}) | equal:
            frame = frame[frame[column] == value]
        return frame

    def steps(self, name: str) -> pd.DataFrame:
        """Its steps rows."""
        return self._kept(name, "steps", lambda: self.run(name).steps()).set_index("step")

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """The data of its events of one kind."""
        frame = self._kept(name, "events", lambda: self.run(name).events())
        return [json.loads(data) | {"step": s} for e, data, s in frame[["event", "data", "step"]].itertuples(False) if e == event]

    def oracle(self, model: str) -> tuple[int, dict[str, str], dict[str, np.ndarray]]:
        """The step a script looked at by itself, the types of what it saw, and the values."""
        facts = json.loads((self.directory / "oracle" / f"{model}.json").read_text())
        with np.load(self.directory / "oracle" / f"{model}.npz") as arrays:
            return facts["step"], facts["types"], dict(arrays)

    def _kept(self, name: str, what: str, make: Any) -> Any:
        if (name, what) not in self._cache:
            self._cache[name, what] = make()
        return self._cache[name, what]
