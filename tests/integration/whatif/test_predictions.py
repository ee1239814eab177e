"""What `make predictions` does, small: record a run, cast its tensors for real, hold the predictions against that."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "predictions.py"


@pytest.mark.slow
def test_real_casts_of_recorded_tensors_lie_between_the_ends(tmp_path):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("benchmarks_predictions", SCRIPT)
    predictions = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = predictions  # dataclasses look their module up
    spec.loader.exec_module(predictions)
    sizes = ["--steps=2", "--every=1", "--width=32", "--layers=1"]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "precdoctor",
            "record",
            "-o",
            "run",
            "--",
            sys.executable,
            SCRIPT,
            "--train",
            "kept.npz",
            *sizes,
        ],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    outcomes = predictions.compare(tmp_path / "run", tmp_path / "kept.npz")
    assert len(outcomes) == len(predictions.RECIPES)
    for label, outcome in outcomes.items():
        assert outcome.tensors >= 20, label
        assert outcome.inside == [outcome.tensors] * 3, label
        assert outcome.flushed[1] == pytest.approx(outcome.flushed[0], rel=0.2, abs=0.003 * outcome.elements), label
    page = predictions.page(outcomes)
    assert page.splitlines()[0] == (ROOT / "docs" / "predictions.md").read_text().splitlines()[0]
