"""Which layers get the advice to scale their branches, and what it predicts."""

from pathlib import Path

import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Prescription
from tests.rules.PD604.samples import residual_stack
from tests.support.training import Training, normal


def advice(path: Path, run: Training) -> Prescription:
    (finding,) = diagnose(run.write(path), select=["PD604"]).findings
    return finding.prescriptions[0]


def test_layers_that_return_more_than_their_branch_are_to_scale_it(tmp_path: Path) -> None:
    """sqrt(1 + (1.4^2 - 1) / 24)^11 is 1.24."""
    found = advice(tmp_path, residual_stack(1.4, branch=1.4, backward=1.4))
    assert found.change["branch_scale"]["to"] == pytest.approx(24**-0.5)
    assert found.predicted["last_to_first_rms"]["from"] == pytest.approx(1.4**11, rel=0.05)
    assert found.predicted["last_to_first_rms"]["to"] == pytest.approx(1.24, abs=0.01)


def test_layers_that_return_their_last_module_are_to_start_with_smaller_weights(tmp_path: Path) -> None:
    run = residual_stack(1.4, branch=1.4, backward=1.4)
    for rows in run.tensors.values():
        for row in rows:
            if row["kind"] == "output" and row["module"].endswith(".fc"):
                row.update(normal(1.4 ** int(row["module"].split(".")[1])))
    assert advice(tmp_path, run).change["initial_gain"]["from"] == pytest.approx(1.4, rel=0.01)
