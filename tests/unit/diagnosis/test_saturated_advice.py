"""What is to be made smaller before a saturated function: the weights, or the input of the model."""

from pathlib import Path

import numpy as np
import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Prescription
from tests.rules.PD203.samples import before_tanh
from tests.support.training import NUMEL, Training, histogram, tensor


def reads(rms: float, *, first: bool = True) -> Training:
    """``qkv`` is saturated; it is the first to read the input of the model, or others are."""
    run = before_tanh(40.0)
    for step, rows in run.tensors.items():
        if first:
            rows[:] = [r for r in rows if r["kind"] != "output" or r["module"] not in ("emb", "blocks.0.norm")]
        rows.append(tensor(step, "batch", "", -1) | histogram(np.full(NUMEL, rms)))
    return run


def advice(path: Path, run: Training) -> Prescription:
    (finding,) = diagnose(run.write(path), select=["PD203"]).findings
    return finding.prescriptions[0]


def test_an_input_that_is_not_normalised_is_to_be(tmp_path: Path) -> None:
    found = advice(tmp_path, reads(40.0))
    assert found.change["input_rms"] == {"from": pytest.approx(40.0), "to": 1.0}
    assert found.predicted["saturated_share"]["from"] > 0.8
    assert found.predicted["saturated_share"]["to"] == 0.0


@pytest.mark.parametrize(("rms", "first"), [(1.0, True), (40.0, False)])
def test_else_the_weights_are_too_large(rms: float, first: bool, tmp_path: Path) -> None:
    assert advice(tmp_path, reads(rms, first=first)).change["initial_gain"] == {"divided_by": 64}
