"""FP32 is prescribed only to runs that compute in something narrower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precdoctor.diagnosis.advice.narrow_formats import widened
from precdoctor.diagnosis.engine import diagnose
from tests.support.training import Training


@pytest.mark.parametrize(
    ("dtype", "weights", "step", "narrow"),
    [
        ("float32", "float32", {}, False),
        ("float64", "float64", {}, False),
        ("float16", "float32", {}, True),
        ("float32", "bfloat16", {}, True),
        ("float32", "float32", {"autocast_dtype": "bfloat16"}, True),
    ],
)
def test_a_loss_in_fp32_is_no_advice_to_a_run_in_fp32(
    dtype: str, weights: str, step: dict[str, Any], narrow: bool, tmp_path: Path
) -> None:
    run = Training(dtype=dtype, weight_dtype=weights).poison(7, "loss")
    for row in run.step_rows.values():
        row |= step
    finding = diagnose(run.write(tmp_path / "run")).findings[0]
    (prescription,) = finding.prescriptions
    assert finding.code == "PD103"
    assert ("FP32" in prescription.title) is narrow
    assert ("autocast" in prescription.snippet) is narrow
    assert "isfinite(loss)" in prescription.snippet


@pytest.mark.parametrize(
    ("dtype", "expression"), [("float16", "x.float()"), ("float8_e4m3fn", "x.float()"), ("float32", "x"), ("", "x")]
)
def test_what_is_wide_is_not_widened(dtype: str, expression: str) -> None:
    assert widened("x", dtype) == expression
