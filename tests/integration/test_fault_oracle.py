"""A handful of the corpus under its oracle: the rest is checked by ``make faults``."""

import pytest

from benchmarks.faults.oracle import disagreements, run
from benchmarks.faults.truth import load

#: One each of forward in a helper module, backward, optimizer, and healthy with backoffs.
HANDFUL = ["gcn/train", "realnvp_rings", "tabular_half", "cnn_fresh_scaler"]


@pytest.mark.parametrize("name", HANDFUL)
def test_truth_is_what_the_oracle_sees(name):
    truth = next(t for t in load() if t.name == name)

    assert disagreements(truth, run(truth)) == []
