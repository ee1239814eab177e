"""Where a schedule that ends too early is to be advanced."""

from pathlib import Path

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Prescription
from tests.rules.PD511.samples import per_micro_batch, rates
from tests.support.training import Training


def advice(path: Path, run: Training) -> Prescription:
    (finding,) = diagnose(run.write(path), select=["PD511"]).findings
    return finding.prescriptions[0]


def test_a_schedule_that_is_as_long_as_the_micro_batches_counts_optimizer_steps(tmp_path: Path) -> None:
    found = advice(tmp_path, per_micro_batch())
    assert found.change["schedule"]["to"] == "per optimizer step"
    assert "each of its 8 micro-batches: idle steps 70 -> 0" in found.title


def test_any_other_counts_epochs(tmp_path: Path) -> None:
    assert advice(tmp_path, rates(1e-3, 1e-4, 0.0)).change["schedule"]["to"] == "per epoch"


def test_a_schedule_of_another_length_counts_epochs_with_micro_batches_as_well(tmp_path: Path) -> None:
    run = per_micro_batch(40)
    for row in run.step_rows.values():
        row["micro_steps"] = 4
    assert advice(tmp_path, run).change["schedule"]["to"] == "per epoch"
