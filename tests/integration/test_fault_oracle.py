"""A handful of the corpus under its oracle: the rest is checked by ``make faults``."""

import dataclasses

import pytest

from benchmarks.faults import twins
from benchmarks.faults.oracle import disagreements, run
from benchmarks.faults.truth import load

#: One each of forward in a helper module, backward, optimizer, and healthy with backoffs.
HANDFUL = ["nonfinite/gcn/train", "nonfinite/realnvp_rings", "nonfinite/tabular_half", "healthy/cnn_fresh_scaler"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HANDFUL)
def test_truth_is_what_the_oracle_sees(name):
    truth = next(t for t in load() if t.name == name)

    assert disagreements(truth, run(truth)) == []


@pytest.mark.slow
def test_a_quiet_fault_is_in_the_script_and_not_in_its_twin(monkeypatch):
    truth = next(t for t in load("extension") if t.name == "underflow/depth_maps")
    facts = {twin: twins.measure(truth, twin) for twin in (False, True)}
    monkeypatch.setattr(twins, "measure", lambda _, twin: facts[twin])

    assert twins.disagreements(truth) == []
    assert len(twins.disagreements(dataclasses.replace(truth, script_range=(0.0, 0.1)))) == 1
    assert len(twins.disagreements(dataclasses.replace(truth, twin_range=(0.1, 1.0)))) == 1
    assert len(twins.disagreements(dataclasses.replace(truth, costs=1e9))) == 1
