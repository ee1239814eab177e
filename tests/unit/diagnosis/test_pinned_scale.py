"""The advice for a loss scale that no skipped step lowers."""

from pathlib import Path

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Prescription
from tests.rules.PD301.samples import pinned, skips_every_step
from tests.support.training import Training


def advice(path: Path, run: Training) -> list[Prescription]:
    (finding,) = diagnose(run.write(path), select=["PD301"]).findings
    return list(finding.prescriptions)


def test_a_scale_that_the_script_sets_is_to_be_halved_by_update(tmp_path: Path) -> None:
    (halve,) = advice(tmp_path, pinned())
    assert halve.predicted == {"skipped_steps": {"from": 40, "to": 18}}
    assert "scaler.update()" in halve.snippet


def test_a_scale_that_falls_is_halved_already(tmp_path: Path) -> None:
    assert all("scale_after_skip" not in p.change for p in advice(tmp_path, skips_every_step()))
