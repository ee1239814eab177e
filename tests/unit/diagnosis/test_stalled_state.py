"""What FP32 is predicted to do for a state that stands still."""

from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from tests.rules.PD509.samples import stalled
from tests.support.scanning import scanned


@pytest.mark.parametrize(
    ("measured", "missing_in_fp32"),
    [
        ({}, 0.0),
        ({"bits_missing": 20.0}, 4.0),
        ({"dtype": "float16", "value": 0.0, "move": 2.0**-62, "bits_missing": 37.0}, 0.0),
        ({"dtype": "float16", "value": 2.0**-20, "move": 2.0**-50, "bits_missing": 25.0}, 6.0),
    ],
)
def test_fp32_takes_up_what_is_far_below_fp16s_subnormals(
    measured: dict[str, float], missing_in_fp32: float, tmp_path: Path
) -> None:
    """Elements of 2^-20 are 2^-43 apart in FP32, and half of that is 2^-44."""
    (finding,) = diagnose(scanned(stalled(**measured)).write(tmp_path), select=["PD509"]).findings
    assert finding.prescriptions[0].predicted["bits_missing"]["to"] == missing_in_fp32
