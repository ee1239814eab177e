"""A function that has no slope anywhere is no matter of scale: the gradient must be led around it."""

from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Finding
from tests.rules.PD208.samples import closed
from tests.support.scanning import scanned


def found(path: Path, function: str) -> Finding:
    run = scanned(closed(function=function, lost=1.0, channels=1.0, zero_gradients=2))
    (finding,) = diagnose(run.write(path), select=["PD208"]).findings
    return finding


@pytest.mark.parametrize("function", ["round", "floor", "ceil", "trunc", "sign"])
def test_a_straight_through_estimate_is_prescribed(function: str, tmp_path: Path) -> None:
    finding = found(tmp_path, function)
    (advice,) = finding.prescriptions
    assert "zero everywhere" in finding.message
    assert advice.snippet.startswith(f"y = x + (torch.{function}(x) - x).detach()")
    assert "input_scale" not in advice.change
    assert advice.predicted["gradient_lost"] == {"from": 1.0, "to": 0.0}


def test_a_bounded_function_is_a_matter_of_scale(tmp_path: Path) -> None:
    finding = found(tmp_path, "tanh")
    assert "zero there" in finding.message
    assert finding.prescriptions[0].change["input_scale"] == 1 / 16
